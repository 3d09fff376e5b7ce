"""What a user may set, as the command line spells it. Flags that mean what SGLang's mean carry SGLang's names.

Every class checks its own fields; what depends on more than one class is checked by `conflicts`.
"""

import json
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from headstart.config.errors import ConfigError, require

Auto = Literal["auto"]

LEAST_AUTO_PAGE = 16
"""Tokens of the smallest page that --page-size auto chooses."""


@dataclass(frozen=True)
class ModelSettings:
    """The model to serve. The gateway and all workers of a cluster must be given the same model."""

    served_model_name: str = ""
    """Name that clients use. Empty: the last part of the model's path."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the weights. dummy: random weights from the model's config alone. Gateway and workers must agree."""
    json_model_override_args: str = "{}"
    """JSON object laid over the model's config. Gateway and workers must agree."""
    context_length: int | Auto = "auto"
    """Longest prompt plus output of one request, in tokens. auto: what the model says, within the pool; for a model with
    two sets of rope factors (longrope) its original context. There gateway and workers must agree."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto: the fastest on this processor. All workers must agree."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where a worker computes. auto: on a GPU if there is one that torch can use."""
    skip_model_self_test: bool = False
    """Serve without comparing the loaded model's logits with the library's own first. Saves about a second; a model that
    fails the test answers wrongly."""
    tp_size: int = 1
    """GPUs that share one worker's tensors. Only 1 is built."""

    def __post_init__(self) -> None:
        require(
            self.context_length == "auto" or self.context_length >= 2,
            f"--context-length must be auto or at least 2 tokens, got {self.context_length}",
        )
        try:
            overrides = json.loads(self.json_model_override_args)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--json-model-override-args is not JSON: {error}") from error
        require(isinstance(overrides, dict), "--json-model-override-args must be a JSON object")
        require(self.tp_size >= 1, f"--tp-size must be at least 1, got {self.tp_size}")


@dataclass(frozen=True)
class CacheSettings:
    """The KV pool and the radix cache of one worker."""

    page_size: int | Auto = "auto"
    """Tokens of one KV page. auto: 16 on a CPU, 64 on a GPU. Prefill and decode workers must agree."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3"] = "auto"
    """Type of stored KV. auto: that of activations. fp8_e4m3 needs a GPU; its scales are the checkpoint's, or 1. Prefill
    and decode workers must agree."""
    max_total_tokens: int | Auto = "auto"
    """Tokens the pool holds, rounded down to whole pages. auto: what --mem-fraction-static allows."""
    mem_fraction_static: float | Auto = "auto"
    """On a GPU the fraction of its memory for weights and pools, auto: 0.85; workers that share a card divide it. On a CPU
    the fraction of the free memory that pools may take, auto: at most 0.4, and no more than a few contexts."""
    disable_radix_cache: bool = False
    """Keep nothing after a request ends: every prompt is computed and moved whole."""
    disaggregation_decode_enable_radix_cache: bool = False
    """Accepted for scripts that name it: the decode worker's radix cache is on unless --disable-radix-cache."""
    num_reserved_decode_tokens: int = 64
    """Tokens of growth set aside for each admitted request, rounded up to whole pages."""
    tenant_cache_share: float = 1.0
    """Fraction of the pool that the pages of one API key may take before its own are evicted first, however recently
    they were used. 1: no key's pages go before another's. Each worker minds its own pool."""

    def __post_init__(self) -> None:
        require(
            self.page_size == "auto" or 1 <= self.page_size <= 1024,
            f"--page-size must be auto or 1 to 1024 tokens, got {self.page_size}",
        )
        require(
            self.max_total_tokens == "auto" or self.max_total_tokens >= 1,
            f"--max-total-tokens must be auto or positive, got {self.max_total_tokens}",
        )
        require(
            self.mem_fraction_static == "auto" or 0 < self.mem_fraction_static < 1,
            f"--mem-fraction-static must be auto or between 0 and 1, got {self.mem_fraction_static}",
        )
        require(
            self.num_reserved_decode_tokens >= 0,
            f"--num-reserved-decode-tokens must not be negative, got {self.num_reserved_decode_tokens}",
        )
        require(
            0 < self.tenant_cache_share <= 1,
            f"--tenant-cache-share must be above 0 and at most 1, got {self.tenant_cache_share}",
        )


@dataclass(frozen=True)
class StepSettings:
    """What bounds a worker's queues and steps."""

    max_running_requests: int | Auto = "auto"
    """Requests a decode worker runs in one step. auto: 64 on a CPU, 256 on a GPU."""
    max_queued_requests: int = 1024
    """Requests a decode worker lets wait; one more is answered 429."""
    chunked_prefill_size: int | Auto = "auto"
    """Prompt tokens of one step. auto: measured at start so that a step stays under half a second."""
    max_prefill_tokens: int | Auto = "auto"
    """Prompt tokens that one decode worker may have open at one prefill worker. auto: four contexts, within the
    prefill worker's pool."""
    local_prefill_tokens: int | Auto = "auto"
    """Tokens of short prompts that a decode worker computes itself, per step over all requests. auto: one page on a
    CPU, 256 on a GPU. 0: never."""
    itl_slo_ms: float = 0.0
    """Milliseconds between the tokens of a stream that a decode worker aims to keep at the 95th percentile: it computes fewer
    prompt tokens beside decode rows, and lets fewer requests run. 0: no such objective; on a GPU prompt tokens then make a
    step at most three times as long as one without them."""
    stream_interval: int = 1
    """Tokens per streamed message. Only 1 is built."""
    cuda_graph_max_bs: int | Auto = "auto"
    """Most decode rows of a step that is captured as a CUDA graph; larger steps cost the host more. 0: none is captured.
    auto: --max-running-requests, at most 256."""
    watchdog_timeout: float = 300.0
    """Seconds a worker's loop may be stuck before the process ends itself."""
    drain_timeout: float = 30.0
    """Seconds a worker may take to finish what runs after SIGTERM."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--max-running-requests", self.max_running_requests, 1),
            ("--max-queued-requests", self.max_queued_requests, 0),
            ("--chunked-prefill-size", self.chunked_prefill_size, 1),
            ("--max-prefill-tokens", self.max_prefill_tokens, 1),
            ("--local-prefill-tokens", self.local_prefill_tokens, 0),
            ("--stream-interval", self.stream_interval, 1),
            ("--cuda-graph-max-bs", self.cuda_graph_max_bs, 0),
        ):
            require(value == "auto" or value >= least, f"{flag} must be at least {least}, got {value}")
        require(0 <= self.itl_slo_ms < inf, f"--itl-slo-ms must be 0 or more, got {self.itl_slo_ms}")
        require(0 < self.watchdog_timeout < inf, f"--watchdog-timeout must be positive, got {self.watchdog_timeout}")
        require(0 <= self.drain_timeout < inf, f"--drain-timeout must be 0 or more, got {self.drain_timeout}")


@dataclass(frozen=True)
class TransferSettings:
    """How KV pages travel between workers. Prefill and decode workers must agree."""

    disaggregation_transfer_backend: Literal["nixl", "mooncake"] = "nixl"
    """Library that moves pages. Only nixl is built."""
    disaggregation_ib_device: str = ""
    """Network devices for the backend, comma separated. Only empty (it chooses) is built."""
    verify_transfers: Literal["auto", "on", "off"] = "auto"
    """Whether a decode worker compares each page that it was sent with the sender's digest of it. auto: on a CPU, where
    computing a page takes hundreds of times as long. Only decode workers look at it."""


@dataclass(frozen=True)
class ClusterSettings:
    """How the processes of a cluster trust each other. All must agree."""

    cluster_key: str = ""
    """File with the cluster's key pair (`headstart key`). Needed as soon as control messages leave this machine."""
    insecure_control: bool = False
    """Let control messages leave this machine in the clear."""


@dataclass(frozen=True)
class RecordSettings:
    """What a process keeps of its decisions, to repeat them with `headstart replay`."""

    record: str = ""
    """Folder for decision logs, one file a process: everything that its scheduler was told and decided. Prompts and answers
    are in them as token ids; only their owner can read them. Empty: none."""
    record_max_mb: int = 1024
    """Megabytes after which a log ends."""

    def __post_init__(self) -> None:
        require(self.record_max_mb >= 1, f"--record-max-mb must be at least 1, got {self.record_max_mb}")


@dataclass(frozen=True)
class AccessSettings:
    """Who may ask the gateway, and for how much at once."""

    api_key: str = ""
    """Bearer tokens that clients may send, separated by commas. Each has a cache of its own. Empty: none is asked for."""
    api_key_file: str = ""
    """File with such tokens, one a line, in place of --api-key: a command line is no secret."""
    admin_api_key: str = ""
    """Bearer token that may empty caches and see the whole cluster (/flush_cache, /cluster, /metrics). Empty: nobody
    may, but where no keys are set at all and HTTP listens on a loopback address."""
    admin_key_file: str = ""
    """File with that token, in place of --admin-api-key."""
    tenant_max_requests: int = 0
    """Requests that one API key may have open, each choice of `n` counted; one more is answered 429. 0: no bound."""

    def __post_init__(self) -> None:
        require(all(self.api_keys), "--api-key has an empty key between its commas")
        for flag, keys in (("--api-key", self.api_keys), ("--admin-api-key", (self.admin_api_key,))):
            clear = all(key.isascii() and key.isprintable() and key == key.strip() for key in keys)
            require(clear, f"{flag}: a header carries printable ASCII only, without spaces at its ends")
        require(not (self.api_key and self.api_key_file), "--api-key and --api-key-file both name keys; give one")
        require(
            not (self.admin_api_key and self.admin_key_file),
            "--admin-api-key and --admin-key-file both name a key; give one",
        )
        require(
            not self.admin_api_key or self.admin_api_key not in self.api_keys,
            "the key of --admin-api-key or --admin-key-file is also a client's; it must be another",
        )
        require(
            self.tenant_max_requests >= 0,
            f"--tenant-max-requests must not be negative, got {self.tenant_max_requests}",
        )

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(key.strip() for key in self.api_key.split(",")) if self.api_key else ()


@dataclass(frozen=True)
class HttpSettings:
    """How HTTP requests are taken."""

    cors_origins: str = ""
    """Sites whose pages may use the API from a browser, such as https://example.org, separated by commas; * for all.
    Empty: none."""
    strict_fields: bool = False
    """Refuse a request with a field that nobody knows, instead of naming it in x-headstart-ignored-fields."""
    log_requests: bool = False
    """One line in the log for each answer: id, method, path, status, seconds. Prompts are never logged."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            scheme, _, rest = origin.partition("://")
            is_origin = scheme in ("http", "https") and rest and not set(rest) & set("/?# ")
            require(
                origin in ("*", "null") or bool(is_origin),
                f"--cors-origins: {origin!r} is no origin; give scheme, host and port only, such as https://example.org",
            )

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(origin.strip() for origin in self.cors_origins.split(",")) if self.cors_origins else ()


@dataclass(frozen=True)
class GatewaySettings:
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address that HTTP listens on."""
    port: int = 8000
    """Port that HTTP listens on."""
    control_host: str = "127.0.0.1"
    """Address that workers join at. Anything but a loopback address lets other machines in. Not 0.0.0.0 where `serve`
    starts prefill workers: those are reached at this address too."""
    control_port: int | Auto = "auto"
    """Port that workers join at. auto: the one after --port."""
    access: AccessSettings = field(default_factory=AccessSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    load_balance_method: Literal["cache_aware", "least_loaded"] = "cache_aware"
    """How the gateway picks decode workers. cache_aware: the one that probably holds the prompt's prefix, unless its
    queue is long. least_loaded: the one with the fewest requests."""
    request_timeout: float = 600.0
    """Seconds a request may take where the client sets no deadline."""

    def __post_init__(self) -> None:
        require("[" not in self.host, f"--host {self.host}: give an IPv6 address without brackets")
        require(1 <= self.port <= 65535, f"--port must be 1 to 65535, got {self.port}")
        require(
            self.control_port == "auto" or 1 <= self.control_port <= 65535,
            f"--control-port must be auto or 1 to 65535, got {self.control_port}",
        )
        require(
            self.control_port == "auto" or self.control_port != self.port,
            f"--port and --control-port are both {self.port}; they must differ",
        )
        require(0 < self.request_timeout < inf, f"--request-timeout must be positive, got {self.request_timeout}")

    @property
    def resolved_control_port(self) -> int:
        if self.control_port != "auto":
            return self.control_port
        return self.port + 1 if self.port < 65535 else self.port - 1

    @property
    def control_address(self) -> str:
        """Where workers on this machine join: HOST:PORT."""
        host = "127.0.0.1" if self.control_host == "0.0.0.0" else self.control_host
        return f"{host}:{self.resolved_control_port}"


@dataclass(frozen=True)
class WorkerSettings:
    """Everything one prefill or decode worker is started with."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    step: StepSettings = field(default_factory=StepSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    record: RecordSettings = field(default_factory=RecordSettings)


def conflicts(settings: WorkerSettings) -> list[str]:
    """Every combination that is not built or makes no sense, one sentence each, naming the settings involved."""
    model, cache, step = settings.model, settings.cache, settings.step
    found = []
    if model.tp_size > 1:
        found.append(f"--tp-size {model.tp_size} with --device {model.device}: only --tp-size 1 is built.")
    found += _of_devices(model, cache, step)
    if cache.disable_radix_cache and cache.disaggregation_decode_enable_radix_cache:
        found.append("--disable-radix-cache and --disaggregation-decode-enable-radix-cache contradict each other.")
    if step.stream_interval != 1:
        found.append(f"--stream-interval {step.stream_interval}: only 1 is built.")
    least_page = LEAST_AUTO_PAGE if cache.page_size == "auto" else cache.page_size
    if cache.max_total_tokens != "auto" and cache.max_total_tokens < 2 * least_page:
        found.append(
            f"--max-total-tokens {cache.max_total_tokens} with --page-size {cache.page_size}: fewer than two pages of "
            f"{least_page} tokens."
        )
    if cache.max_total_tokens != "auto" and cache.mem_fraction_static != "auto":
        found.append("--max-total-tokens and --mem-fraction-static both set the pool's size; give one.")
    if settings.cluster.cluster_key and settings.cluster.insecure_control:
        found.append("--cluster-key and --insecure-control contradict each other.")
    if settings.transfer.disaggregation_transfer_backend != "nixl":
        found.append(
            f"--disaggregation-transfer-backend {settings.transfer.disaggregation_transfer_backend}: only nixl is built."
        )
    if settings.transfer.disaggregation_ib_device:
        found.append(
            f"--disaggregation-ib-device {settings.transfer.disaggregation_ib_device} with "
            f"--disaggregation-transfer-backend {settings.transfer.disaggregation_transfer_backend}: not built; the "
            "backend chooses its devices."
        )
    return found


def _of_devices(model: ModelSettings, cache: CacheSettings, step: StepSettings) -> list[str]:
    """Conflicts of what only one kind of device can do."""
    found = []
    if model.device == "cpu" and cache.kv_cache_dtype == "fp8_e4m3":
        found.append("--kv-cache-dtype fp8_e4m3 with --device cpu: needs a GPU.")
    if model.device == "cpu" and step.cuda_graph_max_bs not in ("auto", 0):
        found.append(f"--cuda-graph-max-bs {step.cuda_graph_max_bs} with --device cpu: there are no CUDA graphs.")
    if model.device == "cuda" and cache.kv_cache_dtype in ("float32", "float16"):
        found.append(
            f"--kv-cache-dtype {cache.kv_cache_dtype} with --device cuda: only bfloat16 and fp8_e4m3 are built."
        )
    if model.device == "cuda" and model.dtype in ("float32", "float16"):
        found.append(f"--dtype {model.dtype} with --device cuda: only bfloat16 is built.")
    if model.device == "cuda" and cache.page_size not in ("auto", 16, 32, 64, 128):
        found.append(f"--page-size {cache.page_size} with --device cuda: only 16, 32, 64 and 128 are built.")
    return found


def refuse_conflicts(settings: WorkerSettings) -> None:
    """Raise one ConfigError that lists every conflict."""
    if found := conflicts(settings):
        raise ConfigError("these settings do not work together:\n  " + "\n  ".join(found))
