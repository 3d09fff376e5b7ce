"""Where a choice's delta is computed."""

from enum import Enum

from headstart.core.messages import WorkerRef
from headstart.scheduler.decode.prefill_workers import NoPeer, PrefillPeer, PrefillWorkers
from headstart.scheduler.decode.states import Choice
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.tickets import TicketTable


class Local(Enum):
    SHORT = "short"  # out of the step's budget for short deltas
    CHUNKED = "chunked"  # for want of a prefill worker, or of time to wait for one


LATER = NoPeer.LATER


class Placement:
    """Short deltas and those that nobody else can compute in time stay here; the rest go where there is credit."""

    def __init__(self, limits: DecodeLimits, links: PrefillWorkers, calls: TicketTable) -> None:
        self._limits = limits
        self._links = links
        self._calls = calls

    def is_short(self, choice: Choice, start: int) -> bool:
        return len(choice.sequence) - 1 - start <= self._limits.local_prefill_tokens

    def pick(
        self, choice: Choice, start: int, planned: dict[WorkerRef, list[int]], now: float
    ) -> Local | PrefillPeer | NoPeer:
        """For the delta [start, end). `planned` are prompt tokens of calls about to be opened; LATER where it waits."""
        if self.is_short(choice, start):
            return Local.SHORT
        if now >= choice.half_time:
            return Local.CHUNKED

        def usage(worker: WorkerRef) -> tuple[int, int]:
            num_calls, num_tokens = self._calls.usage(worker)
            soon = planned.get(worker, ())
            return num_calls + len(soon), num_tokens + sum(soon)

        end = len(choice.sequence) - 1
        link = self._links.choose(choice.ranking, end, choice.failed_on, usage, now)
        return Local.CHUNKED if link is NoPeer.NEVER else link
