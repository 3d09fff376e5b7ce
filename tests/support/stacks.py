"""A prefill and a decode worker with real executors in one process: production schedulers, caches, loops and KV pools.

Pages move between two torch pools over the loopback transport. Time is virtual, so that transfers overlap steps the
same way in every run: a step computes for real on its executor's thread and is taken for finished `STEP_S` later. The
test plays the gateway.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from headstart.core.arrays import EMPTY, int32_array
from headstart.core.batch import Batch, BatchOutput
from headstart.core.clock import Clock
from headstart.core.identity import KVSpec
from headstart.core.messages import (
    Accepted,
    Failed,
    Finished,
    Join,
    Membership,
    Message,
    PeerState,
    Rejected,
    Submit,
    Tokens,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, Request, RequestStats, StopCriteria
from headstart.executor.build import ExecutorConfig, make_executor, make_kv_spec
from headstart.executor.runner import TorchExecutor
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.scheduler import DecodePorts, DecodeScheduler
from headstart.scheduler.limits import DecodeLimits, PrefillLimits
from headstart.scheduler.prefill.scheduler import PrefillPorts, PrefillScheduler
from headstart.sim.clock import Agenda, VirtualClock
from headstart.sim.network import ControlNetwork
from headstart.sim.worker import GATEWAY, Organs, SimWorker
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import Fault, LoopbackNetwork, LoopbackTransport, Posted
from tests.support.executors import GREEDY, Sequence_, read_kv

DECODE, PREFILL = WorkerRef("decode-0", 1), WorkerRef("prefill-0", 1)
NAMESPACE = b"tenant"
STEP_S = 0.002
TRANSFER_S = 0.0001, 0.004
CONTROL_S = 0.0001, 0.001
LIMIT_S = 120.0
STEP_PATIENCE_S = 120.0


class Engine:
    """A real executor and what its peers must agree on. Several worlds use it, one after the other."""

    def __init__(self, config: ExecutorConfig, kv_spec: KVSpec) -> None:
        self.kv_spec = kv_spec
        self.ended_steps = threading.Semaphore(0)
        self.executor: TorchExecutor = make_executor(config, self.ended_steps.release)

    @property
    def pool(self) -> torch.Tensor:
        return self.executor.pool.data

    @property
    def page_bytes(self) -> int:
        return self.executor.pool.region.page_bytes

    def memory(self) -> np.ndarray:
        """[num_pages, page_bytes] uint8, the pool's own memory."""
        return self.executor.pool.host_bytes()


@contextmanager
def engines(config: ExecutorConfig) -> Iterator[tuple[Engine, Engine]]:
    """Decode's, then prefill's."""
    kv_spec = make_kv_spec(config)
    pair = Engine(config, kv_spec), Engine(config, kv_spec)
    yield pair
    for engine in pair:
        engine.executor.close()


class PacedExecutor:
    """Steps that compute for real, and end at a virtual time. Satisfies `core.batch.Executor`."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self.finish_at: float | None = None

    @property
    def max_steps_in_flight(self) -> int:
        return self._engine.executor.max_steps_in_flight

    def launch(self, batch: Batch) -> None:
        self._engine.executor.launch(batch)
        self.finish_at = self._clock.now() + STEP_S

    def poll(self) -> BatchOutput | None:
        if self.finish_at is None or self._clock.now() < self.finish_at:
            return None
        assert self._engine.ended_steps.acquire(timeout=STEP_PATIENCE_S), "a step does not end"
        self.finish_at = None
        return self._engine.executor.poll()

    def close(self) -> None:
        """The engine outlives its worlds."""


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What differs between worlds."""

    chunk: int = 32  # tokens of a step that go to prompts, on either side
    has_prefill: bool = True
    local_prefill_tokens: int = 0
    num_reserved: int = 16
    decode_tokens: int | None = None  # held by the decode worker's cache; None: by its whole pool
    num_top_logprobs: int | None = None


@dataclass(slots=True, eq=False)
class Answer:
    """What the gateway heard of one choice."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # those that an earlier attempt delivered included
    logprobs: list[np.ndarray] = field(default_factory=list)  # [vocabulary], of the tokens of this attempt
    finished: Finished | None = None
    failed: Failed | None = None

    @property
    def is_done(self) -> bool:
        return self.finished is not None or self.failed is not None

    @property
    def stats(self) -> RequestStats:
        assert self.finished is not None, f"not finished: {self.failed}"
        return self.finished.stats

    def sequence(self) -> Sequence_:
        prompt = self.request.prompt.tolist()
        return Sequence_(prompt + self.tokens, len(prompt), logprobs=self.logprobs)


class StackWorld:
    def __init__(self, decode: Engine, prefill: Engine, spec: StackSpec | None = None, seed: int = 0) -> None:
        self.spec = spec or StackSpec()
        self.decode, self.prefill = decode, prefill
        self.page_size = decode.kv_spec.page_size
        self.clock = VirtualClock()
        self.answers: dict[ChoiceRef, Answer] = {}
        self.posts: list[Posted] = []
        self.injector: Callable[[Posted], Fault] = lambda posted: Fault()
        rng = random.Random(seed)
        self._agenda = Agenda()
        self._control = ControlNetwork(rng, self.clock, self._agenda, CONTROL_S)
        self._links = LoopbackNetwork(rng, self.clock, lambda num_bytes: rng.uniform(*TRANSFER_S), self._posted)
        for engine in (decode, prefill):
            engine.pool.fill_(torch.nan)  # reading a position that no row has written, here or there, shows
        self.workers = {DECODE: self._start(DECODE, decode)}
        if self.spec.has_prefill:
            self.workers[PREFILL] = self._start(PREFILL, prefill)
        members = [PeerState(PREFILL, "", "alive")] if self.spec.has_prefill else []
        self._control.attach(GATEWAY, self._to_gateway)
        self._control.send(GATEWAY, str(DECODE), Membership(tuple(members)))

    def _start(self, ref: WorkerRef, engine: Engine) -> SimWorker:
        num_pages = len(engine.pool)
        if ref == DECODE and self.spec.decode_tokens is not None:
            num_pages = self.spec.decode_tokens // self.page_size
        cache = PrefixCache(num_pages, self.page_size)
        transport = self._links.transport(str(ref), engine.memory().reshape(-1), engine.executor.pool.region)

        def send(recipient: str, message: Message) -> None:
            self._control.send(str(ref), recipient, message)

        make = self._decode_scheduler if ref == DECODE else self._prefill_scheduler
        scheduler = make(engine, cache, transport, send)
        worker = SimWorker(
            Join(ref, ref.name.split("-")[0], engine.kv_spec, "", num_pages * self.page_size),
            Organs(scheduler, cache, transport, PacedExecutor(engine, self.clock)),
            self.clock,
            send,
        )
        self._control.attach(str(ref), worker.mailbox.put)
        return worker

    def _decode_scheduler(
        self, engine: Engine, cache: PrefixCache, transport: LoopbackTransport, send: Callable[[str, Message], None]
    ) -> DecodeScheduler:
        limits = DecodeLimits(
            max_running_requests=16,
            max_queued_requests=64,
            context_len=cache.num_pages * self.page_size,
            chunked_prefill_size=self.spec.chunk,
            local_prefill_tokens=self.spec.local_prefill_tokens,
            num_reserved_decode_tokens=self.spec.num_reserved,
            gateway_silence_s=LIMIT_S,
        )
        digests = HostDigests(engine.memory())
        ports = DecodePorts(transport.descriptor(), engine.page_bytes, self.clock, send, digests)
        return DecodeScheduler(DECODE, engine.kv_spec, limits, cache, ports)

    def _prefill_scheduler(
        self, engine: Engine, cache: PrefixCache, transport: LoopbackTransport, send: Callable[[str, Message], None]
    ) -> PrefillScheduler:
        capacity = cache.num_pages * self.page_size
        limits = PrefillLimits(
            max_running_requests=8, chunked_prefill_size=self.spec.chunk, credit_tokens=2048, capacity_tokens=capacity
        )
        ports = PrefillPorts(transport, HostDigests(engine.memory()), self.clock, send)
        return PrefillScheduler(PREFILL, engine.kv_spec, limits, cache, ports)

    def _posted(self, posted: Posted) -> Fault:
        self.posts.append(posted)
        return self.injector(posted)

    # ---- the gateway -------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Sequence[int], num_tokens: int, output_ids: Sequence[int] = (), attempt: int = 0, name: str = ""
    ) -> Answer:
        request = Request(
            ref=ChoiceRef(name or f"r{len(self.answers)}", attempt=attempt),
            prompt=int32_array(prompt),
            sampling=GREEDY,
            stop=StopCriteria(num_tokens),
            namespace=NAMESPACE,
            remaining_s=LIMIT_S,
            output_ids=int32_array(output_ids) if len(output_ids) else EMPTY,
            num_top_logprobs=self.spec.num_top_logprobs,
        )
        answer = self.answers[request.ref] = Answer(request, list(output_ids))
        self.send(Submit(request, (PREFILL.name,)))
        return answer

    def send(self, message: Message) -> None:
        """From the gateway to the decode worker."""
        self._control.send(GATEWAY, str(DECODE), message)

    def ask(self, *prompts: Sequence[int], num_tokens: int) -> list[Answer]:
        """Submit all at once, and run until the last has ended."""
        answers = [self.submit(prompt, num_tokens) for prompt in prompts]
        self.finish()
        return answers

    def _to_gateway(self, sender: str, message: Message) -> None:
        match message:
            case Tokens():
                for delta in message.deltas:
                    answer = self.answers[delta.ref]
                    assert not answer.is_done
                    assert delta.index == len(answer.tokens)
                    answer.tokens += delta.token_ids
                    answer.logprobs += [_dense(top) for top in delta.top_logprobs]
            case Finished():
                assert not self.answers[message.ref].is_done
                self.answers[message.ref].finished = message
            case Failed():
                assert not self.answers[message.ref].is_done
                self.answers[message.ref].failed = message
            case Rejected():
                raise AssertionError(message)
            case Accepted():
                pass

    # ---- time --------------------------------------------------------------------------------------------------------

    def run_until(self, claim: Callable[[], bool]) -> None:
        end = self.clock.now() + LIMIT_S
        while not claim():
            assert self.clock.now() < end, f"not within {LIMIT_S} s"
            self._step()

    def finish(self) -> None:
        """Run until every choice has ended and nothing is under way; the ledgers must then hold nothing but caches."""
        self.run_until(lambda: self.is_idle)
        for ref, worker in self.workers.items():
            worker.check(self._links.pages_under_write(str(ref)))
            counts = worker.organs.cache.counts()
            assert counts.cached + counts.free == worker.organs.cache.num_pages

    @property
    def is_idle(self) -> bool:
        """Every choice has ended and nothing is under way."""
        return all(answer.is_done for answer in self.answers.values()) and self._is_free()

    def _is_free(self) -> bool:
        loads = [worker.organs.scheduler.load() for worker in self.workers.values()]
        stepping = any(worker.organs.executor.finish_at is not None for worker in self.workers.values())
        busy = any(load.num_running or load.num_waiting or load.inflight_pages for load in loads)
        return not busy and not stepping and not self._links.num_open_writes()

    def _step(self) -> None:
        times = [self._agenda.next_time(), self._links.next_event_time()]
        times += [self.clock.now() if worker.mailbox else worker.wake_at for worker in self.workers.values()]
        self.clock.advance_to(min(time for time in times if time is not None))
        now = self.clock.now()
        self._agenda.run_due(now)
        arrives = self._links.next_event_time()
        transfers_due = arrives is not None and arrives <= now
        if transfers_due:
            self._links.progress()
        for worker in self.workers.values():
            if worker.wake_at <= now or worker.mailbox or transfers_due:
                worker.run_pass()

    # ---- what is where -----------------------------------------------------------------------------------------------

    def counters(self, ref: WorkerRef = DECODE) -> dict[str, float]:
        return self.workers[ref].organs.scheduler.load().counters

    def cached(self, ref: WorkerRef, tokens: Sequence[int]) -> np.ndarray:
        """Pages of a worker's cache that hold the whole pages of `tokens`, as far as it has them."""
        cache = self.workers[ref].organs.cache
        lease = cache.try_lease(cache.match(NAMESPACE, int32_array(tokens)), 0)
        assert lease is not None
        cache.release(lease)
        return lease.pages

    def kv_of(self, sequence: Sequence_) -> torch.Tensor:
        """[layers, 2, kv_heads, num_computed, head_dim] as the decode worker's cache holds it."""
        return read_kv(self.decode.pool, sequence.pages, sequence.num_computed)

    def bytes_for(self, start: int, end: int) -> int:
        """What moving the KV of positions [start, end) takes; `start` is page-aligned."""
        return -(-(end - start) // self.page_size) * self.decode.page_bytes

    def hit(self, num_tokens: int) -> int:
        """Tokens that a prompt of `num_tokens` may hit: whole pages, never the last token."""
        return (num_tokens - 1) // self.page_size * self.page_size


def _dense(top: tuple[tuple[int, float], ...]) -> np.ndarray:
    dense = np.empty(len(top))
    for token, logprob in top:
        dense[token] = logprob
    return dense
