"""The loop of a worker: one thread that feeds the scheduler, the transport and the executor. Never imports torch.

    running ──drain asked, or the scheduler gives up──► draining ──nothing unfinished, or out of time──► ended

One pass is the pass of `scheduler.protocol`. Between passes the loop sleeps in `Inbox.wait` until a message comes, the
executor finishes, the scheduler's next deadline, or `POLL_S` while transfers are open: a transport has nothing to
wait on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headstart.core.batch import Executor
from headstart.core.clock import Clock
from headstart.core.messages import Drain, Message, WorkerLoad
from headstart.scheduler.protocol import Scheduler
from headstart.transfer.contract import Transport

POLL_S = 0.001
"""Longest sleep while a transfer is open."""
IDLE_S = 0.1
"""Longest sleep at all: keeps the loop's age small in every heartbeat."""
PUBLISH_S = 0.1
"""How often the loop publishes its load."""
STEP_PATIENCE_S = 10.0
"""A step that takes longer is a wedge: passes that wait for it are no signs of life. A chunk takes half a second."""


class Inbox(Protocol):
    """Where messages come from."""

    def receive(self) -> list[tuple[str, Message]]:
        """Everything that has arrived, as (sender, message). Never blocks."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived or the executor's step has ended, at the latest after `timeout_s`."""
        ...


class LoopHealth:
    """What the loop last said of itself. One thread writes, another reads: an assignment is atomic."""

    def __init__(self, now: float) -> None:
        self._last: tuple[float, WorkerLoad] = (now, WorkerLoad())

    def publish(self, now: float, load: WorkerLoad) -> None:
        self._last = (now, load)

    def touch(self, now: float) -> None:
        self._last = (now, self._last[1])

    def read(self) -> tuple[float, WorkerLoad]:
        """(time of the last pass, load at the last publication)."""
        return self._last


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a loop drives."""

    scheduler: Scheduler
    transport: Transport
    executor: Executor
    inbox: Inbox
    clock: Clock
    health: LoopHealth
    runs_are_transfers: bool  # prefill: whatever runs may have writes open


class WorkerLoop:
    """Runs passes until it has drained."""

    def __init__(self, parts: LoopParts, on_publish: Callable[[WorkerLoad], None] = lambda load: None) -> None:
        self._parts = parts
        self._on_publish = on_publish
        self._num_in_flight = 0
        self.step_since: float | None = None  # when the oldest step in flight was launched or the one before it ended
        self._transfers_open = False
        self.published_at = float("-inf")
        self._drain_deadline: float | None = None
        self.must_restart = False  # pages are inflight for good: the process has to end although nobody asked it to

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    def drain(self, timeout_s: float) -> None:
        """Take nothing new; end when nothing is unfinished or after `timeout_s`. Repeats change nothing."""
        if self._drain_deadline is None:
            self._drain_deadline = self._parts.clock.now() + timeout_s
            self._parts.scheduler.handle("gateway", Drain())

    def run(self, drain_asked: Callable[[], bool], drain_timeout_s: float) -> bool:
        """Loop until drained. True if everything finished in time."""
        while True:
            wakeup = self.run_pass()
            self._take_stock()
            if drain_asked() or self.must_restart:
                self.drain(drain_timeout_s)
            if (finished := self._drained()) is not None:
                return finished
            self._parts.inbox.wait(self._sleep_s(wakeup))

    def run_pass(self) -> float | None:
        """One pass. Returns when the scheduler wants the next one at the latest, or None."""
        parts = self._parts
        scheduler = parts.scheduler
        for sender, message in parts.inbox.receive():
            scheduler.handle(sender, message)
        for event in parts.transport.poll():
            scheduler.on_transfer(event)
        executor = parts.executor
        while self._num_in_flight and (output := executor.poll()) is not None:
            self._num_in_flight -= 1
            self.step_since = None
            scheduler.update(output)
        wakeup = scheduler.advance()
        while self._num_in_flight < executor.max_steps_in_flight and (batch := scheduler.schedule()) is not None:
            executor.launch(batch)
            self._num_in_flight += 1
        now = parts.clock.now()
        if self._num_in_flight and self.step_since is None:
            self.step_since = now
        self.publish(now)
        return wakeup

    def publish(self, now: float) -> None:
        """What a pass that ended at `now` says of itself."""
        alive_at = now
        if self.step_since is not None:
            alive_at = min(now, self.step_since + STEP_PATIENCE_S)  # work last went on then
        if now - self.published_at < PUBLISH_S:
            self._parts.health.touch(alive_at)
            return
        load = self._parts.scheduler.load()
        self.published_at = now
        self._parts.health.publish(alive_at, load)
        self._on_publish(load)

    def _take_stock(self) -> None:
        """See whether the worker has to end, and how soon to look at the transport again."""
        load, runs_are_transfers = self._parts.scheduler.load(), self._parts.runs_are_transfers
        self.must_restart = load.must_restart
        self._transfers_open = load.inflight_pages > 0 or (runs_are_transfers and load.num_running > 0)

    def _sleep_s(self, wakeup: float | None) -> float:
        parts = self._parts
        bound = IDLE_S
        if self._transfers_open:
            bound = POLL_S
        if wakeup is not None:
            bound = min(bound, wakeup - parts.clock.now())
        return max(0.0, bound)

    def _drained(self) -> bool | None:
        """True: drained. False: out of time. None: go on."""
        if self._drain_deadline is None:
            return None
        load = self._parts.scheduler.load()
        is_waited_for = load.inflight_pages and not load.must_restart
        if not (load.num_running or load.num_waiting or is_waited_for or self._num_in_flight):
            return True
        return False if self._parts.clock.now() >= self._drain_deadline else None
