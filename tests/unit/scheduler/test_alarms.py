"""Deadlines of choices: each rings once, ended choices' are forgotten in time."""

from random import Random

from headstart.core.arrays import int32_array
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.core.sequence import Sequence
from headstart.scheduler.decode.deadlines import Deadlines
from headstart.scheduler.decode.metrics import RequestMetrics
from headstart.scheduler.decode.states import Choice


class World:
    def __init__(self) -> None:
        self.open: dict[ChoiceRef, Choice] = {}
        self.alarms = Deadlines(self.open.get)
        self.num_choices = 0

    def begin(self, name: str = "") -> Choice:
        self.num_choices += 1
        ref, prompt = ChoiceRef(name or f"r{self.num_choices}"), int32_array([1])
        request = Request(ref, prompt, SamplingParams(), StopCriteria(1), b"", 600.0)
        choice = Choice(
            request, "gateway", (), self.num_choices, Sequence(prompt, prompt[:0]), 600.0, RequestMetrics(0.0)
        )
        self.open[ref] = choice
        return choice

    def end(self, choice: Choice) -> None:
        del self.open[choice.ref]


def test_alarms_ring_in_order_once_and_the_oldest_choice_first():
    world = World()
    first, second = world.begin(), world.begin()
    world.alarms.set(second, 1.0)
    world.alarms.set(first, 1.0)
    third = world.begin()
    world.alarms.set(third, 2.0)
    assert world.alarms.next_at == 1.0
    assert list(world.alarms.due(0.5)) == []
    assert list(world.alarms.due(1.0)) == [first, second]
    assert world.alarms.next_at == 2.0
    assert list(world.alarms.due(9.0)) == [third]
    assert world.alarms.next_at == float("inf")


def test_an_ended_choice_and_a_later_one_of_its_name_are_not_taken_for_each_other():
    world = World()
    ended = world.begin("same")
    world.alarms.set(ended, 1.0)
    world.end(ended)
    later = world.begin("same")
    world.alarms.set(later, 2.0)
    assert list(world.alarms.due(1.5)) == []
    assert list(world.alarms.due(2.5)) == [later]


def test_an_alarm_set_while_others_ring_rings_in_its_time():
    world = World()
    choice = world.begin()
    world.alarms.set(choice, 1.0)
    for ringing in world.alarms.due(1.0):
        world.alarms.set(ringing, 3.0)
    assert list(world.alarms.due(2.0)) == []
    assert list(world.alarms.due(3.0)) == [choice]


def test_alarms_of_ended_choices_do_not_add_up_and_no_living_choice_loses_one():
    world, rng = World(), Random(1)
    expected: list[tuple[float, Choice]] = []
    longest = 0
    for number in range(5000):
        choice = world.begin()
        world.alarms.set(choice, 300.0 + number)
        if rng.random() < 0.01:
            expected.append((300.0 + number, choice))
        else:
            world.end(choice)
        longest = max(longest, len(world.alarms))
    assert longest <= 64 + 2 * (len(expected) + 1)
    rung: list[tuple[float, Choice]] = []
    while world.alarms.next_at < float("inf"):
        at = world.alarms.next_at
        rung += [(at, choice) for choice in world.alarms.due(at)]
    assert rung == sorted(expected, key=lambda alarm: (alarm[0], alarm[1].order))
