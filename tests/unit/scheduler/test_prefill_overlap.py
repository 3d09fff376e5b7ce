"""Two steps of a prefill worker in flight: a prompt's chunks follow each other, and whatever ends meanwhile is dropped."""

import pytest
from prefill_rig import DECODE, Rig
from test_prefill import REF, Matching, done, failure, prompt

from headstart.core.batch import BatchOutput
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.identity import cache_namespace
from headstart.core.messages import PrefillDone, TicketClosed, WorkerExited

STEP_S = 0.01


def overlapping(**fields: float) -> Rig:
    return Rig(steps_in_flight=2, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 64])
def test_prompts_of_every_length_are_written_whole_by_overlapping_steps(page_size: int, length: int) -> None:
    rig = overlapping(page_size=page_size)
    caller = rig.caller()
    call = caller.call(1, prompt(length))
    rig.run()
    assert caller.holds(call)
    assert caller.take_mail() == [done(0, length)]
    assert rig.counter("tokens_computed") == length
    assert rig.is_clean()


def test_the_next_chunk_is_launched_while_one_runs_and_published_only_after_its_output() -> None:
    rig = overlapping()
    caller = rig.caller()
    caller.call(1, prompt(64))
    rig.run_pass()
    assert rig.num_in_flight == 2
    assert rig.counter("pages_posted") == 0
    rig.run(1.5 * STEP_S)
    assert rig.num_in_flight == 2
    assert rig.counter("pages_posted") == 4
    assert rig.cache.counts().pinned == 4
    rig.run(STEP_S)
    assert rig.counter("pages_posted") == 8


def test_the_device_never_waits_between_prompts_that_share_nothing() -> None:
    rig = overlapping()
    caller = rig.caller()
    for ticket in range(4):
        caller.call(ticket, prompt(32, ticket), first_page=8 * ticket)
    rig.run_pass()
    for _ in range(7):
        rig.run(STEP_S)
        assert rig.num_in_flight > 0
    rig.run(2 * STEP_S)
    assert sum(isinstance(mail, PrefillDone) for mail in caller.take_mail()) == 4
    assert rig.executor.num_steps == 8


def test_a_prompt_whose_next_page_is_in_flight_for_another_waits_for_the_hit() -> None:
    rig = overlapping()
    caller = rig.caller()
    caller.call(1, prompt(30))
    rig.run_pass()
    again = caller.call(2, prompt(40), first_page=20)
    other = caller.call(3, prompt(40), first_page=40, namespace=cache_namespace("another"))
    rig.run()
    assert caller.holds(again)
    assert caller.holds(other)
    assert done(28, 12, ticket=2) in caller.take_mail()
    assert rig.counter("tokens_computed") == 30 + 12 + 40


@pytest.mark.parametrize("passes", range(8))
def test_a_cancel_with_two_steps_in_flight_drops_both_and_frees_their_pages_after_their_outputs(passes: int) -> None:
    rig = overlapping(transfer_s=0.004)
    caller = rig.caller()
    caller.call(1, prompt(96))
    for _ in range(passes):
        rig.step()
    rig.run_pass()
    in_flight = rig.num_in_flight
    caller.cancel(1)
    rig.scheduler.check()
    assert rig.cache.counts().free < 64 or not in_flight
    posted = rig.counter("pages_posted")
    rig.run()
    assert caller.take_mail()[-1] == Matching(TicketClosed, ref=REF)
    assert rig.counter("pages_posted") == posted
    assert rig.is_clean()


def test_pages_of_a_cancelled_prompt_are_not_another_prompts_before_both_its_steps_are_out() -> None:
    rig = overlapping(num_pages=12)
    caller = rig.caller()
    caller.call(1, prompt(48))
    rig.run_pass()
    caller.cancel(1)
    assert (rig.cache.counts().inflight, rig.cache.counts().free) == (8, 4)
    second = caller.call(2, prompt(40, 3), first_page=20)
    rig.run(0.5 * STEP_S)
    assert rig.scheduler.load().num_waiting == 1
    rig.run(STEP_S)
    assert rig.scheduler.load().num_waiting == 1, "the second step still reads the pages of both"
    rig.run()
    assert caller.holds(second)


def test_a_deadline_with_two_steps_in_flight_ends_the_call_and_nothing_of_it_is_published() -> None:
    rig = overlapping()
    caller = rig.caller()
    caller.call(1, prompt(96), remaining_s=0.5 * STEP_S)
    rig.run_pass()
    assert rig.num_in_flight == 2
    rig.run()
    assert failure(caller).code is ErrorCode.DEADLINE
    assert rig.counter("pages_posted") == 0
    assert rig.cache.counts().free == 64
    assert rig.executor.num_steps == 2


def test_a_caller_that_dies_with_two_steps_in_flight_costs_no_page() -> None:
    rig = overlapping()
    dead = rig.caller()
    dead.call(1, prompt(96))
    rig.run(1.5 * STEP_S)
    rig.links.kill(dead.name)
    rig.scheduler.handle("gateway", WorkerExited(DECODE, -9))
    rig.run()
    assert rig.scheduler.load().num_running == 0
    assert rig.is_clean()


def test_an_output_out_of_turn_is_our_own_bug() -> None:
    rig = overlapping()
    caller = rig.caller()
    caller.call(1, prompt(96))
    rig.run_pass()
    with pytest.raises(InvariantError, match="not the oldest"):
        rig.scheduler.update(BatchOutput(2))
