"""The parent of `headstart serve`: starts gateway and workers, reports exits, kills on request, stops all in order.

    checking ─► starting ─► ready ─► stopping ─► ended
        └───────────┴───────────┘ failure: stopping

checking  ports are free, settings agree, the model is on disk; nothing runs yet
starting  gateway first, workers in parallel
ready     every worker has joined; its exit is published before its next incarnation starts
stopping  decode workers drain, then prefill workers, then the gateway; a second signal kills what is left

Children die with this process (see `parent`). One thread; every wait is one poll over child exits, the control socket
and signals.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import zmq

from headstart.core.messages import KillRequest, LauncherHello, Message, WorkerExited
from headstart.launch.child import Child
from headstart.wire.sockets import Dealer
from headstart.worker.exits import Exit
from headstart.worker.wake import Waker

HELLO_S = 1.0
"""How often the launcher repeats LauncherHello, for a gateway that was restarted."""
TICK_S = 0.1
KILL_AFTER_S = 5.0
"""Seconds beyond the drain's own bound before a child that does not stop is killed."""
MAX_EARLY_EXITS = 3
"""A worker that ends this often before anything was ever ready ends the launch."""

log = logging.getLogger("headstart.launcher")


@dataclass(frozen=True, slots=True)
class LauncherPorts:
    """How the launcher reaches the world."""

    control: Dealer  # to the gateway, as "launcher"
    is_ready: Callable[[], bool]  # every worker has joined; answers within a fraction of a second
    waker: Waker


@dataclass(slots=True)
class Launcher:
    """Runs children until told to stop. `run` returns the launcher's own exit status."""

    children: list[Child]
    ports: LauncherPorts
    drain_s: float
    on_ready: Callable[[], None]
    ready: bool = False
    _hello_at: float = 0.0
    _signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            return self._supervise()
        finally:
            self._stop()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        self.ports.waker.wake()

    def _supervise(self) -> int:
        while not self._signals:
            now = time.monotonic()
            self._start_due(now)
            for child in self._reap(now):
                if (status := self._verdict(child)) is not None:
                    return status
            self._talk(now)
            if not self.ready and self.ports.is_ready():
                self.ready = True
                self.on_ready()
            self._wait(TICK_S)
        return Exit.DRAINED

    def _verdict(self, child: Child) -> int | None:
        """The launcher's own status where a child's exit ends the launch, else None."""
        status = child.statuses[-1]
        if child.restart_at is None and (not self.ready or child.role == "gateway"):
            log.error("the launch ends with it", extra={"child": child.name, "status": status})
            return status
        if not self.ready and child.num_quick_exits >= MAX_EARLY_EXITS:
            log.error("keeps failing", extra={"child": child.name, "status": status})
            return int(Exit.DEVICE_FAILED)
        return None

    def _start_due(self, now: float) -> None:
        for child in self.children:
            if not child.is_running and child.restart_at is not None and now >= child.restart_at:
                child.start(now)
                log.info("started", extra={"child": str(child.ref), "pid": child.process and child.process.pid})

    def _reap(self, now: float) -> list[Child]:
        """Publish the exits of children that have ended."""
        ended = [child for child in self.children if child.reap(now) is not None]
        for child in ended:
            status = child.statuses[-1]
            log.log(
                logging.INFO if status == Exit.DRAINED else logging.WARNING,
                "exited",
                extra={"child": str(child.ref), "status": status, "restarts": child.restart_at is not None},
            )
            if child.role != "gateway":
                self._send(WorkerExited(child.ref, status))
        return ended

    def _talk(self, now: float) -> None:
        if now - self._hello_at >= HELLO_S:
            self._hello_at = now
            self._send(LauncherHello(tuple(child.name for child in self.children if child.role != "gateway")))
        for message in self.ports.control.drain():
            if isinstance(message, KillRequest):
                self._kill(message)

    def _kill(self, request: KillRequest) -> None:
        for child in self.children:
            if child.is_running and child.ref == request.worker:
                log.error("killing on request", extra={"child": str(child.ref), "reason": request.reason})
                child.signal(signal.SIGKILL)

    def _send(self, message: Message) -> None:
        if not self.ports.control.send(message):
            log.warning("not sent", extra={"message_type": type(message).__name__})

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a child ends, a message or a signal comes, or the time is over."""
        poller = zmq.Poller()
        poller.register(self.ports.control.socket, zmq.POLLIN)
        poller.register(self.ports.waker.fd, zmq.POLLIN)
        for child in self.children:
            if child.is_running:
                poller.register(child.pidfd, zmq.POLLIN)
        poller.poll(max(1, int(timeout_s * 1000)))
        self.ports.waker.clear()

    # ---- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Decode workers first: what they finish needs the others."""
        for child in self.children:
            child.restart_at = None
        for role in ("decode", "prefill", "gateway"):
            self._stop_all(child for child in self.children if child.role == role)
        self.ports.control.close()

    def _stop_all(self, children: Iterable[Child]) -> None:
        waiting = [child for child in children if child.is_running]
        for child in waiting:
            child.signal(signal.SIGTERM)
        kill_at = time.monotonic() + self.drain_s + KILL_AFTER_S
        while waiting:
            now = time.monotonic()
            if now >= kill_at or len(self._signals) > 1:
                for child in waiting:
                    child.signal(signal.SIGKILL)
            self._reap(now)
            for child in waiting:
                child.restart_at = None
            waiting = [child for child in waiting if child.is_running]
            if waiting:
                self._talk(now)
                self._wait(TICK_S)
