"""The loop runs the contract's pass, in the contract's order, and ends when nothing is unfinished."""

from dataclasses import dataclass, field

import pytest

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Row
from headstart.core.messages import Drain, Flush, Message, WorkerLoad
from headstart.transfer.contract import Completed, TransferEvent
from headstart.worker.loop import IDLE_S, POLL_S, STEP_PATIENCE_S, LoopHealth, LoopParts, WorkerLoop


@dataclass
class World:
    """Records what the loop does; scripted from outside."""

    log: list[str] = field(default_factory=list)
    inbox: list[tuple[str, Message]] = field(default_factory=list)
    events: list[TransferEvent] = field(default_factory=list)
    outputs: list[BatchOutput] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    state: WorkerLoad = field(default_factory=WorkerLoad)
    wakeup: float | None = None
    time: float = 0.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    # inbox
    def receive(self) -> list[tuple[str, Message]]:
        taken, self.inbox = self.inbox, []
        return taken

    def wait(self, timeout_s: float) -> None:
        self.slept.append(timeout_s)
        self.time += timeout_s

    # scheduler
    def handle(self, sender: str, message: Message) -> None:
        self.log.append(f"handle {type(message).__name__} from {sender}")

    def on_transfer(self, event: TransferEvent) -> None:
        self.log.append("on_transfer")

    def update(self, output: BatchOutput) -> None:
        self.log.append(f"update {output.step_id}")

    def advance(self) -> float | None:
        self.log.append("advance")
        return self.wakeup

    def schedule(self) -> Batch | None:
        self.log.append("schedule")
        return self.batches.pop(0) if self.batches else None

    def load(self) -> WorkerLoad:
        return self.state


@dataclass
class Device:
    """Executor and transport of a World."""

    world: World
    max_steps_in_flight: int = 1

    def launch(self, batch: Batch) -> None:
        self.world.log.append(f"launch {batch.step_id}")

    def poll(self) -> BatchOutput | None:
        return self.world.outputs.pop(0) if self.world.outputs else None

    def close(self) -> None: ...


@dataclass
class Wire:
    world: World

    def descriptor(self) -> bytes:
        return b""

    def connect(self, peer: str, descriptor: bytes) -> None: ...

    def disconnect(self, peer: str) -> None: ...

    def write(self, peer: str, src_pages: object, dst_pages: object, notice: bytes) -> int:
        return 0

    def poll(self) -> list[TransferEvent]:
        taken, self.world.events = self.world.events, []
        return taken

    def close(self) -> None: ...


def loop_over(
    world: World, *, prefill: bool = False, health: LoopHealth | None = None, max_steps: int = 1
) -> WorkerLoop:
    health = health or LoopHealth(0.0)
    return WorkerLoop(LoopParts(world, Wire(world), Device(world, max_steps), world, world, health, prefill))


def step(step_id: int) -> Batch:
    return Batch(step_id, (Row(0, int32_array([1]), 0, int32_array([0])),))


def test_a_pass_takes_messages_then_transfers_then_the_step_and_launches_last() -> None:
    world = World(batches=[step(1), step(2)])
    loop = loop_over(world)
    loop.run_pass()
    world.log.clear()
    world.inbox = [("gateway", Flush(1))]
    world.events = [Completed(0)]
    world.outputs = [BatchOutput(1)]
    loop.run_pass()
    assert world.log == ["handle Flush from gateway", "on_transfer", "update 1", "advance", "schedule", "launch 2"]


def test_nothing_is_scheduled_while_a_step_is_in_flight() -> None:
    world = World(batches=[step(1), step(2)])
    loop = loop_over(world)
    loop.run_pass()
    world.log.clear()
    loop.run_pass()
    assert world.log == ["advance"]


def test_a_second_step_is_launched_behind_the_first_if_the_executor_takes_two() -> None:
    world = World(batches=[step(1), step(2), step(3)])
    loop = loop_over(world, max_steps=2)
    loop.run_pass()
    assert world.log == ["advance", "schedule", "launch 1", "schedule", "launch 2"]
    world.log.clear()
    loop.run_pass()
    assert world.log == ["advance"]
    world.log.clear()
    world.outputs = [BatchOutput(1), BatchOutput(2)]
    loop.run_pass()
    assert world.log == ["update 1", "update 2", "advance", "schedule", "launch 3", "schedule"]


def test_a_step_that_waits_for_the_one_before_it_ages_the_loop_from_that_ones_end_on() -> None:
    world = World(batches=[step(1), step(2)])
    health = LoopHealth(0.0)
    loop = loop_over(world, health=health, max_steps=2)
    loop.run_pass()
    world.time = STEP_PATIENCE_S
    world.outputs = [BatchOutput(1)]
    loop.run_pass()
    world.time = 2 * STEP_PATIENCE_S
    loop.run_pass()
    assert health.read()[0] == world.time, "it has run for no longer than it may"
    world.time += 1.0
    loop.run_pass()
    assert health.read()[0] == world.time - 1.0


@pytest.mark.behaviour("M2")
def test_a_step_that_never_ends_ages_the_loop_although_it_comes_round_and_a_long_one_does_not() -> None:
    world = World(batches=[step(1)])
    health = LoopHealth(0.0)
    loop = WorkerLoop(LoopParts(world, Wire(world), Device(world), world, world, health, False))

    def age_after(passed_s: float) -> float:
        world.time += passed_s
        loop.run_pass()
        return world.time - health.read()[0]

    assert age_after(0.0) == 0.0
    assert age_after(STEP_PATIENCE_S) == 0.0, "a long chunk"
    assert age_after(30.0) == 30.0
    world.outputs = [BatchOutput(1)]
    assert age_after(1.0) == 0.0


def test_an_idle_loop_sleeps_long_and_one_with_open_transfers_polls() -> None:
    world = World()
    run_once(loop_over(world), world)
    assert world.slept[0] == IDLE_S
    busy = World(state=WorkerLoad(inflight_pages=1))
    run_once(loop_over(busy), busy)
    assert busy.slept[0] == POLL_S


def test_a_prefill_loop_polls_while_any_prompt_is_open_because_its_writes_are() -> None:
    world = World(state=WorkerLoad(num_running=1))
    run_once(loop_over(world, prefill=True), world)
    assert world.slept[0] == POLL_S


def test_the_loop_sleeps_no_longer_than_the_scheduler_allows() -> None:
    world = World(wakeup=0.02)
    run_once(loop_over(world), world)
    assert world.slept[0] == 0.02


def test_a_drain_is_told_to_the_scheduler_once_and_ends_the_loop_when_nothing_is_unfinished() -> None:
    world = World(state=WorkerLoad(num_running=1))
    asked = iter([False, True, True, True])

    def ask() -> bool:
        if len(world.slept) == 3:
            world.state = WorkerLoad()
        return next(asked)

    assert loop_over(world).run(ask, drain_timeout_s=30.0)
    assert world.log.count(f"handle {Drain.__name__} from gateway") == 1
    assert len(world.slept) == 3


def test_a_drain_that_takes_too_long_ends_the_loop_and_says_so() -> None:
    world = World(state=WorkerLoad(num_running=1))
    assert not loop_over(world).run(lambda: True, drain_timeout_s=0.25)
    assert world.time >= 0.25


def run_once(loop: WorkerLoop, world: World) -> None:
    loop.run(lambda: len(world.slept) >= 1, drain_timeout_s=0.0)


def test_a_scheduler_that_gives_up_is_drained_without_waiting_for_pages_that_never_come_back() -> None:
    world = World(state=WorkerLoad(num_running=1, inflight_pages=5, must_restart=True))
    loop = loop_over(world)

    def ask() -> bool:
        if len(world.slept) == 2:
            world.state = WorkerLoad(inflight_pages=5, must_restart=True)
        return False

    assert loop.run(ask, drain_timeout_s=30.0)
    assert loop.must_restart
    assert world.log.count(f"handle {Drain.__name__} from gateway") == 1
    assert len(world.slept) == 2
