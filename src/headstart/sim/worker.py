"""One incarnation of a worker: its memory, cache, scheduler and the production loop, driven by the world.

alive ──stall──► stalled ──resume──► alive          a stalled process keeps everything and does nothing
  └─────────────────┴──kill──► (gone from the world)
"""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.messages import Heartbeat, Join, Message, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode import DecodeScheduler
from headstart.scheduler.prefill import PrefillScheduler
from headstart.sim.executor import FakeExecutor
from headstart.transfer.contract import Transport
from headstart.worker.loop import POLL_S, LoopParts, Vitals, WorkerLoop

GATEWAY = "gateway"


class Mailbox:
    """Satisfies `worker.loop.Inbox`; the world does the waiting."""

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


@dataclass(frozen=True, slots=True)
class Organs:
    """What a worker is built from."""

    scheduler: PrefillScheduler | DecodeScheduler
    cache: PrefixCache
    transport: Transport
    executor: FakeExecutor


class SimWorker:
    def __init__(self, join: Join, organs: Organs, clock: Clock, send: Callable[[str, Message], None]) -> None:
        self.join = join
        self.organs = organs
        self.mailbox = Mailbox()
        self.is_stalled = False
        self.wake_at = clock.now()
        self._is_unchecked = True
        self._clock = clock
        self._send = send
        self._vitals = Vitals(clock.now())
        parts = LoopParts(
            organs.scheduler,
            organs.transport,
            organs.executor,
            self.mailbox,
            clock,
            self._vitals,
            runs_are_transfers=join.role == "prefill",
        )
        self._loop = WorkerLoop(parts)

    @property
    def ref(self) -> WorkerRef:
        return self.join.worker

    def is_due(self, now: float) -> bool:
        return not self.is_stalled and (self.wake_at <= now or bool(self.mailbox))

    def run_pass(self) -> None:
        """One pass of the loop; sets when the next is due if nothing arrives before."""
        self._is_unchecked = True
        now = self._clock.now()
        wakeup = self._loop.run_pass()
        finish_at = self.organs.executor.finish_at
        times = [time for time in (wakeup, finish_at) if time is not None]
        self.wake_at = max(min(times), now + POLL_S / 10) if times else float("inf")

    def check(self, under_write: set[int]) -> None:
        """The ledger is right, and whatever an open write may still touch is kept for its writer.

        Only a pass changes the ledger, so it is not proven twice between two passes.
        """
        if self._is_unchecked:
            self.organs.scheduler.check()
            self._is_unchecked = False
        unguarded = under_write - set(self.organs.cache.open_writes().tolist())
        if unguarded:
            raise InvariantError(f"{self.ref}: pages {sorted(unguarded)} are under a peer's write and not kept for it")

    def beat(self) -> None:
        """What the heartbeat thread does. Join is repeated with it: a gateway takes repeats for nothing."""
        if self.is_stalled:
            return
        last_pass, load = self._vitals.read()
        self._send(GATEWAY, self.join)
        self._send(GATEWAY, Heartbeat(self.ref, self._clock.now() - last_pass, load))
