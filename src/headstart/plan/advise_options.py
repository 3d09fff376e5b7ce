"""What a user may set for `headstart plan`, besides bench's workloads and simulate's hardware. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Positional

from headstart.bench.options import (
    LengthOptions,
    LoadOptions,
    Options,
    OrderOptions,
    OutputOptions,
    PrefixOptions,
    TargetOptions,
    TraceOptions,
)
from headstart.config.errors import require
from headstart.plan.options import ClusterOptions, CostOptions, DeploymentOptions, LimitOptions, SheetOptions


@dataclass(frozen=True)
class Targets:
    """What latencies must hold. None: no target."""

    ttft_p50_ms: float | None = None
    """Most milliseconds to the first token for half of the requests."""
    ttft_p99_ms: float | None = None
    """The same for 99 % of the requests."""
    itl_p50_ms: float | None = None
    """Most milliseconds between tokens for half of the tokens."""
    itl_p99_ms: float | None = None
    """The same for 99 % of the tokens."""

    def __post_init__(self) -> None:
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name.replace('_', '-')} must be positive, got {value}")

    @property
    def ttft_ms(self) -> float | None:
        """What one request's time to first token is held against: nearly all of them must be below."""
        return self.ttft_p99_ms if self.ttft_p99_ms is not None else self.ttft_p50_ms

    @property
    def itl_ms(self) -> float | None:
        """What one request's mean time per output token is held against."""
        return self.itl_p99_ms if self.itl_p99_ms is not None else self.itl_p50_ms

    @property
    def are_given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    @property
    def tightest_itl_ms(self) -> float | None:
        given = [value for value in (self.itl_p50_ms, self.itl_p99_ms) if value is not None]
        return min(given, default=None)


@dataclass(frozen=True)
class PlanOptions:
    """All of them."""

    workload: Positional[Literal["shared-prefix", "multi-turn", "no-reuse", "trace"]] = "shared-prefix"
    """What is sent."""
    trace_file: Positional[str] = ""
    """trace: the recorded file."""
    cards: int | Literal["auto"] = 8
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
    prefix: PrefixOptions = field(default_factory=PrefixOptions)
    order: OrderOptions = field(default_factory=OrderOptions)
    length: LengthOptions = field(default_factory=LengthOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    load: LoadOptions = field(default_factory=LoadOptions)

    @property
    def bench(self) -> Options:
        """The same workload for `headstart bench`."""
        parts = (self.prefix, self.order, self.length, self.trace, self.load)
        return Options(self.workload, self.trace_file, *parts, TargetOptions(), OutputOptions())

    @property
    def deployment(self) -> DeploymentOptions:
        """One prefill and one decode worker; their numbers are what is sought."""
        return DeploymentOptions(cost=self.cost, sheet_rates=self.sheet_rates, cluster=self.cluster, limits=self.limits)
