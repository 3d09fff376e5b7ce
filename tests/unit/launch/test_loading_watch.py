"""A process that is frozen while it loads is found; one that is slow is left alone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from headstart.core.messages import WorkerRef
from headstart.launch.loading_watch import FROZEN_AFTER_S, LoadingWatch, Work, work_of
from tests.support.steady import PATIENCE_S

REF = WorkerRef("decode-0", 1)


class Process:
    """Work done so far, as the watch reads it."""

    def __init__(self) -> None:
        self.work: Work | None = (0,)

    def read(self, pid: int) -> Work | None:
        return self.work


def looks(watch: LoadingWatch, start: float, seconds: float, loading: dict[WorkerRef, int]) -> list[WorkerRef]:
    """What a look a second finds in the end."""
    found: list[WorkerRef] = []
    for second in range(int(seconds) + 1):
        found = watch.frozen(loading, start + second)
    return found


def test_a_process_that_does_nothing_for_the_whole_time_is_frozen() -> None:
    watch = LoadingWatch(Process().read)
    assert looks(watch, 0.0, FROZEN_AFTER_S - 1, {REF: 1}) == []
    assert looks(watch, FROZEN_AFTER_S, 1, {REF: 1}) == [REF]


def test_the_least_work_starts_the_time_anew() -> None:
    process = Process()
    watch = LoadingWatch(process.read)
    looks(watch, 0.0, FROZEN_AFTER_S - 1, {REF: 1})
    process.work = (1,)
    assert looks(watch, FROZEN_AFTER_S, FROZEN_AFTER_S - 1, {REF: 1}) == []


def test_a_launcher_that_stood_still_with_its_machine_blames_nobody() -> None:
    watch = LoadingWatch(Process().read)
    watch.frozen({REF: 1}, 0.0)
    assert watch.frozen({REF: 1}, 10 * FROZEN_AFTER_S) == []


def test_a_later_incarnation_has_the_whole_time_and_what_cannot_be_read_is_not_judged() -> None:
    process = Process()
    watch = LoadingWatch(process.read)
    looks(watch, 0.0, FROZEN_AFTER_S, {REF: 1})
    assert watch.frozen({WorkerRef("decode-0", 2): 2}, FROZEN_AFTER_S + 1) == []
    process.work = None
    assert looks(watch, 1000.0, 2 * FROZEN_AFTER_S, {REF: 1}) == []


def test_a_stopped_process_does_no_work_and_a_sleeping_one_that_wakes_does() -> None:
    sleeper = "import time\nwhile True: time.sleep(0.01)"
    process = subprocess.Popen([sys.executable, "-c", sleeper])
    try:
        before = work_of(process.pid)
        deadline = time.monotonic() + PATIENCE_S
        while work_of(process.pid) == before:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = work_of(process.pid)
        assert stopped is not None
        assert work_of(process.pid) == stopped
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("pid", [0, 2**22 + 1])
def test_no_process_has_no_work(pid: int) -> None:
    assert work_of(pid) is None
