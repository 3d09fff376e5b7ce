"""What a world is made of."""

from dataclasses import dataclass, field
from typing import Literal

from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import MakePolicy, prefix_affinity
from headstart.scheduler.limits import DecodeLimits, PrefillLimits
from headstart.sim.cost import LinkCost, StepCost, linear_cost
from headstart.sim.watermarks import marks_layout

SMALL_PREFILL = PrefillLimits(max_running_requests=8, chunked_prefill_size=16, credit_tokens=128, capacity_tokens=256)
SMALL_DECODE = DecodeLimits(
    max_running_requests=16,
    max_queued_requests=64,
    context_len=256,
    chunked_prefill_size=16,
    local_prefill_tokens=0,
    num_reserved_decode_tokens=8,
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Virtual seconds."""

    control_delay_s: tuple[float, float] = (0.0001, 0.001)  # uniform, per message
    transfer_delay_s: tuple[float, float] = (0.0001, 0.004)  # uniform, per write, completion and notice
    link: LinkCost | None = None  # in place of the random delay
    prefill_cost: StepCost = field(default_factory=linear_cost)
    decode_cost: StepCost = field(default_factory=linear_cost)
    beat_s: float = 0.5  # between heartbeats
    exit_report_s: float = 0.05  # from a process's end until the launcher has reported it
    restart_s: float | None = None  # from the report until the launcher has started the next incarnation; None: never


@dataclass(frozen=True, slots=True)
class Modelling:
    """How much of the devices is carried out, and how much only counted."""

    content: Literal["watermarks", "none"] = "watermarks"  # none: pools have no memory, outputs depend on no KV
    page_bytes: int | None = None  # of the modelled KV: what links and stats count; None: of the watermarks
    cacheable_calls: bool = False  # prefill workers keep what they compute, also for requests that are uncacheable
    prefill_steps_in_flight: tuple[int, ...] = (1,)  # most of them, of each prefill worker in turn
    decode_steps_in_flight: tuple[int, ...] = (1,)
    jumps: bool = False  # steps that only decode are advanced together; needs content "none" and a fixed control delay


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Sizes and limits of a cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    page_size: int = 4
    prefill_pages: int = 64
    decode_pages: int = 64
    vocab_size: int = 97
    prefill: PrefillLimits = SMALL_PREFILL
    decode: DecodeLimits = SMALL_DECODE
    dispatch: DispatchLimits = field(default_factory=DispatchLimits)
    timing: Timing = field(default_factory=Timing)
    modelling: Modelling = Modelling()
    make_policy: MakePolicy = prefix_affinity
    verify_transfers: bool = True

    def __post_init__(self) -> None:
        low, high = self.timing.control_delay_s
        if self.modelling.jumps and (self.modelling.content != "none" or low != high):
            raise ValueError("jumps need content 'none' and a control delay that is always the same")
        if self.modelling.jumps and (max(self.modelling.decode_steps_in_flight) > 1 or self.decode.num_draft_tokens):
            raise ValueError("jumps need one step in flight and no drafts")

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(PROTOCOL_VERSION, "watermarks", "none", marks_layout(self.page_size))

    @property
    def page_bytes(self) -> int:
        """As links and stats count them."""
        return self.modelling.page_bytes or self.mark_bytes

    @property
    def mark_bytes(self) -> int:
        """As a pool of watermarks holds them."""
        return marks_layout(self.page_size).page_bytes
