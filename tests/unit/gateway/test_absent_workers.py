"""Decode workers of unequal pools and workers that come and go: what is waited for, what is refused, and in which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, Leave, Submit, WorkerExited
from headstart.core.request import RequestStats
from tests.support.dispatchers import World

SMALL, LARGE = 60, 1000


def unequal_world():
    world = World()
    small, large = world.join("decode-0", capacity=SMALL), world.join("decode-1", capacity=LARGE)
    return world, small, large


def kill(world, worker):
    world.beating.discard(worker)
    world.dispatcher.handle("launcher", WorkerExited(worker, -9))


def silence(world, worker):
    world.beating.discard(worker)
    world.run(4.0)


@pytest.mark.parametrize("go_away", [kill, silence])
def test_a_new_request_waits_for_the_only_worker_that_can_hold_it(go_away):
    world, _, large = unequal_world()
    go_away(world, large)
    sink = world.submit(prompt=100, remaining_s=300)
    assert not sink.is_over
    assert not world.take(Submit)
    world.run(10.0)
    back = world.join("decode-1", incarnation=2, capacity=LARGE)
    assert world.submitted()[0] == str(back)


@pytest.mark.parametrize("go_away", [kill, silence])
def test_a_new_request_that_waited_in_vain_is_told_to_try_again(go_away):
    world, _, large = unequal_world()
    go_away(world, large)
    sink = world.submit(prompt=100, remaining_s=300)
    world.run(61.0)
    assert sink.failed[0].code is ErrorCode.UNAVAILABLE
    world.check()


@pytest.mark.parametrize("go_away", [kill, silence])
def test_a_running_stream_waits_for_the_only_worker_that_can_hold_it(go_away):
    world, _, large = unequal_world()
    sink = world.submit(prompt=100, remaining_s=300)
    _, submit = world.submitted()
    world.emit(large, submit.request.ref, 0, 5)
    go_away(world, large)
    world.run(20.0)
    assert not sink.is_over
    back = world.join("decode-1", incarnation=2, capacity=LARGE)
    to, again = world.submitted()
    assert to == str(back)
    assert list(again.request.output_ids) == [5]


def test_a_running_stream_whose_worker_stays_away_ends_as_lost():
    world, _, large = unequal_world()
    sink = world.submit(prompt=100, remaining_s=300)
    _, submit = world.submitted()
    world.emit(large, submit.request.ref, 0, 5)
    kill(world, large)
    world.run(62.0)
    assert sink.failed[0].code is ErrorCode.WORKER_LOST


def test_what_no_known_worker_can_hold_is_refused_in_words_that_name_the_pool():
    world, _, large = unequal_world()
    kill(world, large)
    sink = world.submit(prompt=LARGE + 1)
    assert sink.failed[0].code is ErrorCode.TOO_LONG
    for words in ("this model's maximum context length is 1000 tokens", "pool", "decode worker", "prompt is too long"):
        assert words in sink.failed[0].message


def test_the_capacity_stays_while_the_largest_worker_is_away_and_shrinks_once_it_is_given_up():
    world, small, large = unequal_world()
    kill(world, large)
    world.run(300.0, step=0.5)
    assert world.dispatcher.capacity_tokens == LARGE
    world.run(310.0, step=0.5)
    assert world.dispatcher.capacity_tokens == SMALL
    assert world.submit(prompt=100).failed[0].code is ErrorCode.TOO_LONG
    assert small in world.beating


# ---- deaths --------------------------------------------------------------------------------------------------------------


def three_workers():
    world = World()
    return world, {str(ref): ref for ref in (world.join(f"decode-{i}") for i in range(3))}


def move_on(world, workers, go_away):
    """The request is accepted somewhere, and that worker goes away."""
    to, submit = world.submitted()
    world.accept(workers[to], submit.request.ref)
    go_away(world, workers[to])
    return workers[to]


def test_two_silent_workers_are_no_deaths():
    world, workers = three_workers()
    sink = world.submit(remaining_s=300)
    for _ in range(2):
        move_on(world, workers, silence)
    assert world.submitted()[0] in workers
    assert not sink.is_over


def test_silence_counts_once_it_turns_out_to_have_been_death():
    world, workers = three_workers()
    sink = world.submit(remaining_s=300)
    first = move_on(world, workers, silence)
    second, submit = world.submitted()
    world.accept(workers[second], submit.request.ref)
    kill(world, first)
    assert not sink.is_over
    kill(world, workers[second])
    assert sink.failed[0].code is ErrorCode.WORKER_LOST


def test_a_successor_under_the_same_lock_proves_a_silent_workers_end():
    world, workers = three_workers()
    sink = world.submit(remaining_s=300)
    first = move_on(world, workers, silence)
    second, submit = world.submitted()
    world.accept(workers[second], submit.request.ref)
    world.join(first.name, incarnation=2)
    kill(world, workers[second])
    assert sink.failed[0].code is ErrorCode.WORKER_LOST


def test_a_worker_that_drained_is_no_death():
    world, workers = three_workers()
    sink = world.submit(remaining_s=300)
    for _ in range(2):
        move_on(world, workers, lambda world, ref: world.say(ref, Leave(ref)))
    assert world.take(Submit)
    assert not sink.is_over


# ---- usage ---------------------------------------------------------------------------------------------------------------

COUNTS = st.integers(-100, 200)
STATS = st.builds(RequestStats, cached_tokens=COUNTS, decode_prefix_len=COUNTS, prefill_prefix_len=COUNTS)
MOVES = st.sampled_from([kill, silence])


@given(stats=STATS, moves=st.lists(MOVES, max_size=1), prompt_len=st.integers(1, 50), stopped=st.booleans())
def test_usage_stays_within_the_prompt_whatever_way_a_request_took(stats, moves, prompt_len, stopped):
    world, workers = three_workers()
    sink = world.submit(prompt=prompt_len, max_new=8, remaining_s=300)
    for index, go_away in enumerate(moves):
        to, submit = world.submitted()
        world.emit(workers[to], submit.request.ref, index, 5)
        go_away(world, workers[to])
    to, submit = world.submitted()
    ref, num_tokens = submit.request.ref, len(moves)
    if stopped:
        world.emit(workers[to], ref, num_tokens, 9)
        world.dispatcher.stop(*sink_key(submit))
        world.say(workers[to], Failed(ref, ErrorCode.CANCELLED, "cancelled", stats))
    else:
        world.say(workers[to], Finished(ref, "length", num_tokens, stats))
    seen = sink.finished[0].stats
    for told, counted in (
        (seen.cached_tokens, stats.cached_tokens),
        (seen.decode_prefix_len, stats.decode_prefix_len),
        (seen.prefill_prefix_len, stats.prefill_prefix_len),
    ):
        assert 0 <= told <= prompt_len
        assert told == counted or not 0 <= counted <= prompt_len
    world.check()


def sink_key(submit):
    return submit.request.ref.request_id, submit.request.ref.choice
