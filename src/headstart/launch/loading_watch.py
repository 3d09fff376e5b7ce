"""Finds processes that are frozen while they load: nobody else misses them, because they have not joined yet.

A process that loads computes, reads or at least wakes up. One that has done nothing at all for FROZEN_AFTER_S is taken for
frozen. Once it has joined, the gateway watches its heartbeats instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headstart.core.messages import WorkerRef

FROZEN_AFTER_S = 60.0
"""Seconds without any work. Time in which the launcher itself stood still does not count."""
MOST_S = 1.0
"""What one look may add: a launcher that was stopped with everything else has seen nothing."""

Work = tuple[int, ...]
"""Numbers of which one grows whenever the process does anything."""


@dataclass(slots=True)
class _Idle:
    work: Work
    looked_at: float
    idle_s: float = 0.0


@dataclass(slots=True)
class LoadingWatch:
    """`read` gives the work that a process has done, None if that cannot be known."""

    read: Callable[[int], Work | None]
    _idle: dict[WorkerRef, _Idle] = field(default_factory=dict)

    def frozen(self, loading: Mapping[WorkerRef, int], now: float) -> list[WorkerRef]:
        """Those of `loading` (process ids) that have done nothing for FROZEN_AFTER_S."""
        self._idle = {ref: idle for ref, idle in self._idle.items() if ref in loading}
        return [ref for ref, pid in loading.items() if self._idle_s(ref, pid, now) >= FROZEN_AFTER_S]

    def _idle_s(self, ref: WorkerRef, pid: int, now: float) -> float:
        work = self.read(pid)
        idle = self._idle.get(ref)
        if work is None:
            return 0.0
        if idle is None or idle.work != work:
            self._idle[ref] = _Idle(work, now)
            return 0.0
        idle.idle_s += min(MOST_S, now - idle.looked_at)
        idle.looked_at = now
        return idle.idle_s


def work_of(pid: int, proc: Path = Path("/proc")) -> Work | None:
    """Faults and processor time of a process, and the nanoseconds its threads have run."""
    try:
        after_name = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    faults_and_time = tuple(int(after_name[index]) for index in (7, 9, 11, 12))  # minflt, majflt, utime, stime
    return (*faults_and_time, sum(_run_ns(path) for path in (proc / str(pid) / "task").glob("*/schedstat")))


def _run_ns(schedstat: Path) -> int:
    try:
        return int(schedstat.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0  # the thread has ended, or the kernel does not count
