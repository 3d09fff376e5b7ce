"""One child process of the launcher.

    waiting (backoff) ─► running ─exit─► waiting, if its status restarts
        └─ stop asked ─┐    │   └──────► ended
                       ▼    └─ stop asked ─exit─► ended
                     ended

A new incarnation starts only after the former's exit: that is what makes a later incarnation proof of the former's end.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from headstart.core.messages import Role, WorkerRef
from headstart.worker.exits import Exit

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""A child that lived this long starts its backoff over."""


def backoff_s(num_quick_exits: int) -> float:
    """Seconds to wait after the last of so many exits in a row of children that did not live for STEADY_S."""
    return BACKOFF_S[max(0, min(num_quick_exits, len(BACKOFF_S)) - 1)]


@dataclass(slots=True)
class Child:
    """A name, how to start it, and the process that has it now."""

    name: str
    role: Role | Literal["gateway"]
    command: Callable[[int], tuple[list[str], bytes]]  # incarnation -> argv, standard input
    process: subprocess.Popen[bytes] | None = None
    has_joined: bool = False  # this incarnation: the gateway knows it; of a gateway: it answers
    pidfd: int = -1
    incarnation: int = 0
    started_at: float = 0.0
    restart_at: float | None = 0.0  # None: not to be started
    num_quick_exits: int = 0
    statuses: list[int] = field(default_factory=list)
    is_stopping: bool = False

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.name, self.incarnation)

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def start(self, now: float) -> None:
        """Start the next incarnation in a process group of its own, so that Ctrl-C reaches the launcher alone."""
        self.incarnation = max(time.time_ns(), self.incarnation + 1)
        argv, document = self.command(self.incarnation)
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        try:
            process.stdin.write(document)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died already; its exit tells
        self.process, self.has_joined = process, False
        self.pidfd = os.pidfd_open(process.pid)
        self.started_at = now
        self.restart_at = None

    def reap(self, now: float) -> int | None:
        """The exit status if the process has ended; then plan the next start. Negative for a signal."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1
        self.statuses.append(status)
        self.num_quick_exits = 0 if now - self.started_at >= STEADY_S else self.num_quick_exits + 1
        if Exit.restarts(status) and not self.is_stopping:
            self.restart_at = now + backoff_s(self.num_quick_exits)
        return status

    def stop(self) -> None:
        """Let no further incarnation start."""
        self.is_stopping, self.restart_at = True, None

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
