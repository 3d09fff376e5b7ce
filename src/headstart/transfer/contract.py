"""What schedulers need of a transfer backend: whole pages, posted without blocking, noticed by the target.

Life of a write: posted -> ended (Completed or WriteFailed), exactly once. A notice reaches the target only after all
bytes of its write did; notices and completions of different writes come in any order. Backends translate vendor
exceptions into these events and TransferError, and never free, reuse or look inside pages.
"""

from typing import Protocol

from msgspec import Struct

from headstart.core.arrays import Int32Array
from headstart.core.errors import HeadstartError


class TransferError(HeadstartError):
    """A call that could not be carried out; nothing of it is in flight."""


class Completed(Struct, frozen=True, tag=True):
    """The write behind `handle` has ended; its source pages may be reused."""

    handle: int


class WriteFailed(Struct, frozen=True, tag=True):
    """The write behind `handle` has ended without completing; some of its bytes may have landed."""

    handle: int
    reason: str


class Notice(Struct, frozen=True, tag=True):
    """`payload` of a completed write into our pool."""

    payload: bytes


class PeerLost(Struct, frozen=True, tag=True):
    """The transport to `peer` is closed. Its requests may fail over; its pages wait for proof of its end."""

    peer: str


TransferEvent = Completed | WriteFailed | Notice | PeerLost


class PageDigests(Protocol):
    """Reads pages of one worker's own pool, so that both ends of a transfer can compare what they hold."""

    def digest(self, pages: Int32Array) -> list[int]:
        """64 bits of each page's bytes: the same on every worker for the same bytes, whatever the page's id. The caller
        sees to it that no launched step writes these pages meanwhile."""
        ...


class Transport(Protocol):
    """One per worker, over one registered KV pool. No call blocks on a peer."""

    def descriptor(self) -> bytes:
        """What a peer passes to `connect` to write into this pool."""
        ...

    def connect(self, peer: str, descriptor: bytes) -> None:
        """Make `peer`'s pool a target. Replaces an earlier connection of that name. Raises TransferError."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget `peer`. Its open handles still end, as WriteFailed if not otherwise. Unknown names are ignored."""
        ...

    def write(self, peer: str, src_pages: Int32Array, dst_pages: Int32Array, notice: bytes) -> int:
        """Post pages `src_pages[i]` -> the peer's `dst_pages[i]` and return a handle. Raises TransferError, and
        ValueError for no pages at all, lists of unequal length, or source pages that this pool does not have."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Everything that happened since the last call, in no particular order between writes."""
        ...

    def close(self) -> None:
        """Release the registration. Outstanding handles are abandoned: what they posted may still land. May be called
        again; `poll` then returns nothing and everything else raises TransferError."""
        ...
