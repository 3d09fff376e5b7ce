"""Prefill scheduler: turns prompts into KV pages and pushes them to the decode worker that called.

It never samples. A call is validated, waits, reserves its whole prompt at admission, runs in chunks, and each chunk's
whole pages are written as soon as its step is out. `prefill_calls` has the states of a call, what each holds, and the
invariant; `prefill_queue` says who is admitted when, and `prefill_share` how the admitted share the steps.
"""

import math
from collections import Counter
from dataclasses import dataclass

from headstart.core.arrays import EMPTY
from headstart.core.batch import Batch, BatchOutput, Row
from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.identity import KVSpec
from headstart.core.layout import pages_for
from headstart.core.messages import (
    CancelTicket,
    Drain,
    Flush,
    Flushed,
    Hello,
    Message,
    Prefill,
    PrefillDone,
    PrefillFailed,
    TicketClosed,
    WorkerExited,
    WorkerLoad,
    WorkerRef,
)
from headstart.kv.cache import PrefixCache
from headstart.scheduler.limits import PrefillLimits
from headstart.scheduler.prefill.batching import share_out
from headstart.scheduler.prefill.decode_workers import DecodeWorkers
from headstart.scheduler.prefill.queue import PrefillQueue
from headstart.scheduler.prefill.sender import Sender
from headstart.scheduler.prefill.states import Call, CallKey, Chunk, Ending, Run
from headstart.scheduler.prefill.stuck_peers import StuckPeers
from headstart.scheduler.prefill.validation import fault_in
from headstart.scheduler.protocol import Send
from headstart.transfer.contract import (
    Completed,
    PageDigests,
    PeerLost,
    TransferError,
    TransferEvent,
    Transport,
    WriteFailed,
)


@dataclass(frozen=True, slots=True)
class PrefillPorts:
    """How the scheduler reaches the world."""

    transport: Transport
    digests: PageDigests  # of our pool
    clock: Clock
    send: Send


class PrefillScheduler:
    """Satisfies `scheduler.protocol.Scheduler`."""

    def __init__(
        self, worker: WorkerRef, kv_spec: KVSpec, limits: PrefillLimits, cache: PrefixCache, ports: PrefillPorts
    ) -> None:
        self._limits = limits
        self._page_size = kv_spec.page_size
        self._cache = cache
        self._ports = ports
        self._peers = DecodeWorkers(worker, kv_spec, limits, ports.transport)
        self._writes = Sender(worker, kv_spec.page_size, cache, ports.transport, ports.digests)
        self._kills = StuckPeers(cache.num_pages, limits.kill_after_s, self._writes, self._peers)
        self._waiting = PrefillQueue(limits)
        self._runs: dict[CallKey, Run] = {}
        self._step_id = 0
        self._launched: list[Chunk] | None = None
        self._is_draining = False
        self._counters: Counter[str] = Counter()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> None:
        match message:
            case Hello():
                self._on_hello(sender, message)
            case Prefill():
                self._on_prefill(sender, message)
            case CancelTicket():
                self._on_cancel(sender, message)
            case WorkerExited():
                self._on_exited(message.worker)
            case Flush():
                self._on_flush(sender, message)
            case Drain():
                self._is_draining = True
            case _:
                self._counters["stray_messages"] += 1

    def _on_hello(self, sender: str, hello: Hello) -> None:
        if str(hello.worker) != sender or self._peers.is_stale(hello.worker):
            self._counters["stray_messages"] += 1
            return
        for worker in self._peers.former_incarnations(hello.worker):
            self._on_exited(worker)
        answer = self._peers.greet(hello)
        if answer is None:
            self._counters["unreachable_callers"] += 1
        else:
            self._ports.send(sender, answer)

    def _on_prefill(self, sender: str, message: Prefill) -> None:
        key = sender, message.ref
        if key in self._runs or key in self._waiting:
            self._counters["duplicate_calls"] += 1
            return
        if (refusal := self._refusal(sender, message)) is not None:
            self._counters["refused_calls"] += 1
            self._refuse(sender, message, *refusal)
            return
        self._counters["calls"] += 1
        found = self._cache.match(message.namespace, message.tokens if message.cacheable else EMPTY)
        self._waiting.add(Call(sender, message, self._ports.clock.now() + message.remaining_s, found))

    def _refusal(self, sender: str, message: Prefill) -> tuple[ErrorCode, str] | None:
        """Why this call cannot be taken, or None."""
        if message.ref in self._peers.ended(sender):
            return ErrorCode.UNAVAILABLE, "this ticket has ended here"
        if self._is_draining:
            return ErrorCode.UNAVAILABLE, "this prefill worker is draining"
        if not self._peers.is_connected(sender):
            return ErrorCode.UNAVAILABLE, "no connection to the caller's KV pool"
        if (fault := fault_in(message, self._page_size, self._limits.vocab_size)) is not None:
            return ErrorCode.INVALID, fault
        if len(message.tokens) > self._limits.capacity_tokens:
            return ErrorCode.TOO_LONG, f"{len(message.tokens)} tokens; {self._limits.capacity_tokens} fit here"
        if message.remaining_s <= 0:
            return ErrorCode.DEADLINE, "no time left on arrival"
        num_open = self._num_open_tokens(sender)
        if num_open and num_open + len(message.tokens) > self._limits.credit_tokens:
            return ErrorCode.BUSY, f"{num_open} tokens are open already; the credit is {self._limits.credit_tokens}"
        return None

    def _num_open_tokens(self, peer: str) -> int:
        """Prompt tokens of a caller's calls that wait or compute: never more than the caller counts itself."""
        running = sum(run.call.end for run in self._runs_of(peer) if run.num_to_compute)
        return running + sum(call.end for call in self._waiting if call.peer == peer)

    def _refuse(self, sender: str, message: Prefill, code: ErrorCode, reason: str) -> None:
        self._peers.ended(sender).add(message.ref)
        self._ports.send(sender, PrefillFailed(message.ref, code, reason))

    def _on_flush(self, sender: str, message: Flush) -> None:
        if self._runs or self._waiting:
            self._ports.send(sender, Flushed(message.flush_id, ok=False))
        else:
            self._ports.send(sender, Flushed(message.flush_id, ok=True, num_pages=self._cache.flush()))

    def _on_cancel(self, sender: str, message: CancelTicket) -> None:
        closed = TicketClosed(message.ref)
        if (run := self._runs.get((sender, message.ref))) is not None:
            self._counters["cancelled_calls"] += 1
            self._end(run, closed)
            return
        self._waiting.drop(lambda call: call.key == (sender, message.ref))
        self._peers.ended(sender).add(message.ref)
        self._ports.send(sender, closed)

    def _on_exited(self, worker: WorkerRef) -> None:
        """Proof that a decode worker's process has ended: nobody is left to answer."""
        name = str(worker)
        self._waiting.drop(lambda call: call.peer == name)
        for run in self._runs_of(name):
            self._end(run, None)
        self._peers.forget(worker)
        self._kills.forget(name)

    # ---- transfer ----------------------------------------------------------------------------------------------------

    def on_transfer(self, event: TransferEvent) -> None:
        match event:
            case Completed():
                self._close_write(event.handle, None)
            case WriteFailed():
                self._close_write(event.handle, event.reason)
            case PeerLost():
                self._on_peer_lost(event.peer)
            case _:
                self._counters["stray_events"] += 1

    def _close_write(self, handle: int, failure: str | None) -> None:
        run = self._writes.close(handle)
        if run is None:
            self._counters["stray_events"] += 1
        elif failure is not None and run.ending is None:
            self._counters["failed_writes"] += 1
            self._fail(run, ErrorCode.UNAVAILABLE, failure)
        else:
            self._close_if_quiet(run)

    def _on_peer_lost(self, name: str) -> None:
        reason = "the transport to the caller is closed"
        self._peers.lose(name)
        for call in self._waiting.drop(lambda call: call.peer == name):
            self._refuse(name, call.message, ErrorCode.UNAVAILABLE, reason)
        for run in self._runs_of(name):
            if run.ending is None:
                self._fail(run, ErrorCode.UNAVAILABLE, reason)

    def _post(self, run: Run) -> None:
        """A failed post ends the attempt: its range is never posted again under this ref."""
        try:
            self._counters["pages_posted"] += self._writes.post(run)
        except TransferError as error:
            self._counters["failed_writes"] += 1
            self._fail(run, ErrorCode.UNAVAILABLE, str(error))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        if not self._runs:
            return None
        rows: list[Row] = []
        chunks: list[Chunk] = []
        for run, num_new in share_out(self._runs.values(), self._limits.chunked_prefill_size):
            stop = run.num_computed + num_new
            pages = run.lease.pages[: pages_for(stop, self._page_size)]
            message = run.call.message
            tokens = message.tokens[run.num_computed : stop]
            rows.append(Row(len(rows), tokens, run.num_computed, pages, namespace=message.namespace))
            chunks.append(Chunk(run, num_new, pages))
            self._cache.add_reader(pages)
        if not rows:
            return None
        self._step_id += 1
        self._launched = chunks
        return Batch(self._step_id, tuple(rows))

    def update(self, output: BatchOutput) -> None:
        if self._launched is None or self._step_id != output.step_id:
            raise InvariantError(f"output of step {output.step_id}, which is not in flight")
        chunks, self._launched = self._launched, None
        for chunk in chunks:
            self._cache.drop_reader(chunk.pages)
            self._counters["tokens_computed"] += chunk.num_new
            run, message = chunk.run, chunk.run.call.message
            if run.ending is not None:
                continue
            run.num_computed += chunk.num_new
            if message.cacheable:
                self._cache.commit(run.lease, message.tokens, run.num_computed)
            self._post(run)

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self) -> float | None:
        if not self._runs and not self._waiting:
            return None
        now = self._ports.clock.now()
        if self._next_deadline() <= now:
            self._expire(now)
        if self._waiting:
            self._waiting.admit(self._runs, self._try_admit)
        wakeup = self._next_deadline()
        if self._writes:
            self._kills.ask(now, self._ports.send, self._counters)
            wakeup = min(wakeup, now + self._limits.kill_after_s)
        return wakeup if wakeup < math.inf else None

    def _next_deadline(self) -> float:
        """Of the calls that wait or run."""
        earliest = math.inf
        for call in self._waiting:
            if call.deadline < earliest:
                earliest = call.deadline
        for run in self._runs.values():
            if run.ending is None and run.call.deadline < earliest:
                earliest = run.call.deadline
        return earliest

    def _expire(self, now: float) -> None:
        for call in self._waiting.drop(lambda call: call.deadline <= now):
            self._counters["expired_calls"] += 1
            self._refuse(call.peer, call.message, ErrorCode.DEADLINE, "the deadline passed before admission")
        for run in list(self._runs.values()):
            if run.ending is None and run.call.deadline <= now:
                self._counters["expired_calls"] += 1
                self._fail(run, ErrorCode.DEADLINE, "the deadline passed during prefill")

    def _try_admit(self, call: Call) -> bool:
        message = call.message
        found = self._cache.match_again(call.found)
        lease = self._cache.try_lease(found, pages_for(call.end, self._page_size) - found.num_pages)
        if lease is None:
            return False
        hit_len = found.prefix_len
        run = Run(call, lease, hit_len, hit_len, cursor=message.start // self._page_size)
        self._runs[call.key] = run
        self._counters["prompt_tokens"] += call.end
        self._counters["hit_tokens"] += hit_len
        self._counters["recomputed_tokens"] += max(0, message.start - hit_len)  # the caller holds these
        self._post(run)
        return True

    # ---- endings -----------------------------------------------------------------------------------------------------

    def _runs_of(self, peer: str) -> list[Run]:
        return [run for run in self._runs.values() if run.call.peer == peer]

    def _fail(self, run: Run, code: ErrorCode, reason: str) -> None:
        self._end(run, PrefillFailed(run.call.message.ref, code, reason))

    def _end(self, run: Run, answer: Message | None) -> None:
        """Stop computing and posting. The answer leaves when no handle is open; the latest one given counts."""
        run.ending = Ending(answer)
        self._close_if_quiet(run)

    def _close_if_quiet(self, run: Run) -> None:
        if run.handles or (run.ending is None and not run.is_flushed(self._page_size)):
            return
        message = run.call.message
        del self._runs[run.call.key]
        self._cache.release(run.lease)
        if run.ending is None:
            self._counters["completed_calls"] += 1
            run.ending = Ending(PrefillDone(message.ref, run.hit_len, run.call.end - run.hit_len))
        if run.ending.answer is not None:
            self._peers.ended(run.call.peer).add(message.ref)
            self._ports.send(run.call.peer, run.ending.answer)

    # ---- load --------------------------------------------------------------------------------------------------------

    def _num_to_compute(self) -> int:
        return sum(run.num_to_compute for run in self._runs.values())

    def load(self) -> WorkerLoad:
        counts = self._cache.counts()
        overdue = self._writes.overdue(self._ports.clock.now())
        return WorkerLoad(
            num_running=len(self._runs),
            num_waiting=len(self._waiting),
            queued_tokens=sum(call.end for call in self._waiting) + self._num_to_compute(),
            inflight_pages=counts.inflight,
            private_pages=counts.private,
            pinned_pages=counts.pinned,
            cached_pages=counts.cached,
            free_pages=counts.free,
            counters=dict(self._counters),
            overdue_pages=sum(len(write.pages) for writes in overdue.values() for write in writes),
        )

    def check(self) -> None:
        """Raise InvariantError unless every open write belongs to an open run that leases and holds its pages."""
        self._cache.check()
        self._writes.check(self._runs.values())
        if self._runs.keys() & {call.key for call in self._waiting}:
            raise InvariantError("a call waits and runs")
        if any(run.ending is not None and not run.handles for run in self._runs.values()):
            raise InvariantError("a run has ended, has no open write, and was not answered")
