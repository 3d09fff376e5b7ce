"""When a child is started again, at every age it can have when it ends."""

import sys
from itertools import pairwise

import pytest

from headstart.launch.child import BACKOFF_S, STEADY_S, Child
from headstart.worker.exits import Exit

AGES = (0.0, 1.0, 30.0, STEADY_S - 0.001, STEADY_S, STEADY_S + 0.001, 119.0, 121.0, 600.0, 3600.0, 86_400.0, 3e7)


def child_that_ends_with(status: int) -> Child:
    return Child("decode-0", "decode", lambda incarnation: ([sys.executable, "-c", f"raise SystemExit({status})"], b""))


def lived(child: Child, started_at: float, age_s: float) -> float | None:
    """Let `child` start and end; returns the seconds until its next start, None if there is none."""
    child.start(started_at)
    assert child.process is not None
    child.process.wait()
    assert child.reap(started_at + age_s) is not None
    return None if child.restart_at is None else child.restart_at - (started_at + age_s)


@pytest.mark.parametrize("age_s", AGES)
def test_the_first_exit_is_followed_by_the_shortest_wait_whatever_its_age(age_s: float) -> None:
    assert lived(child_that_ends_with(Exit.CRASHED), 1000.0, age_s) == pytest.approx(BACKOFF_S[0], abs=1e-6)


@pytest.mark.parametrize("age_s", [age for age in AGES if age >= STEADY_S])
def test_a_child_that_lived_long_starts_its_waits_over(age_s: float) -> None:
    child = child_that_ends_with(Exit.CRASHED)
    for _ in range(4):
        lived(child, 0.0, 1.0)
    assert lived(child, 100.0, age_s) == pytest.approx(BACKOFF_S[0], abs=1e-6)
    assert lived(child, 1e8, 1.0) == pytest.approx(BACKOFF_S[0], abs=1e-6)
    assert lived(child, 1e8, 1.0) == pytest.approx(BACKOFF_S[1], abs=1e-6)


def test_quick_exits_in_a_row_wait_longer_up_to_the_longest() -> None:
    child = child_that_ends_with(Exit.DEVICE_FAILED)
    waits = [lived(child, 0.0, 1.0) for _ in range(len(BACKOFF_S) + 2)]
    assert waits == pytest.approx([*BACKOFF_S, BACKOFF_S[-1], BACKOFF_S[-1]])
    assert all(shorter < longer for shorter, longer in pairwise(BACKOFF_S))


@pytest.mark.parametrize("status", [Exit.DRAINED, Exit.BAD_SETTINGS, Exit.NAME_TAKEN])
@pytest.mark.parametrize("age_s", [1.0, STEADY_S, 3600.0])
def test_what_cannot_get_better_is_not_started_again(status: Exit, age_s: float) -> None:
    assert lived(child_that_ends_with(status), 0.0, age_s) is None


def test_a_child_that_was_stopped_is_not_started_again_whatever_its_status() -> None:
    child = child_that_ends_with(Exit.CRASHED)
    child.start(0.0)
    child.stop()
    assert child.process is not None
    child.process.wait()
    assert child.reap(1.0) == Exit.CRASHED
    assert child.restart_at is None


def test_one_that_waits_for_its_start_is_not_started_once_stopped() -> None:
    child = child_that_ends_with(Exit.CRASHED)
    lived(child, 0.0, 1.0)
    child.stop()
    assert child.restart_at is None
