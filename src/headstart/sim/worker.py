"""One incarnation of a worker: its memory, cache, scheduler and the production loop, driven by the cluster.

alive ──stall──► stalled ──resume──► alive          a stalled process keeps everything and does nothing
  └─────────────────┴──kill──► (gone from the cluster)
"""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.messages import (
    Heartbeat,
    Join,
    Membership,
    Message,
    PrefillDone,
    Role,
    Submit,
    WorkerLoad,
    WorkerRef,
)
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.scheduler import DecodeScheduler
from headstart.scheduler.prefill.scheduler import PrefillScheduler
from headstart.scheduler.protocol import Scheduler
from headstart.sim.clock import NEVER
from headstart.sim.deferred_output import DeferredOutput
from headstart.sim.executor import FakeExecutor
from headstart.sim.fast_forward import FastForward
from headstart.sim.synthetic_executor import SyntheticExecutor
from headstart.transfer.contract import Transport
from headstart.worker.loop import IDLE_S, POLL_S, LoopHealth, LoopParts, WorkerLoop

GATEWAY = "gateway"
SHORTEST_S = POLL_S / 10
"""Time moves at least by this between two passes that nothing but the scheduler asked for."""
HARMLESS = (PrefillDone, Membership)


class Mailbox:
    """Satisfies `worker.loop.Inbox`; the cluster does the waiting."""

    def __init__(self) -> None:
        self._letters: list[tuple[str, Message]] = []

    def put(self, sender: str, message: Message) -> None:
        self._letters.append((sender, message))

    def receive(self) -> list[tuple[str, Message]]:
        letters, self._letters = self._letters, []
        return letters

    def wait(self, timeout_s: float) -> None:
        raise NotImplementedError("virtual time moves between passes")

    def __bool__(self) -> bool:
        return bool(self._letters)

    @property
    def is_harmless(self) -> bool:
        """Whether no message here ends a choice that runs."""
        for _, message in self._letters:
            if isinstance(message, Submit):
                if message.request.ref.attempt > 0:
                    return False
            elif not isinstance(message, HARMLESS):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Organs:
    """What a worker is built from."""

    scheduler: PrefillScheduler | DecodeScheduler
    cache: PrefixCache
    transport: Transport
    executor: FakeExecutor | SyntheticExecutor
    recorded: Scheduler | None = None  # stands around `scheduler` where its decisions are logged


class SimWorker:
    def __init__(
        self, join: Join, organs: Organs, clock: Clock, send: Callable[[str, Message], None], number: int = 0
    ) -> None:
        self.join = join
        self.number = number  # of its start, among all of its cluster
        self.organs = organs
        self.mailbox = Mailbox()
        self.is_stalled = False
        self.wake_at = clock.now()
        self.looks: list[float] = []  # when its cluster sees whether it is due, the next last: no later than it must
        self.num_changes = 0  # goes up with whatever may change the scheduler or the cache
        self._checked_at: int | None = None  # changes, when they were last proven right
        self._clock = clock
        self._send = send
        self._vitals = LoopHealth(clock.now())
        parts = LoopParts(
            organs.recorded or organs.scheduler,
            organs.transport,
            organs.executor,
            self.mailbox,
            clock,
            self._vitals,
            runs_are_transfers=join.role == Role.PREFILL,
        )
        self._loop = WorkerLoop(parts)
        self._wakeup = NEVER  # what the scheduler last asked for
        self._fast_forward: FastForward | None = None

    def fast_forward(self, deferred: DeferredOutput) -> None:
        """From now on take steps that only decode together. Only for decode workers with a synthetic device."""
        scheduler, executor = self.organs.scheduler, self.organs.executor
        assert isinstance(scheduler, DecodeScheduler)
        assert isinstance(executor, SyntheticExecutor)
        self._fast_forward = FastForward(scheduler, executor, self._loop, deferred)

    @property
    def ref(self) -> WorkerRef:
        return self.join.worker

    def run_pass(self) -> None:
        """One pass of the loop; sets when the next is due if nothing arrives before."""
        now, ahead = self._clock.now(), self._fast_forward
        if ahead is not None:
            self._prepare_pass(ahead, now)
        self.num_changes += 1
        wakeup = self._loop.run_pass()
        due = self._wakeup = NEVER if wakeup is None else wakeup
        finish_at = self.organs.executor.finish_at if ahead is None else ahead.look_ahead()
        if finish_at is not None and finish_at < due:
            due = finish_at
        self.wake_at = due if due > now else now + SHORTEST_S

    def _prepare_pass(self, ahead: FastForward, now: float) -> None:
        """Note what was done before a pass that may change what runs, and send it before one that may end it early."""
        ahead.catch_up(now)
        finish_at = self.organs.executor.finish_at
        if self._wakeup <= now or not self.mailbox.is_harmless:
            ahead.flush()
        elif finish_at is not None and finish_at <= now:
            ahead.collect()

    def catch_up(self) -> None:
        """Be where a worker would be now that takes every step by itself."""
        if self._fast_forward is not None and not self.is_stalled:
            self.num_changes += self._fast_forward.catch_up(self._clock.now())

    def flush(self, arriving_by: float = NEVER) -> None:
        """Send what has not been sent yet of what reaches the gateway by this time."""
        self.catch_up()
        if self._fast_forward is not None:
            self._fast_forward.flush(arriving_by)

    def end(self) -> None:
        """What it has to send has left; no pass will ever be due."""
        self.flush()
        self.wake_at = NEVER

    def load(self) -> WorkerLoad:
        """As of now, not as of its last publication."""
        self.catch_up()
        return self.organs.scheduler.load()

    def stall(self) -> None:
        """It stops here, in the step in flight."""
        self.flush()
        self.is_stalled = True
        if self._fast_forward is not None:
            self._fast_forward.halt()
            finish_at = self.organs.executor.finish_at
            self.wake_at = self.wake_at if finish_at is None else min(self.wake_at, finish_at)

    def check(self, under_write: set[int]) -> None:
        """The ledger is right, and whatever an open write may still touch is kept for its writer.

        It is not proven twice between two changes.
        """
        if self._checked_at != self.num_changes:
            self.organs.scheduler.check()
            self._checked_at = self.num_changes
        unguarded = under_write - set(self.organs.cache.open_writes().tolist())
        if unguarded:
            raise InvariantError(f"{self.ref}: pages {sorted(unguarded)} are under a peer's write and not kept for it")

    def beat(self) -> None:
        """What the heartbeat thread does. Join is repeated with it: a gateway takes repeats for nothing.

        Idle passes change nothing and are left out here, so the loop's age is at most what a real one sleeps.
        """
        if self.is_stalled:
            return
        self.catch_up()
        last_pass, load = self._vitals.read()
        self._send(GATEWAY, self.join)
        self._send(GATEWAY, Heartbeat(self.ref, min(self._clock.now() - last_pass, IDLE_S), load))
