"""Two workers of one machine that slow each other: step costs that depend on what the other is doing.

A step that is launched while the other worker's runs takes `1 + slowed` times as long for as long as that one still
runs. A prefill step that begins while the decode worker runs is taken to be slowed to its end, since decode steps follow
each other; one that is under way when decoding begins is not slowed any more.
"""

from dataclasses import replace

from headstart.core.clock import Clock
from headstart.plan.cost import Contention, CostModel
from headstart.sim.cost import StepShape
from headstart.sim.spec import WorldSpec


class SharedMachine:
    """Step costs of one prefill and one decode worker. Costs nothing before `attach`ed to a world's clock."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._clock: Clock | None = None
        self._decode_ends = self._prefill_ends = float("-inf")

    def attach(self, clock: Clock) -> None:
        self._clock = clock

    def is_felt(self, spec: WorldSpec) -> bool:
        """Whether there is contention, and just the two workers that it was measured between."""
        return self._costs.contention != Contention() and (spec.num_prefill, spec.num_decode) == (1, 1)

    def spec(self, spec: WorldSpec) -> WorldSpec:
        """`spec` on this machine. Its steps are taken one by one: what one costs is not known before it begins."""
        timing = replace(spec.timing, decode_cost=self.decode_time, prefill_cost=self.prefill_time)
        return replace(spec, timing=timing, modelling=replace(spec.modelling, jumps=False))

    def decode_time(self, shape: StepShape) -> float:
        now, alone_s = self._now(), self._costs.decode_time(shape)
        slowed = 1 + self._costs.contention.decode_slowed
        busy_s = max(0.0, min(self._prefill_ends - now, alone_s * slowed))
        seconds = busy_s + alone_s - busy_s / slowed
        self._decode_ends = now + seconds
        return seconds

    def prefill_time(self, shape: StepShape) -> float:
        now, seconds = self._now(), self._costs.prefill_time(shape)
        if self._decode_ends >= now:
            seconds *= 1 + self._costs.contention.prefill_slowed
        self._prefill_ends = now + seconds
        return seconds

    def _now(self) -> float:
        assert self._clock is not None, "not attached to a world"
        return self._clock.now()
