"""Latency targets, and whether a run or one of its requests meets them."""

from dataclasses import dataclass

from headstart.bench.records import RequestRecord
from headstart.config.errors import require


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


@dataclass(frozen=True, slots=True)
class Latencies:
    """Milliseconds."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True)
class Miss:
    target: str
    value_ms: float
    target_ms: float

    @property
    def excess(self) -> float:
        return self.value_ms / self.target_ms - 1

    def __str__(self) -> str:
        over_ms = self.value_ms - self.target_ms
        return f"{self.target} is {self.value_ms:.1f} ms, {over_ms:.1f} ms ({100 * self.excess:.0f} %) over {self.target_ms:g} ms"


def misses(latencies: Latencies, targets: Targets) -> list[Miss]:
    """Targets that are not met."""
    found = []
    for name, label in (
        ("ttft_p50_ms", "TTFT p50"),
        ("ttft_p99_ms", "TTFT p99"),
        ("itl_p50_ms", "ITL p50"),
        ("itl_p99_ms", "ITL p99"),
    ):
        target, value = getattr(targets, name), getattr(latencies, name)
        if target is not None and value > target:
            found.append(Miss(label, value, target))
    return found


def is_good(record: RequestRecord, targets: Targets) -> bool:
    """Whether a request's time to first token and its mean time per output token are within the targets."""
    ttft_ms, tpot_ms = 1e3 * record.ttft_s, 1e3 * (record.tpot_s or 0.0)
    in_time = targets.ttft_ms is None or ttft_ms <= targets.ttft_ms
    return in_time and (targets.itl_ms is None or tpot_ms <= targets.itl_ms)
