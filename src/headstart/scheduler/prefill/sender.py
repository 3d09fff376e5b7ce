"""Open writes of a prefill worker: what was posted, the source pages each may still read, and which are overdue."""

from collections.abc import Iterable
from typing import NamedTuple

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError
from headstart.core.messages import ChunkNotice, WorkerRef, encode_notice
from headstart.kv.cache import PrefixCache
from headstart.scheduler.checksums import seal
from headstart.scheduler.prefill.states import Run
from headstart.transfer.contract import PageDigests, Transport


class Write(NamedTuple):
    """An open handle. Its source pages are held in the cache until it has ended."""

    run: Run
    pages: Int32Array


class Sender:
    def __init__(
        self, worker: WorkerRef, page_size: int, cache: PrefixCache, transport: Transport, digests: PageDigests
    ) -> None:
        self._worker = worker
        self._page_size = page_size
        self._cache = cache
        self._transport = transport
        self._digests = digests
        self._writes: dict[int, Write] = {}

    def post(self, run: Run) -> int:
        """Write every computed page not yet posted as one chunk with its own notice; returns their number. The cursor
        moves only when the post succeeded. Raises TransferError."""
        cursor, limit = run.postable(self._page_size)
        if cursor >= limit:
            return 0
        message = run.call.message
        first = message.start // self._page_size
        src, dst = run.lease.pages[cursor:limit], message.dst_pages[cursor - first : limit - first]
        seals = self._seals(run, src) if message.verify else b""
        notice = ChunkNotice(self._worker, message.ref, cursor - first, limit - cursor, run.hit_len, seals)
        handle = self._transport.write(run.call.peer, src, dst, encode_notice(notice))
        self._cache.add_reader(src)
        self._writes[handle] = Write(run, src)
        run.handles.add(handle)
        run.cursor = limit
        return limit - cursor

    def _seals(self, run: Run, src: Int32Array) -> bytes:
        start = run.cursor * self._page_size
        return seal(self._digests.digest(src), run.call.message.tokens, start, self._page_size)

    def close(self, handle: int) -> Run | None:
        """The handle has ended. Returns its run, or None for a handle that is not open."""
        write = self._writes.pop(handle, None)
        if write is None:
            return None
        self._cache.drop_reader(write.pages)
        write.run.handles.remove(handle)
        return write.run

    def __len__(self) -> int:
        return len(self._writes)

    def overdue(self, now: float) -> dict[str, list[Write]]:
        """By peer, the writes whose call is past its deadline."""
        late: dict[str, list[Write]] = {}
        for write in self._writes.values():
            if write.run.call.deadline <= now:
                late.setdefault(write.run.call.peer, []).append(write)
        return late

    def check(self, runs: Iterable[Run]) -> None:
        """Raise InvariantError unless open writes and the handles of open runs are the same, and their pages leased."""
        handles = {handle: run for run in runs for handle in run.handles}
        if {handle: write.run for handle, write in self._writes.items()} != handles:
            raise InvariantError("an open write has no open run, or a run an unknown write")
        if any(not set(write.pages.tolist()) <= set(write.run.lease.pages.tolist()) for write in self._writes.values()):
            raise InvariantError("an open write may read a page that its run does not lease")
