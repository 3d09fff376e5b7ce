"""The parent of `headstart serve`: starts gateway and workers, reports exits, kills on request, stops all in order.

    checking ─► starting ─► ready ─► stopping ─► ended
        └───────────┴───────────┘ failure: stopping

checking  ports are free, settings agree, the model is on disk; nothing runs yet
starting  gateway first, workers in parallel
ready     every worker has joined; its exit is published before its next incarnation starts
stopping  decode workers drain, then prefill workers, then the gateway; a second signal kills what is left

A worker that is frozen before it has joined is killed and started again (`loading_watch`); a joined one is watched by the
gateway. Children die with this process (see `pdeathsig`). One thread; every wait is one poll over child exits, the control socket
and signals.
"""

import logging
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import zmq

from headstart.core.messages import KillRequest, LauncherHello, Message, Role, WorkerExited, WorkerRef
from headstart.launch.child import Child
from headstart.launch.loading_watch import FROZEN_AFTER_S, LoadingWatch
from headstart.wire.sockets import Dealer
from headstart.worker.exits import Exit, status_words
from headstart.worker.signals import stop_signals
from headstart.worker.wake import Waker

HELLO_S = 1.0
"""How often the launcher repeats LauncherHello, for a gateway that was restarted."""
LOOK_S = 1.0
"""How often the gateway is asked who has joined, once everything was ready, while a worker loads again."""
TICK_S = 0.1
STILL_STOPPING_S = 5.0
"""How often the launcher says whom it waits for while it stops."""
KILL_AFTER_S = 5.0
"""Seconds beyond the drain's own bound before a child that does not stop is killed."""
MAX_EARLY_EXITS = 3
"""A worker that ends this often before anything was ever ready ends the launch."""

log = logging.getLogger("headstart.launcher")


@dataclass(frozen=True, slots=True)
class LauncherPorts:
    """How the launcher reaches the world."""

    control: Dealer  # to the gateway, as "launcher"
    joined: Callable[
        [], Collection[WorkerRef] | None
    ]  # within a fraction of a second; None: the gateway does not answer
    waker: Waker
    memory_kills: Callable[[], int]  # how often the kernel has killed for want of memory
    loading: LoadingWatch


@dataclass(slots=True)
class Launcher:
    """Runs children until told to stop. `run` returns the launcher's own exit status."""

    children: list[Child]
    ports: LauncherPorts
    drain_s: float
    on_ready: Callable[[], None]
    say: Callable[[str], None]  # to the user, beside the log
    ready: bool = False
    _hello_at: float = 0.0
    _looked_at: float = 0.0
    _signals: list[int] = field(default_factory=list)
    _num_memory_kills: int = 0

    def run(self) -> int:
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        self._num_memory_kills = self.ports.memory_kills()
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
            self._follow_loading(now)
            self._wait(TICK_S)
        return Exit.DRAINED

    def _follow_loading(self, now: float) -> None:
        """Note who has joined; kill who is frozen before that."""
        loading = [child for child in self.children if child.is_running and not child.has_joined]
        if (not loading and self.ready) or now - self._looked_at < (LOOK_S if self.ready else TICK_S):
            return
        self._looked_at = now
        joined = self.ports.joined() if loading else []
        for child in loading:
            child.has_joined = joined is not None and (child.role == "gateway" or child.ref in joined)
        waited_for = {
            child.ref: child.process.pid for child in loading if not child.has_joined and child.process is not None
        }
        for ref in self.ports.loading.frozen(waited_for, now):
            self._kill(KillRequest(ref, f"frozen while loading: it has done nothing for {FROZEN_AFTER_S:g} s"))
        if not self.ready and all(child.has_joined for child in self.children):
            self.ready = True
            self.on_ready()

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
                logging.INFO if status == Exit.DRAINED or child.is_stopping else logging.WARNING,
                f"exited: {status_words(status)}",
                extra={"child": str(child.ref), "status": status, "restarts": child.restart_at is not None},
            )
            if status == -signal.SIGKILL:
                self._explain_kill(child)
            if child.role != "gateway":
                self._send(WorkerExited(child.ref, status))
        return ended

    def _explain_kill(self, child: Child) -> None:
        """Say so if the kernel has killed for want of memory since the last time."""
        if (num_kills := self.ports.memory_kills()) > self._num_memory_kills:
            log.error(
                f"{child.name} was killed for want of memory: raise the memory limit, or lower --mem-fraction-static or "
                "--max-total-tokens, or start fewer workers",
                extra={"child": str(child.ref)},
            )
        self._num_memory_kills = num_kills

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
        if self._signals:
            self.say(
                f"stopping: answers in progress have up to {self.drain_s:g} s to end; Ctrl-C again ends everything now"
            )
        for child in self.children:
            child.stop()
        for role in (Role.DECODE, Role.PREFILL, "gateway"):
            self._stop_all(child for child in self.children if child.role == role)
        self.ports.control.close()

    def _stop_all(self, children: Iterable[Child]) -> None:
        waiting = [child for child in children if child.is_running]
        for child in waiting:
            child.signal(signal.SIGTERM)
        began = time.monotonic()
        kill_at, say_at = began + self.drain_s + KILL_AFTER_S, began + STILL_STOPPING_S
        while waiting:
            now = time.monotonic()
            if now >= say_at:
                self.say(f"waiting for {', '.join(child.name for child in waiting)}; Ctrl-C again ends everything now")
                say_at = now + STILL_STOPPING_S
            if now >= kill_at or len(self._signals) > 1:
                for child in waiting:
                    child.signal(signal.SIGKILL)
            self._reap(now)
            waiting = [child for child in waiting if child.is_running]
            if waiting:
                self._talk(now)
                self._wait(TICK_S)
