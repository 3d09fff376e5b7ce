"""What the gateway sees: one answer per Submit, one terminal event per choice, flush, drain, silence, load."""

import pytest

from headstart.core.batch import BatchOutput, Sampled
from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    Accepted,
    Cancel,
    Drain,
    Failed,
    Finished,
    Flush,
    Flushed,
    Membership,
    Rejected,
    Tokens,
)
from headstart.core.request import ChoiceRef
from tests.support.decode_rig import GATEWAY, P0, Rig


def test_a_repeated_submit_is_accepted_again_and_starts_nothing():
    rig = Rig()
    for _ in range(3):
        ref = rig.submit("a", range(10), 3)
    assert len(rig.said(Accepted)) == 3
    rig.run()
    assert rig.answer(ref) == [10, 11, 12]
    rig.submit("a", range(10), 3)
    rig.run()
    assert len(rig.said(Finished)) == 1
    assert rig.counter("late_submits") == 1


def test_a_later_attempt_takes_the_place_of_an_earlier_one():
    rig = Rig()
    first = rig.submit("a", range(10), 30)
    rig.step()
    second = rig.submit("a", range(10), 3, attempt=1)
    assert rig.failed(first) is ErrorCode.CANCELLED
    rig.submit("a", range(10), 30, attempt=0)
    rig.run()
    assert rig.answer(second) == [10, 11, 12]
    assert rig.is_clean()


def test_an_earlier_attempt_that_comes_late_is_ignored():
    rig = Rig()
    rig.submit("a", range(10), 3, attempt=2)
    rig.submit("a", range(10), 3, attempt=1)
    assert len(rig.said(Accepted)) == 1
    assert rig.counter("late_submits") == 1


def test_cancels_of_unknown_and_ended_choices_are_counted():
    rig = Rig()
    rig.cancel(ChoiceRef("never"))
    ref = rig.submit("a", range(10), 1)
    rig.run()
    rig.cancel(ref)
    assert rig.counter("late_cancels") == 2
    assert len(rig.said(Failed)) == 0


@pytest.mark.parametrize("reason", [ErrorCode.CANCELLED, ErrorCode.DEADLINE])
@pytest.mark.behaviour("F4")
def test_a_cancelled_choice_fails_with_the_gateways_reason(reason: ErrorCode):
    rig = Rig()
    ref = rig.submit("a", range(10), 30)
    rig.step()
    rig.step()
    rig.cancel(ref, reason)
    assert rig.failed(ref) is reason
    assert rig.said(Failed)[0].stats.cached_tokens == 0
    assert rig.said(Finished) == []


def test_tokens_come_before_the_terminal_event_of_their_step():
    rig = Rig()
    rig.submit("a", range(10), 1)
    rig.run()
    kinds = [type(message) for to, message in rig.mail if to == GATEWAY]
    assert kinds == [Accepted, Tokens, Finished]


@pytest.mark.behaviour("27")
def test_flush_empties_an_idle_cache_and_is_refused_otherwise():
    rig = Rig(chunked_prefill_size=100)
    rig.submit("a", range(43), 5)
    rig.step()
    rig.tell(Flush(1))
    rig.run()
    assert rig.cache.counts().cached > 0
    rig.tell(Flush(2))
    assert [(flushed.flush_id, flushed.ok) for flushed in rig.said(Flushed)] == [(1, False), (2, True)]
    assert rig.said(Flushed)[1].num_pages == 11
    assert rig.cache.counts().free == rig.cache.num_pages


@pytest.mark.behaviour("K7")
def test_flush_is_refused_while_a_ticket_is_open():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 1)
    rig.step()
    rig.cancel(ref)
    rig.tell(Flush(1))
    assert not rig.said(Flushed)[0].ok


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new():
    rig = Rig()
    ref = rig.submit("a", range(10), 3)
    rig.tell(Drain())
    late = rig.submit("b", range(10), 3)
    assert rig.failed(late) is ErrorCode.UNAVAILABLE
    assert rig.scheduler.load().num_waiting
    rig.run()
    assert rig.finished(ref)
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.inflight_pages) == (0, 0, 0)


def test_a_gateway_that_falls_silent_loses_its_requests():
    rig = Rig(gateway_silence_s=5.0)
    ref = rig.submit("a", range(10), 200)
    rig.tell(Membership(()), "other")
    for _ in range(3):
        rig.step()
        rig.advance(0.9)
        rig.advance(0.9)
        rig.tell(Membership(()))
    assert rig.terminal(ref) is None
    for _ in range(7):
        rig.advance(0.7)
    assert rig.terminal(ref) is None
    assert rig.wakeup <= rig.now + 0.2
    rig.advance(0.2)
    assert rig.failed(ref) is ErrorCode.CANCELLED
    assert rig.is_clean()


def test_a_worker_that_stood_still_does_not_blame_the_gateway():
    rig = Rig(gateway_silence_s=5.0)
    ref = rig.submit("a", range(10), 200)
    rig.advance(0.5)
    rig.advance(60.0)
    assert rig.terminal(ref) is None


def test_each_gateway_gets_its_own_tokens():
    rig = Rig(chunked_prefill_size=100)
    a = rig.submit("a", range(10), 1)
    other = rig.submit("b", range(500, 510), 1, sender="gateway-2")
    rig.run()
    assert {delta.ref for tokens in rig.said(Tokens, "gateway-2") for delta in tokens.deltas} == {other}
    assert {finished.ref for finished in rig.said(Finished, GATEWAY)} == {a}


def test_load_tells_queues_pages_and_totals():
    rig = Rig(num_pages=64)
    rig.connect(P0)
    rig.submit("a", range(43), 2)
    rig.step()
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 1, 43)
    assert (load.inflight_pages, load.free_pages) == (11, 53)
    rig.serve(rig.calls()[0])
    rig.run()
    load = rig.scheduler.load()
    assert load.counters["pages_moved"] == 11
    assert load.counters["output_tokens"] == 2
    assert load.counters["prompt_tokens"] == 43
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (0, 0, 0)


def test_stages_add_up_to_the_time_to_the_first_token():
    rig = Rig(num_pages=12)
    rig.connect(P0)
    rig.submit("first", range(500, 540), 1)
    rig.step()
    ref = rig.submit("a", range(43), 1)
    rig.advance(1.0)
    rig.serve(rig.calls()[0])
    rig.run()
    rig.advance(2.0)
    rig.serve(rig.calls()[1])
    rig.advance()
    rig.launch()
    rig.now += 0.5
    rig.land()
    stages = rig.stats(ref).stage_s
    assert stages == pytest.approx({"queue": 1.0, "prefill": 2.0, "first_step": 0.5})


def test_stray_outputs_change_nothing():
    rig = Rig()
    ref = rig.submit("a", range(10), 2)
    rig.run()
    rig.scheduler.update(BatchOutput(1, ()))
    rig.scheduler.update(BatchOutput(99, ()))
    assert rig.counter("stray_outputs") == 2
    assert len(rig.answer(ref)) == 2


def test_a_cancel_and_its_submit_in_one_pass_leave_nothing():
    rig = Rig()
    ref = rig.submit("a", range(10), 2)
    rig.tell(Cancel(ref))
    assert rig.step() is None
    assert rig.failed(ref) is ErrorCode.CANCELLED
    assert rig.said(Rejected) == []


def test_a_token_without_probability_is_said_with_the_floor_and_not_as_a_number_that_does_not_travel():
    rig = Rig(local_prefill_tokens=100)
    nothing = float("-inf")
    rig.model = lambda row: Sampled(0, (5,), (nothing,), (((7, -0.5), (8, nothing), (9, float("nan"))),))
    rig.submit("a", range(10), 1, num_top_logprobs=3)
    rig.run()
    ((delta,),) = [tokens.deltas for tokens in rig.said(Tokens)]
    assert delta.logprobs == (-9999.0,)
    assert delta.top_logprobs == (((7, -0.5), (8, -9999.0), (9, -9999.0)),)
