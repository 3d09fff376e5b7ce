"""The beat tells the loop's age; past the watchdog's time the process ends."""

from headstart.core.messages import Heartbeat, WorkerLoad, WorkerRef
from headstart.worker.heartbeat import HeartbeatThread
from headstart.worker.loop import LoopHealth


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def heartbeat(clock: ManualClock, health: LoopHealth) -> tuple[HeartbeatThread, list[Heartbeat], list[float]]:
    beats: list[Heartbeat] = []
    wedged: list[float] = []
    return (
        HeartbeatThread(WorkerRef("decode-0", 1), health, clock, beats.append, wedged.append, watchdog_s=5.0),
        beats,
        wedged,
    )


def test_a_beat_carries_the_loops_age_and_last_load() -> None:
    clock = ManualClock()
    health = LoopHealth(clock.now())
    thread, beats, _ = heartbeat(clock, health)
    health.publish(clock.now(), WorkerLoad(num_running=3))
    clock.time += 1.5
    thread.beat_once()
    assert (beats[0].loop_age_s, beats[0].load.num_running) == (1.5, 3)


def test_a_pass_that_publishes_nothing_still_resets_the_age() -> None:
    clock = ManualClock()
    health = LoopHealth(clock.now())
    thread, beats, _ = heartbeat(clock, health)
    clock.time += 4.0
    health.touch(clock.now())
    thread.beat_once()
    assert beats[0].loop_age_s == 0.0


def test_a_loop_stuck_past_the_watchdog_ends_the_process_and_sends_no_beat() -> None:
    clock = ManualClock()
    thread, beats, wedged = heartbeat(clock, LoopHealth(clock.now()))
    clock.time += 5.5
    thread.beat_once()
    assert (beats, wedged) == ([], [5.5])
