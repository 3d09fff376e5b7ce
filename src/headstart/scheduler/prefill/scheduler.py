"""Prefill scheduler: turns prompts into KV pages and pushes them to the decode worker that called.

It never samples. A call is validated, waits, reserves its whole prompt at admission, runs in chunks, and each chunk's
whole pages are posted as soon as its step is out. `prefill.states` has the states of a call and what each holds;
`prefill.queue` decides who is admitted when and how the admitted share the steps; `sender` has the pushes.

Several steps may be in flight. A prompt's chunks follow each other in them, and outputs come in the order of the
launches. Once nobody wants a prompt any more, its chunks in flight are dropped when their outputs come.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass
from operator import attrgetter

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
    KillRequest,
    Message,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Send,
    WorkerExited,
    WorkerLoad,
    WorkerRef,
)
from headstart.kv.cache import PrefixCache
from headstart.scheduler.limits import PrefillLimits
from headstart.scheduler.prefill.decode_workers import DecodeWorkers
from headstart.scheduler.prefill.queue import NumLeft, PrefillQueue, split_token_budget
from headstart.scheduler.prefill.states import Call, Chunk, InflightChunks, Run
from headstart.scheduler.prefill.validation import fault_in
from headstart.scheduler.sender import Sender, SenderPorts, Target, push_to
from headstart.scheduler.stuck_peers import StuckPeers
from headstart.transfer.contract import Completed, PageDigests, PeerLost, TransferEvent, Transport, WriteFailed


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
        self._cache = cache
        self._clock = ports.clock
        self._send = ports.send
        self._counters: Counter[str] = Counter()
        self._peers = DecodeWorkers(worker, kv_spec, limits, ports.transport)
        sender_ports = SenderPorts(ports.transport, ports.digests, ports.send, PrefillFailed)
        self._sender = Sender(worker, cache, sender_ports, self._counters)
        self._stuck_peers = StuckPeers(cache.num_pages)
        self._waiting = PrefillQueue(limits, cache)
        self._runs: list[Run] = []  # in order of admission
        self._inflight: deque[InflightChunks] = deque()
        self._num_steps = 0
        self._is_draining = False

    # ---- messages ----------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> None:
        match message:
            case Hello():
                self._on_hello(sender, message)
            case Prefill():
                self._on_prefill(sender, message)
            case CancelTicket():
                self._waiting.drop(lambda call: call.key == (sender, message.ref))
                self._sender.cancel(sender, message.ref)
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
            self._send(sender, answer)

    def _on_prefill(self, sender: str, message: Prefill) -> None:
        key = sender, message.ref
        if key in self._sender or key in self._waiting:
            self._counters["duplicate_calls"] += 1
            return
        if (refusal := self._refusal(sender, message)) is not None:
            self._counters["refused_calls"] += 1
            self._sender.refuse(sender, message.ref, *refusal)
            return
        self._counters["calls"] += 1
        found = self._cache.match(message.namespace, message.tokens if message.cacheable else EMPTY)
        peer = self._peers.connected(sender)
        assert peer is not None
        self._waiting.add(Call(peer, message, self._clock.now() + message.remaining_s, found))

    def _refusal(self, sender: str, message: Prefill) -> tuple[ErrorCode, str] | None:
        """Why this call cannot be accepted, or None."""
        if self._sender.has_ended(sender, message.ref):
            return ErrorCode.UNAVAILABLE, "this ticket has ended here"
        if self._is_draining:
            return ErrorCode.UNAVAILABLE, "this prefill worker is draining"
        if self._peers.connected(sender) is None:
            return ErrorCode.UNAVAILABLE, "no connection to the caller's KV pool"
        if (fault := fault_in(message, self._cache.page_size, self._limits.vocab_size)) is not None:
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
        computing = sum(len(run.message.tokens) for run in self._runs if not run.is_over and run.push.key[0] == peer)
        return computing + sum(call.end for call in self._waiting if call.key[0] == peer)

    def _on_flush(self, sender: str, message: Flush) -> None:
        if len(self._sender) or self._waiting:
            self._send(sender, Flushed(message.flush_id, ok=False))
        else:
            self._send(sender, Flushed(message.flush_id, ok=True, num_pages=self._cache.flush()))

    def _on_exited(self, worker: WorkerRef) -> None:
        """Proof that a decode worker's process has ended: nobody is left to answer."""
        self._waiting.drop(lambda call: call.peer == worker)
        self._sender.forget(worker)
        self._peers.forget(worker)
        self._stuck_peers.forget(worker)

    # ---- transfer ----------------------------------------------------------------------------------------------------

    def on_transfer(self, event: TransferEvent) -> None:
        match event:
            case Completed() | WriteFailed():
                self._sender.on_transfer(event)
            case PeerLost():
                self._peers.on_lost(event.peer)
                for call in self._waiting.drop(lambda call: call.key[0] == event.peer):
                    reason = "the transport to the caller is closed"
                    self._sender.refuse(event.peer, call.message.ref, ErrorCode.UNAVAILABLE, reason)
                self._sender.on_peer_lost(event.peer)
            case _:
                self._counters["stray_events"] += 1

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self) -> float | None:
        if not len(self._sender) and not self._waiting:
            return None
        now = self._clock.now()
        if self._next_deadline() <= now:
            self._expire(now)
        self._forget_runs_that_are_over()
        self._admit(attrgetter("num_to_compute"))
        wakeup = self._next_deadline()
        if self._sender.has_open_writes:
            self._request_kills(now)
            wakeup = min(wakeup, now + self._limits.kill_after_s)
        return wakeup if wakeup < math.inf else None

    def _next_deadline(self) -> float:
        """Of the calls that wait or are served."""
        waiting = min([call.deadline for call in self._waiting], default=math.inf)
        return min(waiting, self._sender.next_deadline())

    def _expire(self, now: float) -> None:
        for call in self._waiting.drop(lambda call: call.deadline <= now):
            self._counters["expired_calls"] += 1
            reason = "the deadline passed before admission"
            self._sender.refuse(call.key[0], call.message.ref, ErrorCode.DEADLINE, reason)
        self._sender.expire(now)

    def _request_kills(self, now: float) -> None:
        """Of decode workers whose stalled writes keep too many pages pinned past their deadline."""
        stuck = self._sender.stuck_peers(now)
        for worker in self._stuck_peers.to_kill(stuck, self._limits.kill_after_s, now):
            self._counters["kill_requests"] += 1
            reason = f"{stuck[worker].num_pages} pages are pinned by writes past their deadline"
            self._send("gateway", KillRequest(worker, reason))

    def _admit(self, num_left: NumLeft) -> None:
        """Admit the calls for which the next step has room after what the runs have left."""
        max_admitted = self._limits.max_running_requests - len(self._sender)
        for call in self._waiting.candidates(self._runs, max_admitted, num_left):
            if self._try_admit(call):
                self._waiting.admit(call)

    def _try_admit(self, call: Call) -> bool:
        """Lease pages for the whole prompt and open its push; False if there are too few."""
        message, found = call.message, call.found
        lease = self._cache.try_lease(found, pages_for(call.end, self._cache.page_size) - found.num_pages)
        if lease is None:
            return False
        hit_len = found.prefix_len
        target = Target(
            call.peer, message.ref, message.tokens, message.start, message.dst_pages, call.deadline, message.verify
        )
        done = PrefillDone(message.ref, hit_len, call.end - hit_len)
        push = push_to(target, lease, hit_len, done, self._cache.page_size)
        self._sender.open(push)
        self._runs.append(Run(message, push, hit_len, hit_len))
        self._counters["prompt_tokens"] += call.end
        self._counters["hit_tokens"] += hit_len
        self._counters["recomputed_tokens"] += max(0, message.start - hit_len)  # the caller holds these
        self._sender.post(push, hit_len)
        return True

    # ---- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        if self._inflight and self._waiting:
            self._admit(attrgetter("num_to_launch"))  # this step's room: what is in flight takes none of it
        rows: list[Row] = []
        chunks: list[Chunk] = []
        for run, num_new in split_token_budget(self._runs, self._limits.chunked_prefill_size):
            start, stop = run.num_launched, run.num_launched + num_new
            pages = run.push.lease.pages[: pages_for(stop, self._cache.page_size)]
            rows.append(Row(len(rows), run.message.tokens[start:stop], start, pages, namespace=run.message.namespace))
            chunks.append(Chunk(run, num_new, pages))
            self._cache.add_reader(pages)
            run.num_launched = stop
        if not rows:
            return None
        self._num_steps += 1
        self._inflight.append(InflightChunks(self._num_steps, chunks))
        return Batch(self._num_steps, tuple(rows))

    def update(self, output: BatchOutput) -> None:
        if not self._inflight or self._inflight[0].step_id != output.step_id:
            raise InvariantError(f"output of step {output.step_id}, which is not the oldest one in flight")
        for run, num_new, pages in self._inflight.popleft().chunks:
            self._cache.drop_reader(pages)
            self._counters["tokens_computed"] += num_new
            if not run.push.is_open:
                continue
            run.num_computed += num_new
            if run.message.cacheable:
                self._cache.commit(run.push.lease, run.message.tokens, run.num_computed)
            self._sender.post(run.push, run.num_computed)
        self._forget_runs_that_are_over()

    def _forget_runs_that_are_over(self) -> None:
        self._runs = [run for run in self._runs if not run.is_over]

    # ---- what others see ---------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        counts = self._cache.counts()
        stuck = self._sender.stuck_peers(self._clock.now())
        uncomputed = sum(run.num_to_compute for run in self._runs)
        return WorkerLoad(
            num_running=len(self._sender),
            num_waiting=len(self._waiting),
            queued_tokens=sum(call.end for call in self._waiting) + uncomputed,
            inflight_pages=counts.inflight,
            private_pages=counts.private,
            pinned_pages=counts.pinned,
            cached_pages=counts.cached,
            free_pages=counts.free,
            counters=dict(self._counters),
            overdue_pages=sum(peer.num_pages for peer in stuck.values()),
            mismatches=self._peers.mismatches(),
        )

    def check(self) -> None:
        """Raise InvariantError unless every open push is computed by one run or has been computed, and has its pages."""
        self._cache.check()
        self._sender.check()
        computing = [run.push.key for run in self._runs if not run.is_over]
        unposted = [push.key for push in self._sender if push.is_open and push.cursor < push.end_page]
        if sorted(computing, key=str) != sorted(unposted, key=str):
            raise InvariantError("not exactly the pushes that lack pages have a run")
        if any(call.key in self._sender for call in self._waiting):
            raise InvariantError("a call waits and runs")
        launched = Counter(chunk.run.push.key for step in self._inflight for chunk in step.chunks)
        if any(
            (run.num_launched > run.num_computed) != (run.push.key in launched)
            for run in self._runs
            if run.push.is_open
        ):
            raise InvariantError(
                "a run has launched tokens without a chunk in flight, or a chunk that it does not count"
            )
