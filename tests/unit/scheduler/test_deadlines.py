"""Deadlines of choices: each expires once, those of ended choices are forgotten in time."""

from random import Random

import pytest

from headstart.core.arrays import int32_array
from headstart.core.errors import InvariantError
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.core.sequence import Sequence
from headstart.scheduler.decode.deadlines import Deadlines, Timer
from headstart.scheduler.decode.metrics import ChoiceMetrics
from headstart.scheduler.decode.states import Choice


class World:
    def __init__(self) -> None:
        self.open: dict[ChoiceRef, Choice] = {}
        self.deadlines = Deadlines()
        self.num_choices = 0

    def begin(self, name: str = "") -> Choice:
        self.num_choices += 1
        ref, prompt = ChoiceRef(name or f"r{self.num_choices}"), int32_array([1])
        request = Request(ref, prompt, SamplingParams(), StopCriteria(1), b"", 600.0)
        choice = Choice(
            request, "gateway", (), self.num_choices, Sequence(prompt, prompt[:0]), 600.0, ChoiceMetrics(0.0, 1)
        )
        self.open[ref] = choice
        return choice

    def end(self, choice: Choice) -> None:
        del self.open[choice.ref]
        self.deadlines.drop(choice)


def test_deadlines_expire_in_order_once_and_the_oldest_choice_first():
    world = World()
    first, second = world.begin(), world.begin()
    world.deadlines.set(second, 1.0)
    world.deadlines.set(first, 1.0)
    third = world.begin()
    world.deadlines.set(third, 2.0)
    assert world.deadlines.next_at == 1.0
    assert list(world.deadlines.expire(0.5)) == []
    assert list(world.deadlines.expire(1.0)) == [first, second]
    assert world.deadlines.next_at == 2.0
    assert list(world.deadlines.expire(9.0)) == [third]
    assert world.deadlines.next_at == float("inf")


def test_an_ended_choice_and_a_later_one_of_its_name_are_not_taken_for_each_other():
    world = World()
    ended = world.begin("same")
    world.deadlines.set(ended, 1.0)
    world.end(ended)
    later = world.begin("same")
    world.deadlines.set(later, 2.0)
    assert list(world.deadlines.expire(1.5)) == []
    assert list(world.deadlines.expire(2.5)) == [later]


def test_a_deadline_set_while_others_expire_expires_in_its_time():
    world = World()
    choice = world.begin()
    world.deadlines.set(choice, 1.0)
    for expired in world.deadlines.expire(1.0):
        world.deadlines.set(expired, 3.0)
    assert list(world.deadlines.expire(2.0)) == []
    assert list(world.deadlines.expire(3.0)) == [choice]


def test_deadlines_of_ended_choices_do_not_add_up_and_no_living_choice_loses_one():
    world, rng = World(), Random(1)
    expected: list[tuple[float, Choice]] = []
    longest = 0
    for number in range(5000):
        choice = world.begin()
        world.deadlines.set(choice, 300.0 + number)
        if rng.random() < 0.01:
            expected.append((300.0 + number, choice))
        else:
            world.end(choice)
        longest = max(longest, len(world.deadlines))
    assert longest <= 64 + 2 * (len(expected) + 1)
    expired: list[tuple[float, Choice]] = []
    while world.deadlines.next_at < float("inf"):
        at = world.deadlines.next_at
        expired += [(at, choice) for choice in world.deadlines.expire(at)]
    assert expired == sorted(expected, key=lambda each: (each[0], each[1].order))


def test_the_last_time_set_counts_and_none_is_infinity():
    world = World()
    choice = world.begin()
    world.deadlines.set(Timer.PEERS, 3.0)
    world.deadlines.set(Timer.PEERS, 1.0)
    world.deadlines.set(Timer.GATEWAYS, 2.0)
    world.deadlines.set(choice, 2.5)
    world.deadlines.set(Timer.GATEWAYS, float("inf"))
    assert list(world.deadlines.expire(1.0)) == [Timer.PEERS]
    assert list(world.deadlines.expire(9.0)) == [choice]
    world.deadlines.check([])
    assert world.deadlines.next_at == float("inf")


def test_what_came_in_is_due_at_once():
    world = World()
    world.deadlines.set(Timer.PEERS, 5.0)
    world.deadlines.set(Timer.PEERS, float("-inf"))
    assert list(world.deadlines.expire(0.0)) == [Timer.PEERS]
    assert list(world.deadlines.expire(9.0)) == []


def test_a_choice_without_a_deadline_and_a_deadline_without_a_choice_are_found():
    world = World()
    choice = world.begin()
    with pytest.raises(InvariantError, match="deadline"):
        world.deadlines.check([choice])
    world.deadlines.set(choice, 1.0)
    world.deadlines.check([choice])
    with pytest.raises(InvariantError, match="deadline"):
        world.deadlines.check([])
