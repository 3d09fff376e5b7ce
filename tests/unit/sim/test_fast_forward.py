"""A world that jumps has the history of one that takes every step: the same words at the same times, the same pages taken
and evicted, the same tokens at the same times."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from headstart.core.messages import Message, Tokens
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.kv.cache import PageLease, PrefixCache
from headstart.sim.cost import LinkCost, StepShape
from headstart.sim.network import FINE, MessageFate
from headstart.sim.spec import SMALL_DECODE, SMALL_PREFILL, Modelling, Timing, WorldSpec
from headstart.sim.world import World
from headstart.transfer.loopback import Fate, Posted

CONTEXT_LEN = 96
LINKS = (None, LinkCost(0.0004, 0.0), LinkCost(0.0004, 3e-6))
"""Of random delays; of one time for every write; and such that writes wait for each other."""


def step_s(shape: StepShape) -> float:
    return 0.004 + 1.3e-4 * shape.num_new + 1.7e-5 * shape.unique_tokens + 0.9e-6 * shape.pair_tokens


@dataclass
class History:
    """Everything that a world decided."""

    said: list[tuple[float, str, str, str]] = field(default_factory=list)
    posted: list[tuple[float, Posted]] = field(default_factory=list)
    evicted: list[list[list[int]]] = field(default_factory=list)  # by cache, in order
    tokens: list[tuple[list[int], list[float]]] = field(default_factory=list)
    ends: list[tuple[float | None, str]] = field(default_factory=list)
    pages: list[tuple[list[int], list[int]]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


class WatchedCache(PrefixCache):
    """Tells which pages it evicts."""

    def __init__(self, num_pages: int, page_size: int, evicted: list[list[list[int]]]) -> None:
        super().__init__(num_pages, page_size)
        self._evicted: list[list[int]] = []
        evicted.append(self._evicted)

    def make_room(self, num_pages: int, takers: Iterable[tuple[PageLease, int]] = ()) -> int:
        before = self._ledger.in_tree.copy()
        num_free = super().make_room(num_pages, takers)
        gone = np.flatnonzero(before & ~self._ledger.in_tree).tolist()
        if gone:
            self._evicted.append(gone)
        return num_free


def draw_spec(rng: Random) -> WorldSpec:
    page_size = rng.choice((1, 2, 4, 8))
    longest = CONTEXT_LEN // page_size + 1
    return WorldSpec(
        rng.choice((1, 2)),
        rng.choice((1, 2, 3)),
        page_size,
        prefill_pages=longest * rng.choice((1, 2)),
        decode_pages=int(longest * rng.choice((1, 1.3, 2, 4))),
        prefill=replace(SMALL_PREFILL, chunked_prefill_size=rng.choice((8, 32)), capacity_tokens=CONTEXT_LEN),
        decode=replace(
            SMALL_DECODE,
            max_running_requests=rng.choice((2, 4, 16)),
            context_len=CONTEXT_LEN,
            local_prefill_tokens=rng.choice((0, 4)),
            num_reserved_decode_tokens=rng.choice((0, 8)),
        ),
        timing=Timing(control_delay_s=(0.0003, 0.0003), prefill_cost=step_s, decode_cost=step_s, restart_s=0.2),
        modelling=Modelling("none", page_bytes=rng.choice((None, 1000))),
        verify_transfers=False,
    )


def play(seed: int, *, jumps: bool, has_faults: bool) -> History:
    """The history of a seed's world."""
    rng = Random(seed)
    spec = draw_spec(rng)
    link = LINKS[seed % len(LINKS)]  # not drawn: a pinned seed keeps its world
    spec = replace(spec, timing=replace(spec.timing, link=link))
    history = History()
    world = World(
        replace(spec, modelling=replace(spec.modelling, jumps=jumps)),
        seed,
        partial(WatchedCache, evicted=history.evicted),
    )

    def hear(sender: str, recipient: str, message: Message) -> MessageFate:
        if not isinstance(message, Tokens):
            history.said.append((world.clock.now(), sender, recipient, repr(message)))
        return FINE

    def see(posted: Posted) -> Fate:
        history.posted.append((world.clock.now(), posted))
        return Fate()

    world.judge_messages(hear)
    world.judge_writes(see)
    ask_for_everything(world, rng)
    if has_faults:
        befall(world, rng)
    world.run_until_time(8.0)
    world.run_until(world.is_quiet)
    world.check_idle()
    for handle in world.handles:
        history.tokens.append((handle.tokens, handle.token_times))
        history.ends.append((handle.ended_at, repr(handle.finished or handle.failed)))
    for worker in world.workers.values():
        ledger = worker.organs.cache._ledger
        history.pages.append((ledger.state.tolist(), ledger._free[: ledger.num_free].tolist()))
        history.steps.append(worker.load().counters.get("steps", 0))
    return history


def ask_for_everything(world: World, rng: Random) -> None:
    stems = [[rng.randrange(97) for _ in range(48)] for _ in range(3)]
    for number in range(rng.randint(4, 24)):
        prompt = rng.choice(stems)[: rng.randint(1, 48)] + [rng.randrange(97) for _ in range(rng.randint(0, 5))]
        stop = StopCriteria(
            rng.choice((1, 5, 20, CONTEXT_LEN - len(prompt))),
            rng.choice((0, 0, 6)),
            tuple(rng.sample(range(97), rng.choice((0, 0, 0, 2)))),
        )
        request = world.request(prompt, deadline_s=rng.choice((60.0, 60.0, 0.4)))
        request = structs.replace(
            request,
            stop=stop,
            sampling=SamplingParams(seed=rng.choice((7, number))),
            cacheable=rng.random() < 0.9,
            num_top_logprobs=rng.choice((None, None, None, 0)),
        )
        world.at(0.1 + rng.choice((0.5, 4.0)) * rng.random(), partial(ask, world, request, rng.choice((1, 1, 2))))
        if rng.random() < 0.2:
            world.at(rng.uniform(0.1, 4.0), partial(leave, world, request.ref.request_id))


def ask(world: World, request: Request, num_choices: int) -> None:
    for choice in range(num_choices):
        world.submit(structs.replace(request, ref=ChoiceRef(request.ref.request_id, choice)))


def leave(world: World, request_id: str) -> None:
    for handle in world.handles:
        if handle.request.ref.request_id == request_id and not handle.is_done:
            world.cancel(handle)


def befall(world: World, rng: Random) -> None:
    for _ in range(rng.randint(1, 3)):
        name, at = rng.choice(sorted(world.workers)), rng.uniform(0.2, 4.0)
        if rng.random() < 0.5:
            world.at(at, partial(kill, world, name))
        else:
            world.at(at, partial(stall, world, name))
            world.at(at + rng.choice((0.003, 0.6, 1.7)), partial(resume, world, name))


def kill(world: World, name: str) -> None:
    if name in world.workers:
        world.kill(name)


def stall(world: World, name: str) -> None:
    if name in world.workers:
        world.stall(name)


def resume(world: World, name: str) -> None:
    if name in world.workers and world.workers[name].is_stalled:
        world.resume(name)


def assert_same(one: History, other: History) -> None:
    for mine, theirs in zip(one.said, other.said, strict=False):
        assert mine == theirs
    assert one == other


SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
@example(3657261)  # a client leaves while its answer's last token is on its way
def test_jumping_and_stepping_have_one_history(seed: int) -> None:
    assert_same(play(seed, jumps=True, has_faults=False), play(seed, jumps=False, has_faults=False))


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_also_where_workers_die_and_stall(seed: int) -> None:
    assert_same(play(seed, jumps=True, has_faults=True), play(seed, jumps=False, has_faults=True))


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, has_faults=st.booleans())
def test_jumping_and_stepping_have_one_history_in_many_worlds(seed: int, has_faults: bool) -> None:
    assert_same(play(seed, jumps=True, has_faults=has_faults), play(seed, jumps=False, has_faults=has_faults))


def passes_of(jumps: bool) -> int:
    """Events until an answer of 80 tokens is complete."""
    spec = WorldSpec(
        decode=replace(SMALL_DECODE, context_len=CONTEXT_LEN),
        timing=Timing(control_delay_s=(0.0003, 0.0003), decode_cost=step_s),
        modelling=Modelling("none", jumps=jumps),
    )
    world = World(spec)
    world.run_for(0.1)
    handle = world.submit(world.request(range(8), 80))
    num_events = 0
    while not handle.is_done:
        world.step()
        num_events += 1
    assert len(handle.tokens) == len(handle.token_times) == 80
    return num_events


def test_jumps_leave_most_steps_out() -> None:
    assert 3 * passes_of(jumps=True) < passes_of(jumps=False)


def test_a_leap_gives_each_token_its_own_time() -> None:
    spec = WorldSpec(
        timing=Timing(control_delay_s=(0.0, 0.0), decode_cost=lambda shape: 0.001 * shape.context_tokens),
        modelling=Modelling("none", jumps=True),
    )
    world = World(spec)
    world.run_for(0.1)
    handle = world.submit(world.request(range(8), 20))
    world.finish()
    gaps = np.diff(handle.token_times)
    assert gaps == pytest.approx([0.001 * (8 + index) for index in range(1, 20)])


def test_jumps_need_a_device_without_content_and_a_fixed_delay() -> None:
    with pytest.raises(ValueError, match="jumps need"):
        WorldSpec(modelling=Modelling(jumps=True))
    with pytest.raises(ValueError, match="jumps need"):
        WorldSpec(modelling=Modelling("none", jumps=True))
    timing = Timing(control_delay_s=(0.0, 0.0))
    with pytest.raises(ValueError, match="jumps need one step in flight"):
        WorldSpec(timing=timing, modelling=Modelling("none", decode_steps_in_flight=(1, 2), jumps=True))
