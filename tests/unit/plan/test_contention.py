"""When steps of two workers end that compete for one machine. A decode step takes 1 s alone, a prefill step 3 s."""

from dataclasses import dataclass

import pytest

from headstart.plan.contention import SharedMachine
from headstart.plan.cost import Contention, CostModel, StepCoefficients
from headstart.sim.clock import VirtualClock
from headstart.sim.cost import LinkCost, StepShape

SHAPE = StepShape(1, 1, 1, 1, 1)


@dataclass
class FakeDevice:
    finish_at: float | None = None


class Machine:
    def __init__(self, decode_slowed: float, prefill_slowed: float) -> None:
        decode, prefill = (StepCoefficients(seconds, 0.0, 0.0, 0.0, 0.0, 0.0) for seconds in (1.0, 3.0))
        contention = Contention(decode_slowed, prefill_slowed)
        costs = CostModel("made up", "cpu", 1, decode, prefill, LinkCost(0.0, 0.0), contention=contention)
        self.clock = VirtualClock()
        self.prefill, self.decode = FakeDevice(), FakeDevice()
        self.shared = SharedMachine(costs)
        self.shared.attach(self.clock, self.prefill, self.decode)

    def start_prefill(self) -> None:
        self.prefill.finish_at = self.clock.now() + self.shared.prefill_time(SHAPE)

    def start_decode(self) -> None:
        self.decode.finish_at = self.clock.now() + self.shared.decode_time(SHAPE)

    def decode_until(self, end: float) -> int:
        """Steps one after another, as many as begin before `end`."""
        num_steps = 0
        while self.clock.now() < end:
            self.start_decode()
            assert self.decode.finish_at is not None
            self.clock.advance_to(self.decode.finish_at)
            self.decode.finish_at = None
            num_steps += 1
        return num_steps


def test_a_step_that_is_alone_takes_its_own_time() -> None:
    machine = Machine(0.5, 1.0)
    machine.start_decode()
    assert machine.decode.finish_at == pytest.approx(1.0)


def test_a_step_in_flight_is_stretched_from_when_the_other_begins() -> None:
    machine = Machine(0.5, 1.0)
    machine.start_decode()
    machine.clock.advance_to(0.4)
    machine.start_prefill()
    assert machine.decode.finish_at == pytest.approx(0.4 + 0.6 * 1.5)
    assert machine.prefill.finish_at == pytest.approx(1.3 + 3.0 - 0.9 / 2)


def test_steps_on_end_stretch_the_other_all_the_time() -> None:
    machine = Machine(0.5, 1.0)
    machine.start_prefill()
    assert machine.decode_until(6.0) == 4
    assert machine.prefill.finish_at == pytest.approx(6.0)


def test_the_other_one_has_the_machine_back_when_a_step_ends() -> None:
    machine = Machine(0.5, 1.0)
    machine.start_prefill()
    machine.decode_until(1.0)
    assert machine.clock.now() == pytest.approx(1.5)
    assert machine.prefill.finish_at == pytest.approx(1.5 + 3.0 - 0.75)


def test_a_device_whose_step_is_over_is_left_alone() -> None:
    machine = Machine(0.5, 1.0)
    machine.start_prefill()
    machine.clock.advance_to(3.0)
    machine.prefill.finish_at = None
    machine.start_decode()
    assert machine.prefill.finish_at is None
    assert machine.decode.finish_at == pytest.approx(4.0)
