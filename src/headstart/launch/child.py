"""One child process of the launcher.

    waiting (backoff) ─► running ─exit─► waiting, if its status restarts
                            │   └──────► ended
                            └─ stop asked ─exit─► ended

A new incarnation starts only after the former's exit: that is what makes a later incarnation proof of the former's end.
"""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.core.messages import WorkerRef
from headstart.worker.exits import Exit

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""A child that lived this long starts its backoff over."""


@dataclass(slots=True)
class Child:
    """A name, how to start it, and the process that has it now."""

    name: str
    role: str  # "gateway", "prefill" or "decode"
    command: Callable[[int], tuple[list[str], bytes]]  # incarnation -> argv, standard input
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    incarnation: int = 0
    started_at: float = 0.0
    restart_at: float | None = 0.0  # None: not to be started
    num_quick_exits: int = 0
    statuses: list[int] = field(default_factory=list)

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
        self.process = process
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
        if Exit.restarts(status):
            self.restart_at = now + BACKOFF_S[min(self.num_quick_exits, len(BACKOFF_S)) - 1]
        return status

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
