"""Turns "auto" into numbers, once, from what is known about the machine and the model."""

from dataclasses import dataclass
from math import inf

from headstart.config.errors import require
from headstart.config.settings import LEAST_AUTO_PAGE, CacheSettings, StepSettings, TransferSettings, WorkerSettings
from headstart.core.layout import page_floor, pages_for

CHUNK_S = 0.4  # a chunk of --chunked-prefill-size auto aims at this many seconds; half a second is the bound
CHUNK_RANGE = {"cpu": (32, 2048), "cuda": (512, 16384)}
GPU_STEP_STRETCH = 3.0
"""Times that a chunk beside decode rows makes their step longer on a GPU. On a CPU it is --chunked-prefill-size alone."""
MOST_GRAPH_ROWS = 256
CPU_POOL_CONTEXTS = 4
CPU_POOL_MIN_TOKENS = 32_768


@dataclass(frozen=True)
class DeviceFacts:
    """What a worker finds on its machine."""

    device: str
    """"cpu" or "cuda"."""
    free_bytes: int
    """Memory of the device that is free now."""
    num_sharing: int = 1
    """Workers that take their pool from the same memory."""
    total_bytes: int = 0
    """A GPU's whole memory: what --mem-fraction-static is a fraction of there."""
    weight_bytes: int = 0
    """What one worker's weights will take of it."""


@dataclass(frozen=True)
class ModelFacts:
    """What a loaded model tells."""

    max_context_len: int
    """Tokens the model was made for."""
    kv_bytes_per_token: int
    """Bytes that one token of the pool takes: its KV, all layers, and what attention keeps beside the pool for it."""


@dataclass(frozen=True)
class PoolPlan:
    """Size and shape of a worker's pool."""

    page_size: int
    """Tokens of one page."""
    num_pages: int
    """Pages of the pool."""
    context_len: int
    """Longest prompt plus output of one request, in tokens; fits the pool."""
    owner_pages: int | None = None
    """Pages that one tenant may have before its own are evicted first. None: all are alike."""

    @property
    def num_tokens(self) -> int:
        return self.page_size * self.num_pages


@dataclass(frozen=True)
class StepPlan:
    """Bounds of a worker's steps and queues, all in plain numbers."""

    max_running_requests: int
    """Requests in one decode step, or prompts in progress."""
    max_queued_requests: int
    """Requests that may wait."""
    chunked_prefill_size: int
    """Prompt tokens of one step."""
    credit_tokens: int
    """Prompt tokens one decode worker may have open at one prefill worker."""
    local_prefill_tokens: int
    """Tokens of short deltas a decode step may compute."""
    num_reserved_decode_tokens: int
    """Growth set aside for each admitted request, in tokens."""
    itl_slo_s: float | None = None
    """Seconds that a step with decode rows should not exceed. None: no such objective."""
    max_step_stretch: float = inf
    """Times that prompt tokens may make a decode step longer, where there is no objective."""


def resolve_graph_rows(step: StepSettings, max_running_requests: int, device: str) -> int:
    """Decode rows of the largest captured step; 0 where there are no graphs."""
    if device == "cpu":
        return 0
    wanted = step.cuda_graph_max_bs
    return min(max_running_requests, MOST_GRAPH_ROWS) if wanted == "auto" else wanted


def threads_for(num_cores: int, num_compute_workers: int) -> int:
    """Threads of one worker's computation when `num_compute_workers` share `num_cores`."""
    return max(1, num_cores // max(1, num_compute_workers))


def resolve_page_size(cache: CacheSettings, device: str) -> int:
    if cache.page_size != "auto":
        return cache.page_size
    return 64 if device == "cuda" else LEAST_AUTO_PAGE


def resolve_running(step: StepSettings, device: str) -> int:
    """Requests of one decode step."""
    if step.max_running_requests != "auto":
        return step.max_running_requests
    return 256 if device == "cuda" else 64


def resolve_verify(transfer: TransferSettings, device: str) -> bool:
    """Whether a decode worker on `device` verifies the pages that it is sent."""
    return transfer.verify_transfers == "on" or (transfer.verify_transfers == "auto" and device == "cpu")


def resolve_pool(settings: WorkerSettings, facts: DeviceFacts, model: ModelFacts) -> PoolPlan:
    """Choose page size, pool size and context. Raises ConfigError where the pool cannot hold two pages."""
    page_size = resolve_page_size(settings.cache, facts.device)
    wanted = settings.model.context_length
    context_len = model.max_context_len if wanted == "auto" else wanted
    require(
        context_len <= model.max_context_len,
        f"--context-length {context_len} is more than the model's {model.max_context_len}",
    )
    num_tokens = _pool_tokens(settings.cache, facts, model, context_len)
    num_pages = page_floor(num_tokens, page_size) // page_size
    require(num_pages >= 2, _too_few_pages(settings.cache, facts, num_tokens, page_size))
    share = settings.cache.tenant_cache_share
    owner_pages = max(1, int(num_pages * share)) if share < 1 else None
    return PoolPlan(page_size, num_pages, min(context_len, num_pages * page_size), owner_pages)


def _too_few_pages(cache: CacheSettings, facts: DeviceFacts, num_tokens: int, page_size: int) -> str:
    pages = f"fewer than two pages of --page-size {page_size}"
    if cache.max_total_tokens != "auto":
        return f"--max-total-tokens {num_tokens} is {pages}"
    return (
        f"{facts.free_bytes >> 20} MiB are left for {facts.num_sharing} workers, whose weights take "
        f"{facts.weight_bytes >> 20} MiB each: a pool of {num_tokens} tokens, {pages}; give more memory or fewer workers, or raise --mem-fraction-static"
    )


def _pool_tokens(cache: CacheSettings, facts: DeviceFacts, model: ModelFacts, context_len: int) -> int:
    if cache.max_total_tokens != "auto":
        return cache.max_total_tokens
    fraction = cache.mem_fraction_static
    if fraction == "auto":
        fraction = 0.85 if facts.device == "cuda" else 0.4
    if facts.device == "cuda":
        return _card_bytes(facts, fraction) // model.kv_bytes_per_token
    free_bytes = max(0, facts.free_bytes - facts.weight_bytes * facts.num_sharing)
    affordable = int(free_bytes * fraction / max(1, facts.num_sharing)) // model.kv_bytes_per_token
    if cache.mem_fraction_static != "auto":
        return affordable
    return min(affordable, max(CPU_POOL_MIN_TOKENS, CPU_POOL_CONTEXTS * context_len))


def _card_bytes(facts: DeviceFacts, fraction: float) -> int:
    """Bytes of a pool on a GPU: a worker's part of the fraction, less its weights. Raises ConfigError if another process
    has the memory."""
    share = int(facts.total_bytes * fraction / max(1, facts.num_sharing))
    require(
        share > facts.weight_bytes,
        f"the weights take {facts.weight_bytes >> 20} MiB of the GPU; --mem-fraction-static {fraction} leaves a worker "
        f"{share >> 20} MiB",
    )
    require(
        share <= facts.free_bytes,
        f"{facts.free_bytes >> 20} MiB of the GPU's {facts.total_bytes >> 20} MiB are free, but --mem-fraction-static "
        f"{fraction} gives a worker {share >> 20} MiB: another process holds memory of this card; end it or lower the "
        "fraction",
    )
    return share - facts.weight_bytes


def resolve_step(settings: StepSettings, reserved: int, pool: PoolPlan, device: str, tokens_per_s: float) -> StepPlan:
    """Choose the bounds of steps. `tokens_per_s`: prompt tokens this worker computes per second, as measured."""
    running = resolve_running(settings, device)
    chunk = settings.chunked_prefill_size
    if chunk == "auto":
        chunk = auto_chunk(tokens_per_s, pool.page_size, device)
    credit = settings.max_prefill_tokens
    if credit == "auto":
        most: int = min(pool.num_tokens, 4 * pool.context_len)
        credit = most
    local = settings.local_prefill_tokens
    if local == "auto":
        local = 256 if device == "cuda" else pool.page_size
    return StepPlan(
        max_running_requests=running,
        max_queued_requests=settings.max_queued_requests,
        chunked_prefill_size=chunk,
        credit_tokens=credit,
        local_prefill_tokens=local,
        num_reserved_decode_tokens=reserved,
        itl_slo_s=settings.itl_slo_ms / 1e3 if settings.itl_slo_ms else None,
        max_step_stretch=GPU_STEP_STRETCH if device == "cuda" else inf,
    )


def auto_chunk(tokens_per_s: float, page_size: int, device: str) -> int:
    """Whole pages of prompt that take about CHUNK_S, within the device's range."""
    least, most = CHUNK_RANGE[device]
    tokens = min(max(int(tokens_per_s * CHUNK_S), least), most)
    if tokens == least:
        return pages_for(tokens, page_size) * page_size
    return max(page_size, page_floor(tokens, page_size))
