"""A decode worker's call to the prefill scheduler, in each of its states.

    waiting ──► computing ──► sending ──► closed (PrefillDone)
       │            │            │
       │            └────────────┴──► ending ──► closed (PrefillFailed | TicketClosed | peer gone: no answer)
       └─────────────────────────────────────► closed

waiting     `Call`: holds nothing.
computing   `Run` with an open `Push`: the push holds a PageLease over the whole prompt and a handle per posted chunk.
sending     the open `Push` alone, all computed and posted; the lease stays until its last handle has ended.
ending      the `Push` alone, as in `sender`: nothing is computed or posted any more.
closed      holds nothing; the sender remembers its ref.

Besides, each step in flight is a reader of the pages that its chunks may touch, whatever has become of their runs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from headstart.core.arrays import Int32Array
from headstart.core.messages import Prefill, WorkerRef
from headstart.kv.cache import Match
from headstart.scheduler.sender import Push, PushKey


@dataclass(slots=True, eq=False)
class Call:
    """A valid Prefill message and who sent it."""

    peer: WorkerRef
    message: Prefill
    deadline: float
    found: Match  # of its prompt, when the cache was last asked
    num_bypassed: int = 0  # by calls admitted while it waited for pages

    @property
    def key(self) -> PushKey:
        return str(self.peer), self.message.ref

    @property
    def end(self) -> int:
        return len(self.message.tokens)

    @property
    def num_expected(self) -> int:
        """Tokens it would compute, as the cache was found."""
        return self.end - self.found.prefix_len


@dataclass(slots=True, eq=False)
class Run:
    """An admitted call that is being computed: `num_computed` tokens have KV, `num_launched` of them or are in flight."""

    message: Prefill
    push: Push
    num_computed: int
    num_launched: int

    @property
    def is_over(self) -> bool:
        """Whether it wants no more of steps: all is computed, or nobody wants it any more."""
        return self.num_to_compute == 0

    @property
    def num_to_compute(self) -> int:
        """Tokens without KV that it still wants, those in flight included."""
        return len(self.message.tokens) - self.num_computed if self.push.is_open else 0

    @property
    def num_to_launch(self) -> int:
        """Tokens that it still wants of steps to come."""
        return len(self.message.tokens) - self.num_launched if self.push.is_open else 0


class Chunk(NamedTuple):
    """A row of a step in flight, which is a reader of the pages it may touch."""

    run: Run
    num_new: int
    pages: Int32Array


class InflightChunks(NamedTuple):
    """The rows of a step in flight, by its number."""

    step_id: int
    chunks: list[Chunk]
