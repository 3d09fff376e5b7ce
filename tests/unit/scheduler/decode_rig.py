"""One decode worker in virtual time. The test plays gateway and prefill workers by hand; the model counts.

A token is followed by the next number, modulo 1000, unless a test scripts something else. KV of a position is a digest
of everything before its end, written into a real pool by steps and by the prefill workers; every row is checked to find
exactly its own prefix on its pages. The ledger is checked after every call.

Steps are computed when they land, in the order of their launch: what a step in flight reads must last until then.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from msgspec import structs

from headstart.core.arrays import EMPTY, Int32Array, int32_array
from headstart.core.batch import Batch, BatchOutput, Row, Sampled
from headstart.core.errors import ErrorCode
from headstart.core.identity import PROTOCOL_VERSION, KVSpec, cache_namespace
from headstart.core.kv_layout import KVLayout
from headstart.core.messages import (
    Cancel,
    CancelTicket,
    ChunkNotice,
    Failed,
    Finished,
    Hello,
    Membership,
    Message,
    PeerState,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Rejected,
    Submit,
    Tokens,
    Welcome,
    WorkerRef,
    encode_notice,
)
from headstart.core.request import ChoiceRef, Request, RequestStats, SamplingParams, StopCriteria
from headstart.kv.cache import PrefixCache
from headstart.kv.ledger import FREE
from headstart.scheduler.checksums import page_checksums
from headstart.scheduler.decode.scheduler import DecodePorts, DecodeScheduler
from headstart.scheduler.limits import DecodeLimits
from headstart.transfer.contract import Notice
from headstart.transfer.digest import HostDigests

GATEWAY = "gateway"
DECODE = WorkerRef("decode-0", 1)
P0 = WorkerRef("prefill-0", 1)
P1 = WorkerRef("prefill-1", 1)
NAMESPACE = cache_namespace()
PAGE_BYTES = 1000
LIMITS = DecodeLimits(
    max_running_requests=8,
    max_queued_requests=32,
    context_len=100_000,
    chunked_prefill_size=16,
    local_prefill_tokens=0,
    num_reserved_decode_tokens=0,
    gateway_silence_s=1e9,
)


def count_up(row: Row) -> int:
    return (int(row.tokens[-1]) + 1) % 1000


class CountingDrafter:
    """Proposes `length` numbers that count up, of which the one at position `wrong_at` in the text, modulo 7, is wrong."""

    def __init__(self, length: int = 3, wrong_at: int = 7) -> None:
        self._length = length
        self._wrong_at = wrong_at

    def propose(self, request: Request, tokens: Int32Array, max_tokens: int) -> Int32Array:
        places = range(len(tokens), len(tokens) + min(self._length, max_tokens))
        right = [(int(tokens[-1]) + 1 + k) % 1000 for k in range(len(places))]
        return int32_array([0 if at % 7 == self._wrong_at else token for at, token in zip(places, right, strict=True)])


JUNK = -1


def marks(namespace: bytes, tokens: Int32Array, start: int, stop: int) -> np.ndarray:
    """What KV of positions [start, stop) looks like."""
    digest, found = hash(namespace), []
    for token in tokens[:stop].tolist():
        digest = hash((digest, token))
        found.append(digest)
    return np.array(found[start:], dtype=np.int64)


class HandClock:
    def __init__(self, rig: "Rig") -> None:
        self._rig = rig

    def now(self) -> float:
        return self._rig.now


class Watched:
    """A cache whose calls are counted by name."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.num_calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        found = getattr(self._cache, name)
        if callable(found):
            self.num_calls[name] += 1
        return found


class Rig:
    """`limits` fields may be given by name. `verifies`: it asks for checksums. `owner_pages` as in PrefixCache. `watches`: its
    cache is a Watched. `max_steps` in flight."""

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        verifies: bool = False,
        owner_pages: int | None = None,
        watches: bool = False,
        max_steps: int = 1,
        drafter: CountingDrafter | None = None,
        **limits: float,
    ) -> None:
        self.now = 0.0
        self.page_size = page_size
        cache = PrefixCache(num_pages, page_size, owner_pages)
        self.cache = Watched(cache) if watches else cache
        self.pool = np.zeros((num_pages, page_size), dtype=np.int64)
        self.mail: list[tuple[str, Message]] = []
        spec = KVSpec(PROTOCOL_VERSION, "model", "none", KVLayout.full(page_size, 1, 1, 1, "uint8"))
        self.digests = HostDigests(self.pool.view(np.uint8))
        clock, post = HandClock(self), lambda to, message: self.mail.append((to, message))
        ports = DecodePorts(b"pool", PAGE_BYTES, clock, post, self.digests if verifies else None, drafter)
        self.limits = replace(LIMITS, **limits)
        self.scheduler = DecodeScheduler(DECODE, spec, self.limits, self.cache, ports)
        self.model: Callable[[Row], int | str | Sampled] = count_up
        self.batches: list[Batch] = []
        self.wakeup: float | None = None
        self.max_steps = max_steps
        self.in_flight: deque[Batch] = deque()
        self._drawn: dict[tuple[int, int], int] = {}  # (step, row) -> its last token

    # ---- driving -----------------------------------------------------------------------------------------------------

    def tell(self, message: Message, sender: str = GATEWAY) -> None:
        self.scheduler.handle(sender, message)
        self.check()

    def advance(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.wakeup = self.scheduler.advance()
        self.check()

    def launch(self) -> Batch | None:
        """Start a step and leave it in flight."""
        assert len(self.in_flight) < self.max_steps
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
            self.in_flight.append(batch)
        self.check()
        return batch

    def land(self) -> Batch:
        """The output of the oldest step in flight comes in."""
        batch = self.in_flight.popleft()
        rows = [self._with_input(row) for row in batch.rows]
        for row in rows:
            self._compute(row)
        sampled = [self._sample(row) for row in rows if row.sample]
        self._drawn.update({(batch.step_id, s.row_id): s.token_ids[-1] for s in sampled if s.token_ids})
        self.scheduler.update(BatchOutput(batch.step_id, tuple(sampled)))
        self.check()
        return batch

    def step(self) -> Batch | None:
        """One whole pass of the loop, which launches all it may, and then the end of the oldest step in flight."""
        self.advance()
        while len(self.in_flight) < self.max_steps and self.launch() is not None:
            pass
        return self.land() if self.in_flight else None

    def run(self, max_steps: int = 1000) -> None:
        """Until a pass launches nothing."""
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError("still running")

    def step_until(self, happened: Callable[[], object], max_steps: int = 300) -> None:
        for _ in range(max_steps):
            if happened():
                return
            self.step()
        raise AssertionError("it does not happen")

    def check(self) -> None:
        """What a step in flight may touch is nobody else's to take, nor to write."""
        self.scheduler.check()
        touched = [row.pages for batch in self.in_flight for row in batch.rows]
        if touched:
            pages = np.unique(np.concatenate(touched))
            assert (self.cache._ledger.state[pages] != FREE).all(), "a page is free while a step may touch it"
            assert not np.isin(pages, self.cache.open_writes()).any(), "a peer may write what a step may touch"

    def _with_input(self, row: Row) -> Row:
        """The row as it is once the token that it waited for is drawn; 0 for one that failed."""
        if row.pending is None:
            return row
        assert row.sample is not None
        token = self._drawn.get((row.pending.step_id, row.pending.row_id), 0)
        sample = structs.replace(row.sample, context=np.append(row.sample.context, np.int32(token)))
        return structs.replace(row, tokens=int32_array([token]), pending=None, sample=sample)

    def _compute(self, row: Row) -> None:
        """Read the row's prefix, write its tokens, drafts included."""
        stop = row.start + len(row.tokens)
        if row.sample is not None:
            whole = np.concatenate((row.sample.context, row.tokens[len(row.tokens) - row.num_drafts :]))
            assert len(whole) == stop
            assert len(row.sample.context) == row.sample.prompt_len + row.sample.output_index
            expected = marks(row.namespace, whole, 0, row.start)
            assert np.array_equal(self.pool[row.pages].reshape(-1)[: row.start], expected), "KV of another prefix"
            written = marks(row.namespace, whole, row.start, stop)
        else:
            before = self.pool[row.pages].reshape(-1)[row.start - 1] if row.start else hash(row.namespace)
            digest, found = int(before), []
            for token in row.tokens.tolist():
                digest = hash((digest, token))
                found.append(digest)
            written = np.array(found, dtype=np.int64)
        flat = self.pool[row.pages].reshape(-1)
        flat[row.start : stop] = written
        self.pool[row.pages] = flat.reshape(-1, self.page_size)

    def _sample(self, row: Row) -> Sampled:
        """What the model says behind the token before the drafts and behind each draft that is what it said."""
        drawn: list[Sampled] = []
        for stop in range(len(row.tokens) - row.num_drafts, len(row.tokens) + 1):
            said = self.model(structs.replace(row, tokens=row.tokens[:stop]))
            if isinstance(said, str):
                return Sampled(row.row_id, (), error=said)
            drawn.append(said if isinstance(said, Sampled) else Sampled(row.row_id, (said,)))
            if stop == len(row.tokens) or drawn[-1].token_ids != (row.tokens[stop],):
                break
        parts = [(each.token_ids, each.logprobs, each.top_logprobs) for each in drawn]
        return Sampled(row.row_id, *(sum(part, ()) for part in zip(*parts, strict=True)))

    # ---- the gateway -------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: list[int] | range, max_new: int = 1, **fields: object) -> ChoiceRef:
        """`fields` are those of Request, StopCriteria and ChoiceRef by their names, `ranking` and `sender`."""
        ref = ChoiceRef(request_id, int(fields.pop("choice", 0)), int(fields.pop("attempt", 0)))  # type: ignore[call-overload]
        ranking, sender = fields.pop("ranking", ()), str(fields.pop("sender", GATEWAY))
        stop = StopCriteria(
            max_new,
            fields.pop("min_new_tokens", 0),
            fields.pop("stop_token_ids", ()),  # type: ignore[arg-type]
        )
        fields.setdefault("remaining_s", 1000.0)
        fields.setdefault("namespace", NAMESPACE)
        request = Request(ref, int32_array(prompt), SamplingParams(), stop, **fields)  # type: ignore[arg-type]
        self.tell(Submit(request, ranking), sender)  # type: ignore[arg-type]
        return ref

    def cancel(self, ref: ChoiceRef, reason: ErrorCode = ErrorCode.CANCELLED) -> None:
        self.tell(Cancel(ref, reason))

    def members(
        self,
        *alive: WorkerRef,
        suspect: tuple[WorkerRef, ...] = (),
        dead: tuple[WorkerRef, ...] = (),
        lock_domain: str = "here",
    ) -> None:
        states = [(alive, "alive"), (suspect, "suspect"), (dead, "dead")]
        peers = tuple(PeerState(ref, f"at {ref}", state, lock_domain) for refs, state in states for ref in refs)
        self.tell(Membership(peers))

    def answer(self, ref: ChoiceRef) -> list[int]:
        """Every token sent for `ref`, in order; indices must follow each other."""
        deltas = [d for _, m in self.mail if isinstance(m, Tokens) for d in m.deltas if d.ref == ref]
        for before, after in pairwise(deltas):
            assert after.index == before.index + len(before.token_ids)
        return [token for delta in deltas for token in delta.token_ids]

    def terminal(self, ref: ChoiceRef) -> Finished | Failed | Rejected | None:
        """The one terminal event of `ref`, if it came; more than one is an error."""
        said = [m for m in self.said(Finished) + self.said(Failed) + self.said(Rejected) if m.ref == ref]
        assert len(said) <= 1, said
        return said[0] if said else None

    def finished(self, ref: ChoiceRef) -> Finished:
        terminal = self.terminal(ref)
        assert isinstance(terminal, Finished), terminal
        return terminal

    def failed(self, ref: ChoiceRef) -> ErrorCode:
        terminal = self.terminal(ref)
        assert isinstance(terminal, Failed | Rejected), terminal
        return terminal.code

    def stats(self, ref: ChoiceRef) -> RequestStats:
        return self.finished(ref).stats

    def said(self, kind: type, to: str | None = None) -> list:  # type: ignore[type-arg]
        return [message for name, message in self.mail if isinstance(message, kind) and to in (None, name)]

    def counter(self, name: str) -> float:
        return self.scheduler.load().counters.get(name, 0)

    # ---- prefill workers ---------------------------------------------------------------------------------------------

    def connect(self, *workers: WorkerRef, credit: int = 10_000, capacity: int = 10_000) -> None:
        """Membership, Hello and Welcome."""
        self.members(*workers)
        self.advance()
        for worker in workers:
            assert self.said(Hello, str(worker))
            self.tell(Welcome(worker, capacity, credit, b"their pool"), str(worker))

    def calls(self, worker: WorkerRef | None = None) -> list[Prefill]:
        return self.said(Prefill, None if worker is None else str(worker))

    def cancels(self, worker: WorkerRef = P0) -> list[CancelTicket]:
        return self.said(CancelTicket, str(worker))

    def notice(
        self,
        call: Prefill,
        first: int = 0,
        count: int | None = None,
        worker: WorkerRef = P0,
        *,
        prefix_len: int = 0,
        rewrite: bool = True,
    ) -> None:
        """The data of a range lands, and then its notice."""
        count = len(call.dst_pages) - first if count is None else count
        if rewrite:
            self.write(call, first, count)
        checksums = self.checksums(call, first, count) if call.verify else b""
        payload = encode_notice(ChunkNotice(worker, call.ref, first, count, prefix_len, checksums))
        self.scheduler.on_transfer(Notice(payload))
        self.check()

    def write(self, call: Prefill, first: int, count: int) -> None:
        """The data of a range lands."""
        for k in range(first, min(first + count, len(call.dst_pages))):
            start = call.start + k * self.page_size
            stop = min(start + self.page_size, len(call.tokens))
            self.pool[call.dst_pages[k], : stop - start] = marks(call.namespace, call.tokens, start, stop)

    def checksums(self, call: Prefill, first: int, count: int) -> bytes:
        """The checksums of a writer that holds the right KV. It writes junk behind the end, as our pool has it there."""
        kept = self.pool.copy()
        self.write(call, first, count)
        digests = self.digests.digest(call.dst_pages[first : first + count])
        self.pool[:] = kept
        return page_checksums(digests, call.tokens, call.start + first * self.page_size, self.page_size)

    def scribble(self, call: Prefill, page: int) -> None:
        """Part of a write has landed."""
        self.pool[call.dst_pages[page]] = JUNK

    def done(self, call: Prefill, prefix_len: int = 0, worker: WorkerRef = P0) -> None:
        self.tell(PrefillDone(call.ref, prefix_len, len(call.tokens) - prefix_len), str(worker))

    def fail(self, call: Prefill, code: ErrorCode = ErrorCode.UNAVAILABLE, worker: WorkerRef = P0) -> None:
        self.tell(PrefillFailed(call.ref, code, "scripted"), str(worker))

    def serve(self, call: Prefill, worker: WorkerRef = P0) -> None:
        """All of it: the pages arrive and the writer is done."""
        self.notice(call, worker=worker)
        self.done(call, worker=worker)

    def serve_open(self) -> bool:
        """Every call that still waits for its data; False if there is none."""
        waiting = [call for call in self.calls() if call.ref in {entry.ref for entry in self.scheduler.open_tickets()}]
        for call in waiting:
            self.serve(call, P1 if call in self.calls(P1) else P0)
        return bool(waiting)

    def run_served(self, max_rounds: int = 100) -> None:
        """To the end, with prefill workers that answer at once."""
        for _ in range(max_rounds):
            self.run()
            if not self.serve_open():
                return
        raise AssertionError("still fetching")

    # ---- pages -------------------------------------------------------------------------------------------------------

    def cached_pages(self, tokens: list[int] | range, namespace: bytes = NAMESPACE) -> int:
        return self.cache.match(namespace, int32_array(tokens)).num_pages

    def is_clean(self) -> bool:
        """Nobody holds anything."""
        counts = self.cache.counts()
        return counts.inflight == counts.private == counts.pinned == 0


__all__ = ["DECODE", "EMPTY", "GATEWAY", "NAMESPACE", "P0", "P1", "PAGE_BYTES", "Int32Array", "Rig", "count_up"]
