"""A decode worker's call to the prefill scheduler, in each of its states.

    waiting ──► computing ──► flushing ──► closed (PrefillDone)
       │            │             │
       │            └─────────────┴──► ending ──► closed (PrefillFailed | TicketClosed | peer gone: no answer)
       └──────────────────────────────────────► closed

waiting     `Call`: holds nothing.
computing   `Run`: a PageLease over the whole prompt, and an open handle per posted chunk.
flushing    the same `Run`, all computed and posted; the lease stays until the last handle has ended.
ending      the same `Run` with an `Ending`: nothing is computed or posted any more; the lease stays as above.
closed      holds nothing; its ref is remembered (`prefill_peers.EndedRefs`).

Invariant: the source pages of an open handle are leased by its run and held by the handle, and a call is answered
only when none of its handles is open.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.core.arrays import Int32Array
from headstart.core.layout import pages_for
from headstart.core.messages import Message, Prefill, TicketRef
from headstart.kv.cache import Match, PageLease

CallKey = tuple[str, TicketRef]
"""(name of the calling decode worker, its ticket and attempt)."""


@dataclass(slots=True, eq=False)
class Call:
    """A valid Prefill message and who sent it."""

    peer: str
    message: Prefill
    deadline: float
    found: Match  # of its prompt on arrival
    num_bypassed: int = 0  # by calls admitted while it waited for pages

    @property
    def key(self) -> CallKey:
        return self.peer, self.message.ref

    @property
    def end(self) -> int:
        return len(self.message.tokens)

    @property
    def num_expected(self) -> int:
        """Tokens it would compute, as its arrival found the cache."""
        return self.end - self.found.prefix_len


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run stops, as the answer its caller gets; None when nobody is left to answer."""

    answer: Message | None


@dataclass(slots=True, eq=False)
class Run:
    """An admitted call. `cursor` is the first page of the prompt not yet posted; it only grows."""

    call: Call
    lease: PageLease
    hit_len: int
    num_computed: int
    cursor: int
    handles: set[int] = field(default_factory=set)
    ending: Ending | None = None

    @property
    def num_left(self) -> int:
        return self.call.end - self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Tokens it still wants of steps: none once it is ending."""
        return self.num_left if self.ending is None else 0

    def is_flushed(self, page_size: int) -> bool:
        return self.num_left == 0 and self.cursor == pages_for(self.call.end, page_size)

    def postable(self, page_size: int) -> tuple[int, int]:
        """Pages [cursor, limit) of the prompt that are computed and not yet posted; a partial page only at the end."""
        if self.num_left == 0:
            return self.cursor, pages_for(self.call.end, page_size)
        return self.cursor, max(self.cursor, self.num_computed // page_size)


class Chunk(NamedTuple):
    """A row of the launched step: the pages it may touch are held until its output."""

    run: Run
    num_new: int
    pages: Int32Array
