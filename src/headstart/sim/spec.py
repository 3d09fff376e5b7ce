"""What a world is made of."""

from dataclasses import dataclass, field

from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.gateway.limits import DispatchLimits
from headstart.scheduler.limits import DecodeLimits, PrefillLimits
from headstart.sim.executor import StepTime, linear_step_time
from headstart.sim.watermarks import MARK_BYTES

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
    step_time: StepTime = field(default_factory=linear_step_time)
    beat_s: float = 0.5  # between heartbeats
    exit_report_s: float = 0.05  # from a process's end until the launcher has reported it
    restart_s: float | None = None  # from the report until the launcher has started the next incarnation; None: never


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

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(PROTOCOL_VERSION, "watermarks", self.page_size, "uint64", 1, 1, 1, "none")

    @property
    def page_bytes(self) -> int:
        return self.page_size * MARK_BYTES
