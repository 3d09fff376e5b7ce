"""The ladder: cancels, deadlines, failed and silent prefill workers, and pages that wait for proof."""

import pytest

from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    CancelTicket,
    ChunkNotice,
    Hello,
    KillRequest,
    PrefillDone,
    Refused,
    TicketClosed,
    Welcome,
    WorkerExited,
    WorkerRef,
    encode_notice,
)
from headstart.transfer.contract import Notice, PeerLost
from tests.support.decode_rig import DECODE, P0, P1, Rig

P0_AGAIN = WorkerRef("prefill-0", 2)


def fetching(*workers: WorkerRef, prompt: range = range(43), **limits: float):
    """A request whose pages are being fetched."""
    rig = Rig(**limits)
    rig.connect(*(workers or (P0,)))
    ref = rig.submit("a", prompt, 2, ranking=("prefill-0",))
    rig.step()
    return rig, ref, rig.calls()[0]


def in_state(state: str):
    """A choice in each state of its life."""
    if state == "waiting":
        rig = Rig(num_pages=12)
        rig.connect(P0)
        rig.submit("other", range(500, 540), 1)
        rig.step()
        return rig, rig.submit("a", range(43), 2)
    if state == "following":
        rig = Rig()
        rig.connect(P0)
        rig.submit("other", range(43), 2)
        ref = rig.submit("a", range(43), 2)
        rig.step()
        return rig, ref
    rig, ref, call = fetching(max_running_requests=1)
    if state == "preparing":
        return rig, ref
    if state == "partly":
        rig.notice(call, 0, 3)
        return rig, ref
    rig.serve(call)
    if state == "ready":
        return rig, ref
    if state == "launched":
        rig.advance()
        rig.launch()
        return rig, ref
    rig.step()
    return rig, ref


STATES = ["waiting", "following", "preparing", "partly", "ready", "launched", "running"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.behaviour("B3")
def test_an_end_in_any_state_leaves_nothing_behind(state: str, how: str):
    rig, ref = in_state(state)
    if how == "cancel":
        rig.cancel(ref)
    else:
        rig.advance(1000.0)
    assert rig.failed(ref) is (ErrorCode.CANCELLED if how == "cancel" else ErrorCode.DEADLINE)
    if state == "launched":
        rig.land()
    for cancel in rig.cancels():
        rig.tell(TicketClosed(cancel.ref), str(P0))
    rig.run_served()
    assert rig.is_clean()
    rig.cancel(ref)
    assert rig.failed(ref), "still exactly one terminal event"


@pytest.mark.behaviour("B5")
def test_a_step_in_flight_keeps_the_pages_of_a_cancelled_choice():
    rig, ref = in_state("launched")
    rig.cancel(ref)
    assert rig.cache.counts().inflight == 11
    rig.land()
    assert rig.cache.counts().inflight == 0
    assert rig.answer(ref) == []


@pytest.mark.behaviour("A1")
def test_pages_of_a_cancelled_fetch_go_to_nobody_until_the_writer_answers():
    rig, ref, call = fetching(num_pages=12)
    rig.cancel(ref)
    assert rig.failed(ref) is ErrorCode.CANCELLED
    other = rig.submit("b", range(100, 130), 2)
    for _ in range(5):
        rig.advance(1.0)
        rig.scribble(call, 0)
        assert rig.step() is None
    assert rig.cache.counts().inflight == 11
    rig.tell(TicketClosed(call.ref), str(P0))
    rig.step()
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(other) == [130, 131]


def test_cancel_is_repeated_until_it_is_answered():
    rig, ref, call = fetching()
    rig.cancel(ref)
    times = []
    while rig.now < 5.0:
        before = len(rig.cancels())
        rig.advance(0.1)
        times += [round(rig.now, 1)] * (len(rig.cancels()) - before)
    assert times[:4] == pytest.approx([0.2, 0.6, 1.4, 2.4], abs=0.11)
    assert rig.wakeup <= rig.now + 1.0
    rig.tell(TicketClosed(call.ref), str(P0))
    num = len(rig.cancels())
    rig.advance(5.0)
    assert len(rig.cancels()) == num


@pytest.mark.parametrize("word", ["closed", "done", "failed"])
def test_any_last_word_of_the_writer_closes_a_cancelled_ticket(word: str):
    rig, ref, call = fetching()
    rig.cancel(ref)
    if word == "closed":
        rig.tell(TicketClosed(call.ref), str(P0))
    elif word == "done":
        rig.done(call)
    else:
        rig.fail(call)
    assert rig.is_clean()


@pytest.mark.behaviour("19")
def test_a_failed_fetch_keeps_the_hit_and_what_arrived_and_nothing_else():
    rig = Rig()
    rig.connect(P0)
    rig.submit("first", range(20), 1)
    rig.step()
    rig.serve(rig.calls()[0])
    rig.run()
    ref = rig.submit("a", range(43), 2)
    rig.step()
    call = rig.calls()[-1]
    rig.notice(call, 0, 2)
    rig.fail(call, ErrorCode.INVALID)
    assert rig.failed(ref) is ErrorCode.INVALID
    assert rig.cached_pages(range(43)) == call.start // 4 + 2
    assert rig.is_clean()


@pytest.mark.behaviour("20")
def test_a_failed_cold_fetch_leaves_nothing():
    rig, ref, call = fetching()
    rig.fail(call, ErrorCode.INVALID)
    assert rig.failed(ref) is ErrorCode.INVALID
    assert rig.cache.counts().free == rig.cache.num_pages


@pytest.mark.parametrize("code", [ErrorCode.INVALID, ErrorCode.MISMATCH])
def test_invalid_and_mismatch_are_never_retried(code: ErrorCode):
    rig, ref, call = fetching(P0, P1)
    rig.fail(call, code)
    rig.run()
    assert rig.failed(ref) is code
    assert len(rig.calls()) == 1


def test_a_failed_attempt_goes_to_another_worker_with_what_is_missing_on_new_pages():
    rig, ref, call = fetching(P0, P1)
    rig.notice(call, 0, 4)
    rig.notice(call, 6, 2)
    rig.fail(call)
    (retry,) = rig.calls(P1)
    assert (retry.ref.ticket, retry.ref.attempt, retry.start) == (call.ref.ticket, 1, 16)
    assert not set(retry.dst_pages.tolist()) & set(call.dst_pages.tolist())
    rig.notice(call, 4, 2)
    assert rig.counter("stray_notices") == 1
    rig.serve(retry, worker=P1)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.is_clean()


def test_with_nobody_left_to_ask_the_rest_is_computed_here():
    rig, ref, call = fetching()
    rig.notice(call, 0, 4)
    rig.fail(call)
    batch = rig.step()
    assert batch.rows[0].start == 16
    rig.run()
    assert rig.answer(ref) == [43, 44]


@pytest.mark.behaviour("E5")
def test_one_failure_does_not_blacklist_a_worker():
    rig, _, call = fetching()
    num_hellos = len(rig.said(Hello))
    rig.fail(call)
    rig.run()
    assert len(rig.said(Hello)) == num_hellos + 1, "it may have lost its connection to us: one Hello mends that"
    rig.tell(Welcome(P0, 10_000, 10_000, b""), str(P0))
    rig.submit("next", range(500, 543), 1)
    rig.step()
    assert len(rig.calls(P0)) == 2


def test_done_without_all_notices_within_a_second_of_polls_is_a_failure():
    rig, ref, call = fetching(P0, P1)
    rig.notice(call, 0, 4)
    rig.done(call)
    for _ in range(9):
        rig.advance(0.1)
    assert rig.calls(P1) == []
    for _ in range(3):
        rig.advance(0.1)
    (retry,) = rig.calls(P1)
    assert retry.start == 16
    rig.serve(retry, worker=P1)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.counter("lost_notices") == 1


def test_notices_that_come_after_done_complete_the_fetch():
    rig, ref, call = fetching()
    rig.done(call)
    rig.advance(0.5)
    rig.notice(call)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert len(rig.calls()) == 1


def test_a_second_without_polls_is_not_held_against_the_writer():
    rig, ref, call = fetching()
    rig.done(call)
    rig.advance(30.0)
    rig.notice(call)
    rig.run()
    assert rig.answer(ref) == [43, 44]


@pytest.mark.behaviour("B9")
def test_late_foreign_repeated_and_senseless_notices_are_counted_and_ignored():
    rig, ref, call = fetching()
    rig.notice(call, 0, 2)
    stray = [
        ChunkNotice(P0, call.ref, 0, 2),
        ChunkNotice(P0, call.ref, 1, 2),
        ChunkNotice(P0, call.ref, 10, 2),
        ChunkNotice(P0, call.ref, -1, 2),
        ChunkNotice(P0, call.ref, 4, 0),
        ChunkNotice(P0_AGAIN, call.ref, 2, 2),
        ChunkNotice(P1, call.ref, 2, 2),
        ChunkNotice(P0, type(call.ref)(call.ref.ticket, 7), 2, 2),
        ChunkNotice(P0, type(call.ref)(99, 0), 2, 2),
    ]
    for notice in stray:
        rig.scheduler.on_transfer(Notice(encode_notice(notice)))
    rig.scheduler.on_transfer(Notice(b"junk"))
    rig.check()
    assert rig.counter("stray_notices") == len(stray) + 1
    rig.tell(PrefillDone(call.ref, 0, 1), str(P1))
    assert rig.counter("stray_messages") == 1
    rig.notice(call, 2, 9)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    rig.notice(call, 0, 2, rewrite=False)
    rig.done(call)
    rig.done(call)
    rig.tell(TicketClosed(call.ref), str(P0))
    assert rig.is_clean()


@pytest.mark.parametrize("how", ["dead", "unlisted", "lost"])
def test_a_dead_worker_fails_requests_over_but_its_pages_wait_for_proof(how: str):
    rig, ref, _ = fetching(P0, P1)
    if how == "dead":
        rig.members(P1, dead=(P0,))
    elif how == "unlisted":
        rig.members(P1)
    else:
        rig.scheduler.on_transfer(PeerLost(str(P0)))
    (retry,) = rig.calls(P1)
    rig.serve(retry, worker=P1)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.cache.counts().inflight == 11
    rig.advance(3600.0)
    assert rig.cache.counts().inflight == 11, "time never frees a page"
    rig.tell(WorkerExited(P0, -9))
    assert rig.is_clean()


def test_a_later_incarnation_proves_the_end_of_the_former():
    rig, ref, call = fetching()
    rig.cancel(ref)
    rig.members(P0_AGAIN)
    assert rig.is_clean()
    rig.notice(call, 0, 2, rewrite=False)
    assert rig.counter("stray_notices") == 1


@pytest.mark.parametrize("lock_domain", ["of another host", ""])
def test_a_namesake_that_no_lock_ties_to_the_former_proves_nothing(lock_domain: str):
    """A gateway that was restarted may list it: the former, cut off, is not heard, and still writes."""
    rig, ref, call = fetching()
    rig.cancel(ref)
    rig.members(P0_AGAIN, lock_domain=lock_domain)
    rig.advance(3600.0)
    assert rig.cache.counts().inflight == 11
    assert rig.said(CancelTicket, str(P0)), "its answer is still asked for"
    rig.tell(TicketClosed(call.ref), str(P0))
    assert rig.is_clean()


def test_a_later_incarnation_under_the_formers_lock_proves_its_end_though_a_namesake_came_between():
    rig, ref, _ = fetching()
    rig.cancel(ref)
    rig.members(P0_AGAIN, lock_domain="of another host")
    assert rig.cache.counts().inflight == 11
    rig.members(WorkerRef("prefill-0", 3))
    assert rig.is_clean()


def test_a_killed_worker_costs_speed_only_and_its_successor_is_used_again():
    rig, ref, call = fetching()
    rig.notice(call, 0, 2)
    rig.tell(WorkerExited(P0, -9))
    rig.run()
    assert rig.answer(ref) == [43, 44]
    rig.members(P0_AGAIN)
    rig.advance()
    assert rig.said(Hello, str(P0_AGAIN))
    rig.tell(Welcome(P0_AGAIN, 10_000, 10_000, b""), str(P0_AGAIN))
    rig.submit("b", range(500, 543), 1)
    rig.step()
    assert len(rig.calls(P0_AGAIN)) == 1


def test_a_choice_that_two_workers_died_with_is_not_tried_on_a_third():
    third = WorkerRef("prefill-2", 1)
    rig, ref, _ = fetching(P0, P1, third)
    rig.tell(WorkerExited(P0, -9))
    rig.tell(WorkerExited(P1, -9))
    assert rig.failed(ref) is ErrorCode.WORKER_LOST
    assert rig.calls(third) == []
    assert rig.is_clean()


def test_a_suspect_worker_gets_no_new_work_and_keeps_what_it_has():
    rig, ref, call = fetching()
    rig.members(suspect=(P0,))
    second = rig.submit("b", range(500, 543), 1)
    rig.step()
    assert len(rig.calls()) == 1
    rig.members(P0)
    rig.step()
    assert len(rig.calls()) == 2
    for each in rig.calls():
        rig.serve(each)
    rig.run()
    assert rig.finished(ref)
    assert rig.finished(second)
    assert call is rig.calls()[0]


@pytest.mark.behaviour("48")
def test_a_refused_pair_makes_no_calls_and_lives_on():
    rig = Rig()
    rig.members(P0)
    rig.advance()
    rig.tell(Refused(P0, "page_size differs: 16 here, 4 there"), str(P0))
    ref = rig.submit("a", range(43), 1)
    rig.run()
    assert rig.calls() == []
    assert rig.answer(ref) == [43]
    assert rig.scheduler.load().mismatches == ("page_size differs: 16 here, 4 there",)
    rig.members(P0_AGAIN)
    assert rig.scheduler.load().mismatches == ()


def test_hello_is_repeated_until_answered_and_nobody_waits_for_it_long():
    rig = Rig()
    rig.members(P0)
    rig.advance()
    ref = rig.submit("a", range(43), 1)
    assert rig.step() is None
    rig.advance(0.5)
    assert len(rig.said(Hello)) == 2
    rig.advance(0.5)
    rig.run()
    assert rig.answer(ref) == [43]


def test_a_worker_that_keeps_too_many_pages_silently_is_reported_once_in_a_while():
    rig, ref, _ = fetching(num_pages=64)
    rig.cancel(ref)
    rig.advance(4.9)
    assert rig.said(KillRequest) == []
    rig.advance(0.2)
    (request,) = rig.said(KillRequest)
    assert request.worker == P0
    rig.advance(1.0)
    assert len(rig.said(KillRequest)) == 1
    rig.advance(5.0)
    assert len(rig.said(KillRequest)) == 2
    rig.tell(WorkerExited(P0, -9))
    rig.advance(6.0)
    assert len(rig.said(KillRequest)) == 2
    assert rig.is_clean()


def test_without_proof_a_minute_after_the_kill_was_asked_for_the_worker_gives_up():
    rig, ref, _ = fetching()
    rig.cancel(ref)
    rig.advance(5.0)
    assert len(rig.said(KillRequest)) == 1
    rig.advance(59.0)
    assert not rig.scheduler.load().must_restart
    assert rig.scheduler.load().overdue_pages == 11
    rig.advance(1.5)
    assert rig.scheduler.load().must_restart
    late = rig.submit("b", range(500, 543), 1)
    assert rig.failed(late) is ErrorCode.UNAVAILABLE


def test_proof_before_the_minute_is_over_keeps_the_worker():
    rig, ref, _ = fetching()
    rig.cancel(ref)
    rig.advance(60.0)
    rig.tell(WorkerExited(P0, -9))
    rig.advance(60.0)
    assert not rig.scheduler.load().must_restart
    assert rig.is_clean()


def test_few_overdue_pages_are_no_reason_to_kill():
    rig, ref, _ = fetching(num_pages=200)
    rig.cancel(ref)
    rig.advance(60.0)
    assert rig.said(KillRequest) == []


@pytest.mark.behaviour("E1")
def test_a_writer_that_brings_nothing_is_left_when_half_the_time_is_gone():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 2, remaining_s=10.0)
    rig.step()
    rig.advance(5.0)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert len(rig.cancels()) == 1
    assert rig.cache.counts().inflight == 11, "its pages wait for the writer's word"


def test_a_slow_fetch_goes_on_while_pages_arrive():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 2, remaining_s=16.0)
    rig.step()
    (call,) = rig.calls()
    for page, seconds in enumerate([4.0, 4.0, 4.0]):
        rig.notice(call, page, 1)
        rig.advance(seconds)
    assert rig.cancels() == []
    rig.advance(2.0)
    batch = rig.step()
    assert batch.rows[0].start == 12
    rig.run()
    assert rig.answer(ref) == [43, 44]


def test_the_remaining_time_travels_with_the_call():
    rig = Rig()
    rig.connect(P0)
    rig.submit("a", range(43), 1, remaining_s=30.0)
    rig.advance(2.0)
    assert rig.calls()[0].remaining_s == pytest.approx(28.0)


def test_a_row_that_cannot_be_sampled_ends_alone():
    rig = Rig(chunked_prefill_size=100)
    good, bad = rig.submit("good", range(10), 2), rig.submit("bad", range(500, 510), 2)
    rig.model = lambda row: "NaN logits" if row.sample.context[0] == 500 else 7
    rig.run()
    assert rig.failed(bad) is ErrorCode.INTERNAL
    assert rig.answer(good) == [7, 7]
    assert rig.is_clean()


@pytest.mark.behaviour("76")
def test_a_worker_may_answer_hello_or_leave_after_its_request_is_gone():
    rig = Rig()
    rig.members(P0)
    rig.advance()
    ref = rig.submit("a", range(43), 1)
    rig.cancel(ref)
    rig.tell(Welcome(P0, 10_000, 10_000, b""), str(P0))
    rig.members()
    rig.tell(Welcome(P0, 10_000, 10_000, b""), str(P0))
    assert rig.step() is None
    assert rig.is_clean()


def test_messages_of_strangers_are_counted():
    rig = Rig()
    rig.tell(Welcome(P0, 1, 1, b""), str(P0))
    rig.tell(Hello(DECODE, None, b""), "who")  # type: ignore[arg-type]
    assert rig.counter("stray_messages") == 2


def test_two_workers_that_were_only_silent_leave_the_choice_to_be_computed_here():
    rig, ref, _ = fetching(P0, P1)
    rig.members(P1, dead=(P0,))
    rig.members(dead=(P0, P1))
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.counter("prefill_retries") == 2


def test_a_lost_worker_counts_as_dead_once_its_end_is_proven():
    third = WorkerRef("prefill-2", 1)
    rig, ref, _ = fetching(P0, P1, third)
    rig.members(P1, third, dead=(P0,))
    rig.members(third, dead=(P0, P1))
    assert len(rig.calls(third)) == 1
    rig.tell(WorkerExited(P0, -9))
    assert rig.terminal(ref) is None
    rig.tell(WorkerExited(P1, -9))
    assert rig.failed(ref) is ErrorCode.WORKER_LOST
    assert rig.cancels(third)


def test_a_choice_that_is_computed_here_is_not_ended_by_later_proof():
    rig, ref, _ = fetching(P0, P1)
    rig.members(P1, dead=(P0,))
    rig.members(dead=(P0, P1))
    rig.step()
    rig.tell(WorkerExited(P0, -9))
    rig.tell(WorkerExited(P1, -9))
    rig.run()
    assert rig.answer(ref) == [43, 44]


def test_a_worker_that_failed_first_and_died_later_counts_no_death():
    rig, ref, call = fetching(P0, P1)
    rig.fail(call, ErrorCode.INTERNAL)
    rig.tell(WorkerExited(P0, -9))
    rig.tell(WorkerExited(P1, -9))
    rig.run()
    assert rig.answer(ref) == [43, 44]
