"""What a user may set for `headstart simulate` and `headstart plan`. Names as in bench and serve where they mean the same.
Imports nothing heavy: the command line reads this module whatever the subcommand.
"""

from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Positional

from headstart.bench.options import (
    LengthOptions,
    LoadOptions,
    Options,
    OrderOptions,
    PrefixOptions,
    ReportOptions,
    TargetOptions,
    TraceOptions,
)
from headstart.config.errors import require
from headstart.plan.slo import Targets

Auto = Literal["auto"]
Dtype = Literal["float32", "bfloat16", "float16", "fp8"]
LINK_GB_S = (1e-3, 1e6)
"""Least and most GB/s: what is beyond is a mistake."""
MOST_OVERHEAD = 1e7
"""Of the times of a data sheet, whatever their unit."""


@dataclass(frozen=True)
class CostOptions:
    """Where step and transfer times come from: a file, or a card's data sheet and a model's shape."""

    calibrate: str = ""
    """A report of `headstart bench`: fit the coefficients to it."""
    sheet: str = ""
    """A file with coefficients, as --save-sheet writes it."""
    save_sheet: str = ""
    """Write the coefficients that are used to this file."""
    card: str = ""
    """H100, H200, B200 or H20. Empty: H100."""
    model: str = ""
    """Qwen3-1.7B, Qwen3-8B, Qwen3-32B, MiniMax-M2.5, SmolLM2-135M, or a config.json or the folder with one. Empty:
    Qwen3-8B."""
    tp: int = 1
    """Cards of one worker."""
    weight_dtype: Dtype = "bfloat16"
    """Format of the weights."""
    kv_dtype: Dtype = "bfloat16"
    """Format of the KV pool."""

    def __post_init__(self) -> None:
        require(not (self.calibrate and self.sheet), "--calibrate and --sheet both give the coefficients; give one")
        for flag in ("--calibrate", "--sheet"):
            given = self.calibrate if flag == "--calibrate" else self.sheet
            fixed = [f"--{name}" for name in ("card", "model") if getattr(self, name)]
            require(not (given and fixed), f"{flag} {given} holds what {' and '.join(fixed)} would say; give one")
        require(self.tp >= 1, f"--tp must be at least 1, got {self.tp}")


@dataclass(frozen=True)
class SheetOptions:
    """What a data sheet does not say. Shares are of the sheet's rates; auto is what was measured."""

    bandwidth_share: float | Auto = "auto"
    """Of the memory's rate, when weights are read."""
    attention_share: float | Auto = "auto"
    """Of the memory's rate, when attention reads KV. auto: as for weights."""
    compute_share: float | Auto = "auto"
    """Of the arithmetic rate."""
    link_gb_s: float | Auto = "auto"
    """GB/s from one worker to another. auto: the card's links, one for each card of a worker."""
    link_latency_us: float = 20.0
    """Microseconds before a transfer's first byte."""
    step_overhead_ms: float = 0.5
    """Milliseconds of a step that depend on nothing."""
    request_overhead_us: float = 4.0
    """Microseconds of a step for each running request."""
    message_ms: float = 0.2
    """Milliseconds of a control message from one process to another."""

    def __post_init__(self) -> None:
        for flag in ("bandwidth_share", "attention_share", "compute_share"):
            value = getattr(self, flag)
            require(value == "auto" or 0 < value <= 1, f"--{flag.replace('_', '-')} must be above 0 and at most 1")
        slowest, fastest = LINK_GB_S
        is_link = self.link_gb_s == "auto" or slowest <= self.link_gb_s <= fastest
        require(is_link, f"--link-gb-s must be from {slowest:g} to {fastest:g}, got {self.link_gb_s}")
        for flag in ("link_latency_us", "step_overhead_ms", "request_overhead_us", "message_ms"):
            is_time = 0 <= getattr(self, flag) <= MOST_OVERHEAD
            require(is_time, f"--{flag.replace('_', '-')} must be from 0 to {MOST_OVERHEAD:g}")


@dataclass(frozen=True)
class WorkerOptions:
    """How many workers."""

    num_prefill: int = 1
    """Prefill workers. 0: decode workers compute prompts themselves."""
    num_decode: int = 1
    """Decode workers."""

    def __post_init__(self) -> None:
        require(self.num_prefill >= 0, f"--num-prefill must not be negative, got {self.num_prefill}")
        require(self.num_decode >= 1, f"--num-decode must be at least 1, got {self.num_decode}")


@dataclass(frozen=True)
class ClusterOptions:
    """What each worker holds and keeps."""

    pool_tokens: int | Auto = "auto"
    """Tokens of KV that a decode worker holds. auto: what fits the cards beside the weights."""
    prefill_pool_tokens: int | Auto = "auto"
    """Tokens of KV that a prefill worker holds. auto: as many."""
    mem_fraction_static: float = 0.9
    """Share of the cards' memory for weights and KV; 2 GB of each card are kept free besides."""
    page_size: int | Auto = "auto"
    """Tokens of one KV page. auto: what was calibrated, else 64 on a GPU and 16 on a CPU."""
    cache: Literal["both", "prefill"] = "both"
    """Who keeps KV after a request. prefill: decode workers keep none, and their running requests share no pages."""
    disable_radix_cache: bool = False
    """Nobody keeps KV: every prompt is computed and moved whole."""
    naive_attention: bool = False
    """Decode attention reads a shared prefix once for every request that has it."""

    def __post_init__(self) -> None:
        require(0 < self.mem_fraction_static <= 1, "--mem-fraction-static must be above 0 and at most 1")
        for flag in ("pool_tokens", "prefill_pool_tokens"):
            value = getattr(self, flag)
            require(value == "auto" or value >= 1, f"--{flag.replace('_', '-')} must be auto or positive, got {value}")


@dataclass(frozen=True)
class LimitOptions:
    """What bounds the workers' queues and steps. auto: as `headstart serve` resolves it on the same kind of device."""

    context_length: int | Auto = "auto"
    """Longest prompt plus output of one request. auto: what the model says, within the pool."""
    max_running_requests: int | Auto = "auto"
    """Requests that a decode worker runs in one step."""
    max_queued_requests: int = 1024
    """Requests that a decode worker lets wait; one more is refused, which fails the run."""
    chunked_prefill_size: int | Auto = "auto"
    """Prompt tokens of one step."""
    max_prefill_tokens: int | Auto = "auto"
    """Prompt tokens that one decode worker may have open at one prefill worker."""
    local_prefill_tokens: int | Auto = "auto"
    """Tokens of short prompts that a decode worker computes itself, per step. 0: never."""
    num_reserved_decode_tokens: int = 64
    """Tokens of growth set aside for each admitted request, rounded up to whole pages."""
    load_balance_method: Literal["cache_aware", "least_loaded"] = "cache_aware"
    """How the gateway picks decode workers."""
    request_timeout: float = 3600.0
    """Seconds that a request may take; one that takes longer fails the run."""


@dataclass(frozen=True)
class DeploymentOptions:
    """What is simulated."""

    cost: CostOptions = field(default_factory=CostOptions)
    sheet_rates: SheetOptions = field(default_factory=SheetOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)

    def __post_init__(self) -> None:
        is_given = bool(self.cost.calibrate or self.cost.sheet)
        problem = (
            "--link-gb-s and the other rates are of a data sheet; with --sheet or --calibrate edit the file instead"
        )
        require(not is_given or self.sheet_rates == SheetOptions(), problem)


@dataclass(frozen=True)
class TrafficOptions:
    """What the clients send, as to `headstart bench`."""

    workload: Positional[Literal["shared-prefix", "multi-turn", "no-reuse", "trace"]] = "shared-prefix"
    """What is sent."""
    trace_file: Positional[str] = ""
    """trace: the recorded file."""
    prefix: PrefixOptions = field(default_factory=PrefixOptions)
    order: OrderOptions = field(default_factory=OrderOptions)
    length: LengthOptions = field(default_factory=LengthOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    load: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        is_text = self.load.prompt_format == "text"
        require(not is_text, "--prompt-format text: a simulated cluster has no tokenizer; leave it at ids")

    def bench(self, target: TargetOptions, output: ReportOptions) -> Options:
        parts = (self.prefix, self.order, self.length, self.trace, self.load)
        return Options(self.workload, self.trace_file, *parts, target, output)


@dataclass(frozen=True)
class SimulateOptions:
    """`headstart simulate`."""

    traffic: TrafficOptions = field(default_factory=TrafficOptions)
    label: str = ""
    """Name of this deployment in tables and plots. Empty: its workers, as 1P1D."""
    stepping: bool = False
    """Take every decode step by itself instead of many in one jump: the same result, later."""
    deployment: DeploymentOptions = field(default_factory=DeploymentOptions)
    output: ReportOptions = field(default_factory=ReportOptions)

    @property
    def bench(self) -> Options:
        """The same workload for `headstart bench`."""
        return self.traffic.bench(TargetOptions(label=self.label), self.output)


@dataclass(frozen=True)
class PlanOptions:
    """`headstart plan`."""

    traffic: TrafficOptions = field(default_factory=TrafficOptions)
    cards: int | Auto = 8
    """Cards to divide among prefill and decode workers, --tp each. auto: as few as meet the targets."""
    figure: str = ""
    """Draw goodput against the split of the workers into this file, once as PNG and once as SVG."""
    output_file: str = ""
    """JSON report."""
    targets: Targets = field(default_factory=Targets)
    cost: CostOptions = field(default_factory=CostOptions)
    sheet_rates: SheetOptions = field(default_factory=SheetOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)

    @property
    def bench(self) -> Options:
        """The same workload for `headstart bench`."""
        return self.traffic.bench(TargetOptions(), ReportOptions())

    @property
    def deployment(self) -> DeploymentOptions:
        """One prefill and one decode worker; their numbers are what is sought."""
        return DeploymentOptions(cost=self.cost, sheet_rates=self.sheet_rates, cluster=self.cluster, limits=self.limits)
