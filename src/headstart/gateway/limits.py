"""What bounds the dispatcher: plain numbers, seconds unless said otherwise."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Limits of one gateway's dispatcher."""

    max_unfinished: int = 4096  # choices held at once; beyond this a submission is answered BUSY
    max_failed_attempts: int = 8  # hand-overs of one choice that may come to nothing
    suspect_after_s: float = 1.0  # silence after which a worker gets no new work
    dead_after_s: float = 3.0  # silence after which its requests fail over
    stale_loop_s: float = 2.0  # heartbeats come but the loop does not: no new work
    wedged_after_s: float = 30.0  # heartbeats come but the loop does not: its requests fail over
    beat_s: float = 0.5  # membership is repeated this often; decode workers take silence for a dead gateway
    resubmit_after_s: float = 2.0  # an unanswered Submit or Cancel is repeated
    resume_wait_s: float = (
        60.0  # a choice waits this long for a decode worker that is away, its own or a large enough one
    )
    absent_after_s: float = 600.0  # a worker that has been away for so long is no longer reckoned with

    @property
    def running_silence_s(self) -> float:
        """A worker silent about a choice for so long gets the choice again, in case it no longer has it."""
        return 5 * self.resubmit_after_s

    @property
    def max_repeats(self) -> int:
        """Submits left unanswered before the choice is handed over anew: its end was lost on the way."""
        return 2

    @property
    def own_stall_s(self) -> float:
        """A longer gap between two looks at the registry means that we stood still, not the workers."""
        return 2 * self.beat_s
