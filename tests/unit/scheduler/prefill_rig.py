"""One prefill worker in virtual time, called by a decode worker of which only the pool and the messages are real."""

import random
from dataclasses import replace

import numpy as np

from headstart.core.arrays import int32_array
from headstart.core.identity import PROTOCOL_VERSION, KVSpec, cache_namespace
from headstart.core.layout import PoolRegion, pages_for
from headstart.core.messages import (
    CancelTicket,
    ChunkNotice,
    Hello,
    Message,
    Prefill,
    TicketRef,
    WorkerRef,
    decode_notice,
)
from headstart.kv.cache import PrefixCache
from headstart.scheduler.limits import PrefillLimits
from headstart.scheduler.prefill.scheduler import PrefillPorts, PrefillScheduler
from headstart.sim.clock import VirtualClock
from headstart.sim.cost import linear_cost
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.watermarks import ContextBook, marks_layout
from headstart.transfer.contract import Notice
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import LoopbackNetwork, LoopbackTransport

PREFILL = WorkerRef("prefill-0", 1)
DECODE = WorkerRef("decode-0", 1)
NAMESPACE = cache_namespace()
LIMITS = PrefillLimits(max_running_requests=4, chunked_prefill_size=16, credit_tokens=1000, capacity_tokens=200)


def spec_of(page_size: int) -> KVSpec:
    return KVSpec(PROTOCOL_VERSION, "watermarks", "none", marks_layout(page_size))


class Caller:
    """A decode worker's pool, transport and mail."""

    def __init__(self, rig: "Rig", worker: WorkerRef, num_pages: int = 64) -> None:
        self.worker = worker
        self.name = str(worker)
        self.pool = np.zeros((num_pages, rig.page_size), dtype=np.uint64)
        region = PoolRegion(0, num_pages, marks_layout(rig.page_size).page_bytes)
        self.transport = rig.links.transport(self.name, self.pool.reshape(-1).view(np.uint8), region)
        self.mail: list[Message] = []
        self.notices: list[ChunkNotice] = []
        self._rig = rig

    def hello(self, kv_spec: KVSpec | None = None) -> None:
        kv_spec = kv_spec or spec_of(self._rig.page_size)
        self.send(Hello(self.worker, kv_spec, self.transport.descriptor()))

    def send(self, message: Message) -> None:
        self._rig.scheduler.handle(self.name, message)

    def call(self, ticket: int, prompt: list[int], start: int = 0, first_page: int = 0, **fields: object) -> Prefill:
        """Ask for [start, len(prompt)) on consecutive pages from `first_page`."""
        num_pages = pages_for(len(prompt) - start, self._rig.page_size)
        dst = int32_array(range(first_page, first_page + num_pages))
        message = Prefill(TicketRef(ticket, 0), int32_array(prompt), start, dst, NAMESPACE, 10.0)
        message = Prefill(**{name: fields.get(name, getattr(message, name)) for name in Prefill.__struct_fields__})
        self.send(message)
        return message

    def cancel(self, ticket: int) -> None:
        self.send(CancelTicket(TicketRef(ticket, 0)))

    def take_mail(self) -> list[Message]:
        self.listen()
        mail, self.mail = self.mail, []
        return mail

    def listen(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, Notice):
                notice = decode_notice(event.payload)
                assert notice is not None
                self.notices.append(notice)

    def written(self, ticket: int) -> list[int]:
        """Indices into dst_pages that were noticed, in the order of the notices."""
        self.listen()
        mine = [notice for notice in self.notices if notice.ref.ticket == ticket]
        return [index for notice in mine for index in range(notice.first, notice.first + notice.count)]

    def holds(self, message: Prefill) -> bool:
        """Whether the target pages hold exactly the KV that was asked for."""
        marks = ContextBook().extend(None, message.namespace, message.tokens).marks[message.start :]
        return np.array_equal(self.pool[message.dst_pages].reshape(-1)[: len(marks)], marks)


class Rig:
    """`steps_in_flight`: how many steps the worker's executor accepts at once."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        transfer_s: float = 0.001,
        steps_in_flight: int = 1,
        **limits: int,
    ) -> None:
        self.page_size = page_size
        self.clock = VirtualClock()
        self.links = LoopbackNetwork(random.Random(0), self.clock, lambda num_bytes: transfer_s)
        pool = np.zeros((num_pages, page_size), dtype=np.uint64)
        region = PoolRegion(0, num_pages, marks_layout(page_size).page_bytes)
        self.transport: LoopbackTransport = self.links.transport(str(PREFILL), pool.reshape(-1).view(np.uint8), region)
        self.cache = PrefixCache(num_pages, page_size)
        model = Model(ContextBook(), 97, page_size, linear_cost(0.01, 0.0))
        self.executor = FakeExecutor(model, pool, self.clock, steps_in_flight)
        self.num_in_flight = 0
        self.callers: dict[str, Caller] = {}
        self.sent: list[tuple[str, Message]] = []
        digests = HostDigests(pool.view(np.uint8))
        ports = PrefillPorts(self.transport, digests, self.clock, self._deliver)
        self.scheduler = PrefillScheduler(PREFILL, spec_of(page_size), replace(LIMITS, **limits), self.cache, ports)

    def caller(self, worker: WorkerRef = DECODE) -> Caller:
        """A decode worker that has been welcomed."""
        caller = self.callers[str(worker)] = Caller(self, worker)
        caller.hello()
        caller.take_mail()
        return caller

    def _deliver(self, recipient: str, message: Message) -> None:
        self.sent.append((recipient, message))
        if recipient in self.callers:
            self.callers[recipient].mail.append(message)

    def run_pass(self) -> float | None:
        """One pass of the loop; returns when the next has something to do."""
        for event in self.transport.poll():
            self.scheduler.on_transfer(event)
        if (output := self.executor.poll()) is not None:
            self.num_in_flight -= 1
            self.scheduler.update(output)
        wakeup = self.scheduler.advance()
        while self.num_in_flight < self.executor.max_steps_in_flight:
            if (batch := self.scheduler.schedule()) is None:
                break
            self.executor.launch(batch)
            self.num_in_flight += 1
        self.scheduler.check()
        for caller in self.callers.values():
            caller.listen()
        times = (wakeup, self.executor.finish_at, self.links.next_event_time())
        return min((time for time in times if time is not None), default=None)

    def step(self, until: float | None = None) -> None:
        """A pass, then on to the next event, but not beyond `until`."""
        next_time = self.run_pass()
        until = self.clock.now() + 0.1 if until is None else until
        self.clock.advance_to(until if next_time is None else min(until, next_time + 1e-6))

    def run(self, seconds: float = 2.0) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.step(end)
        self.run_pass()

    def counter(self, name: str) -> float:
        return self.scheduler.load().counters.get(name, 0)

    def is_clean(self) -> bool:
        counts = self.cache.counts()
        return counts.free + counts.cached == self.cache.num_pages
