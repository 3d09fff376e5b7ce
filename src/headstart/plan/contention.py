"""Two workers of one machine that slow each other: a step's end depends on what the other worker is doing meanwhile.

While both compute, a decode step progresses by 1 / (1 + decode_slowed) seconds of its own in a second, a prefill step by
1 / (1 + prefill_slowed). Whenever one begins a step, what is left of the other's is spread out anew.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from headstart.core.clock import Clock
from headstart.plan.cost import Contention, CostModel
from headstart.sim.cost import StepShape
from headstart.sim.spec import ClusterSpec

ROUNDING_S = 1e-9
"""A step that has no more left than this is over."""


class Device(Protocol):
    """What a simulated executor is, as far as time goes."""

    finish_at: float | None


@dataclass(slots=True)
class SharedStep:
    """One worker's step: how much it had left, alone, at `since`, and when it ends if nothing else begins."""

    slowed: float
    left_s: float = 0.0
    since: float = 0.0
    ends_at: float = float("-inf")

    def advance(self, now: float, other_until: float) -> None:
        """Note the progress made until `now`, where the other worker has computed until `other_until` or longer."""
        shared_s = max(0.0, min(other_until, now) - self.since)
        alone_s = now - self.since - shared_s
        self.left_s -= shared_s / (1 + self.slowed) + alone_s
        self.since = now


class SharedMachine:
    """Step costs of one prefill and one decode worker, for `attach`ed devices."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._decode = SharedStep(costs.contention.decode_slowed)
        self._prefill = SharedStep(costs.contention.prefill_slowed)
        self._clock: Clock | None = None
        self._devices: dict[str, Device] = {}

    def is_felt(self, spec: ClusterSpec) -> bool:
        """Whether there is contention, and just the two workers that it was measured between."""
        return self._costs.contention != Contention() and (spec.num_prefill, spec.num_decode) == (1, 1)

    def spec(self, spec: ClusterSpec) -> ClusterSpec:
        """`spec` on this machine. Its steps are taken one by one: what one costs is not known before it ends."""
        timing = replace(spec.timing, decode_cost=self.decode_time, prefill_cost=self.prefill_time)
        return replace(spec, timing=timing, modelling=replace(spec.modelling, jumps=False))

    def attach(self, clock: Clock, prefill: Device, decode: Device) -> None:
        """Before the first step."""
        self._clock = clock
        self._devices = {"prefill": prefill, "decode": decode}

    def decode_time(self, shape: StepShape) -> float:
        return self._begin(self._decode, self._costs.decode_time(shape), self._prefill, "prefill")

    def prefill_time(self, shape: StepShape) -> float:
        return self._begin(self._prefill, self._costs.prefill_time(shape), self._decode, "decode")

    def _begin(self, mine: SharedStep, alone_s: float, other: SharedStep, name: str) -> float:
        """Seconds of a step that begins now, as far as can be seen."""
        assert self._clock is not None, "not attached to a cluster"
        now, device = self._clock.now(), self._devices[name]
        is_shared = device.finish_at is not None and other.ends_at > now + ROUNDING_S
        if is_shared:
            other.advance(now, mine.ends_at)
        mine.left_s, mine.since = alone_s, now
        mine.ends_at = now + alone_s
        if is_shared:
            _spread(mine, other, now)
            device.finish_at = other.ends_at
        return mine.ends_at - now


def _spread(a: SharedStep, b: SharedStep, now: float) -> None:
    """Both go on together until the first ends; then the other has the machine for itself."""
    first, last = sorted((a, b), key=lambda step: step.left_s * (1 + step.slowed))
    together_s = first.left_s * (1 + first.slowed)
    first.ends_at = now + together_s
    last.ends_at = first.ends_at + last.left_s - together_s / (1 + last.slowed)
