"""The two halves of a transfer against each other, without a scheduler of either role: a lender and a borrower."""

import numpy as np
import pytest
from transfer_pair import NUM_PAGES, PAGE_SIZE, Loan, Pair

from headstart.core.messages import (
    CancelTicket,
    ChunkNotice,
    KillRequest,
    PrefillDone,
    PrefillFailed,
    TicketClosed,
    TicketRef,
    WorkerRef,
)
from headstart.scheduler.stuck_peers import StuckPeers
from headstart.scheduler.tickets import Phase
from headstart.transfer.loopback import Fault, inject_nth


def post(pair: Pair, loan: Loan, *ready: int) -> None:
    """The lender posts one chunk after the other: so many tokens ready at each."""
    for num_ready in ready:
        pair.lender.sender.post(loan.push, num_ready)


def answers(pair: Pair) -> list[type]:
    return [type(message) for message in pair.borrower.answers]


# ---- the usual way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "start"), [(40, 0), (38, 0), (38, 16), (3, 0)])
def test_what_is_lent_in_chunks_arrives_whole_and_leaves_nothing_behind(num_tokens: int, start: int) -> None:
    pair = Pair()
    loan = pair.lend(num_tokens, start)
    post(pair, loan, num_tokens // 3, num_tokens // 2, num_tokens - 1, num_tokens)
    pair.run()
    assert pair.has_arrived(loan)
    assert loan.ticket.is_complete
    assert answers(pair) == [PrefillDone]
    assert pair.lender.is_clean
    pair.forget(loan)
    assert pair.borrower.is_clean


def test_each_worker_may_lend_to_the_other_at_the_same_time_from_the_same_cache() -> None:
    pair = Pair()
    there, back = pair.lend(40), pair.lend(28, borrower=pair.lender)
    pair.lender.sender.post(there.push, 40)
    pair.borrower.sender.post(back.push, 28)
    pair.run()
    assert there.ticket.phase is back.ticket.phase is Phase.CLOSED
    assert np.array_equal(pair.lender.pool[back.ticket.pages], pair.borrower.pool[back.push.lease.pages])
    pair.borrower.cache.release(there.lease)
    pair.lender.cache.release(back.lease)
    assert pair.lender.is_clean
    assert pair.borrower.is_clean


def test_source_pages_are_leased_until_the_last_handle_has_ended() -> None:
    pair = Pair(transfer_s=0.01)
    loan = pair.lend()
    post(pair, loan, 40)
    pair.run(0.005)
    assert pair.lender.cache.counts().free == NUM_PAGES - 10
    pair.run()
    assert pair.lender.cache.counts().free == NUM_PAGES


def test_a_lender_that_has_less_than_it_was_asked_for_leaves_the_rest_to_the_borrower() -> None:
    pair = Pair()
    loan = pair.lend()
    post(pair, loan, 24)
    pair.lender.sender.end(loan.push, PrefillFailed(loan.ticket.ref, "unavailable", "evicted"))
    pair.run()
    assert answers(pair) == [PrefillFailed]
    assert (loan.ticket.num_arrived, loan.ticket.num_missing) == (6, 4)
    assert len(pair.borrower.cache.open_writes()) == 0
    pair.forget(loan)
    assert pair.borrower.is_clean


def test_nothing_is_posted_twice_nor_after_the_end() -> None:
    pair = Pair()
    loan = pair.lend()
    post(pair, loan, 16, 16, 19)
    assert pair.lender.counters["pages_posted"] == 4
    pair.lender.sender.cancel(str(pair.borrower.worker), loan.ticket.ref)
    post(pair, loan, 40)
    assert pair.lender.counters["pages_posted"] == 4


# ---- cancel ----------------------------------------------------------------------------------------------------------


def in_phase(phase: Phase) -> tuple[Pair, Loan]:
    """A ticket that is in this phase, and may have writes open."""
    pair = Pair(transfer_s=0.004)
    if phase is Phase.DONE:
        pair.network.injector = inject_nth({0: Fault(notice_delay_s=0.1)})
    loan = pair.lend()
    post(pair, loan, 16)
    if phase in (Phase.RECEIVED, Phase.DONE, Phase.CLOSED):
        post(pair, loan, 40)
    if phase is Phase.RECEIVED:
        pair.silenced.add(pair.lender)
    if phase is Phase.CANCELLING:
        pair.silenced.add(pair.borrower)
        pair.borrower.tickets.cancel(loan.ticket)
    pair.run(0.001 if phase is Phase.OPEN else 0.03)
    assert loan.ticket.phase is phase
    pair.silenced.clear()
    return pair, loan


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.RECEIVED, Phase.DONE, Phase.CANCELLING])
def test_a_cancel_in_any_phase_ends_on_both_sides_and_nothing_lands_after_it(phase: Phase) -> None:
    pair, loan = in_phase(phase)
    pair.borrower.tickets.cancel(loan.ticket)
    pair.forget(loan)
    while loan.ticket.phase is not Phase.CLOSED:
        pair.step()
    before = pair.borrower.pool.copy()
    assert not pair.network.pages_under_write(str(pair.borrower.worker))
    pair.run(0.5, 0.005)
    assert np.array_equal(pair.borrower.pool, before)
    assert pair.borrower.is_clean
    assert pair.lender.is_clean or phase is Phase.RECEIVED


def test_a_cancel_of_a_closed_ticket_is_no_message() -> None:
    pair, loan = in_phase(Phase.CLOSED)
    pair.borrower.tickets.cancel(loan.ticket)
    assert pair.cancels() == 0


def test_a_cancel_is_repeated_ever_more_seldom_until_it_is_answered_and_time_frees_no_page() -> None:
    pair = Pair()
    loan = pair.lend()
    pair.silenced.add(pair.lender)
    pair.borrower.tickets.cancel(loan.ticket)
    pair.forget(loan)
    pair.run(4.0, 0.01)
    assert 4 <= pair.cancels() <= 8
    assert pair.borrower.cache.counts().inflight == 10
    pair.silenced.clear()
    pair.run(1.5, 0.01)
    assert pair.borrower.is_clean


def test_a_ticket_that_is_cancelled_before_its_call_comes_is_remembered_as_ended() -> None:
    pair = Pair()
    ticket, lease = pair.ticket(20)
    pair.borrower.tickets.cancel(ticket)
    pair.run(0.01)
    assert answers(pair) == [TicketClosed]
    assert pair.lender.sender.has_ended(str(pair.borrower.worker), ticket.ref)
    assert not pair.lender.sender.has_ended("another#1", ticket.ref)
    pair.borrower.cache.release(lease)
    assert pair.borrower.is_clean


# ---- notices ---------------------------------------------------------------------------------------------------------


def test_a_late_notice_of_a_cancelled_ticket_gives_its_pages_back_and_one_after_the_end_is_stray() -> None:
    pair = Pair()
    pair.network.injector = inject_nth({0: Fault(notice_delay_s=0.2)})
    loan = pair.lend()
    post(pair, loan, 16)
    pair.silenced.add(pair.borrower)
    pair.borrower.tickets.cancel(loan.ticket)
    pair.run(0.1)
    assert loan.ticket.num_missing == 10
    pair.run(0.15)
    assert loan.ticket.num_missing == 6
    pair.silenced.clear()
    pair.run(1.0, 0.01)
    pair.borrower.on_notice(pair.borrower.notices[0])
    assert pair.borrower.counters["stray_notices"] == 1
    pair.forget(loan)
    assert pair.borrower.is_clean


@pytest.mark.parametrize("change", ["writer", "attempt", "repeated", "beyond", "prefix"])
def test_a_notice_that_is_not_expected_closes_no_page(change: str) -> None:
    pair = Pair()
    loan = pair.lend()
    post(pair, loan, 16)
    pair.run(0.01)
    good = pair.borrower.notices[0]
    fields = {name: getattr(good, name) for name in ChunkNotice.__struct_fields__} | {"first": 4}
    fields |= {
        "writer": {"writer": WorkerRef("lender", 2)},
        "attempt": {"ref": TicketRef(loan.ticket.ref.ticket, 1)},
        "repeated": {"first": 3},
        "beyond": {"count": 7},
        "prefix": {"prefix_len": 41},
    }[change]
    pair.borrower.on_notice(ChunkNotice(**fields))
    assert pair.borrower.counters["stray_notices"] == 1
    assert loan.ticket.num_missing == 6


def test_done_without_the_notices_is_over_a_second_later() -> None:
    pair = Pair()
    pair.network.injector = inject_nth({1: Fault(num_notices=0)})
    loan = pair.lend()
    post(pair, loan, 16, 40)
    pair.run(0.5, 0.005)
    assert loan.ticket.phase is Phase.DONE
    pair.run(1.0, 0.005)
    assert (loan.ticket.phase, loan.ticket.num_missing) == (Phase.CLOSED, 6)


def test_pages_without_the_checksums_of_their_notice_stay_the_writers_until_its_answer() -> None:
    pair = Pair()
    pair.network.injector = inject_nth({0: Fault(flips=True)})
    loan = pair.lend()
    post(pair, loan, 16)
    while not pair.borrower.notices:
        pair.step()
    assert loan.ticket.phase is Phase.CANCELLING
    assert len(pair.borrower.cache.open_writes()) == 10
    pair.run()
    assert answers(pair) == [TicketClosed]
    assert len(pair.borrower.cache.open_writes()) == 0


# ---- failures and time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault(refused=True), Fault(fails=True)], ids=["post refused", "write failed"])
def test_a_failed_chunk_is_answered_after_the_other_writes_have_ended(fault: Fault) -> None:
    pair = Pair()
    pair.network.injector = inject_nth({0: Fault(delay_s=0.3), 1: fault})
    loan = pair.lend()
    post(pair, loan, 16, 32)
    pair.run(0.2)
    assert answers(pair) == []
    pair.run(0.3)
    assert answers(pair) == [PrefillFailed]
    assert pair.lender.is_clean
    assert len(pair.borrower.cache.open_writes()) == 0


def test_after_its_deadline_a_push_posts_nothing_and_fails() -> None:
    pair = Pair()
    loan = pair.lend(time_s=0.02)
    assert pair.lender.sender.next_deadline() == pytest.approx(0.02)
    post(pair, loan, 16)
    pair.run()
    assert answers(pair) == [PrefillFailed]
    post(pair, loan, 40)
    assert pair.lender.counters["pages_posted"] == 4


# ---- death, with and without proof -----------------------------------------------------------------------------------


def test_pages_of_a_dead_lender_are_kept_until_its_end_is_proved() -> None:
    pair = Pair(transfer_s=0.01)
    loan = pair.lend()
    post(pair, loan, 16)
    pair.run(0.005)
    pair.network.kill(str(pair.lender.worker))
    pair.silenced.add(pair.lender)
    pair.borrower.tickets.cancel(loan.ticket)
    pair.forget(loan)
    pair.run(20.0, 0.05)
    assert pair.borrower.cache.counts().inflight == 10
    for ticket in pair.borrower.tickets.of(pair.lender.worker):
        pair.borrower.tickets.close(ticket)
    assert pair.borrower.is_clean


def test_a_silent_lender_that_covers_too_much_is_to_be_killed_and_without_proof_we_must_restart() -> None:
    pair = Pair()
    loan = pair.lend()
    pair.silenced.add(pair.lender)
    pair.borrower.tickets.cancel(loan.ticket)
    assert pair.borrower.tickets.is_stuck
    pair.run(4.9, 0.05)
    assert pair.borrower.tickets.kill_requests(5.0) == []
    pair.run(0.2, 0.05)
    (request,) = pair.borrower.tickets.kill_requests(5.0)
    assert isinstance(request, KillRequest)
    assert request.worker == pair.lender.worker
    assert pair.borrower.tickets.kill_requests(5.0) == [], "not again at once"
    pair.run(5.1, 0.05)
    assert len(pair.borrower.tickets.kill_requests(5.0)) == 1
    assert not pair.borrower.tickets.must_restart(60.0)
    pair.run(55.0, 0.5)
    assert pair.borrower.tickets.must_restart(60.0)
    pair.silenced.clear()
    pair.run(2.0, 0.05)
    assert not pair.borrower.tickets.must_restart(60.0), "its answer came after all"


def test_a_silent_lender_that_covers_little_is_left_alone() -> None:
    pair = Pair()
    ticket, _ = pair.ticket(3 * PAGE_SIZE)
    pair.silenced.add(pair.lender)
    pair.borrower.tickets.cancel(ticket)
    pair.run(10.0, 0.1)
    assert not pair.borrower.tickets.is_stuck
    assert pair.borrower.tickets.kill_requests(5.0) == []


def test_source_pages_of_a_stalled_borrower_are_kept_and_counted_until_its_end_is_proved() -> None:
    pair = Pair()
    loan = pair.lend(time_s=0.1)
    post(pair, loan, 40)
    pair.network.stall(str(pair.borrower.worker))
    pair.run(1.0, 0.01)
    stuck = pair.lender.sender.stuck_peers(pair.clock.now())
    assert {worker: peer.num_pages for worker, peer in stuck.items()} == {pair.borrower.worker: 10}
    assert StuckPeers(NUM_PAGES).to_kill(stuck, 0.5, pair.clock.now()) == [pair.borrower.worker]
    assert pair.lender.cache.counts().free == NUM_PAGES - 10
    pair.network.kill(str(pair.borrower.worker))
    pair.lender.sender.forget(pair.borrower.worker)
    pair.run(0.01)
    assert pair.lender.is_clean
    assert PrefillFailed not in answers(pair)


def test_a_lost_transport_fails_what_is_open_and_the_answer_still_comes() -> None:
    pair = Pair()
    loan = pair.lend()
    post(pair, loan, 16)
    pair.run(0.01)
    pair.network.cut(str(pair.lender.worker), str(pair.borrower.worker))
    pair.run()
    assert answers(pair) == [PrefillFailed]
    assert len(pair.borrower.cache.open_writes()) == 0


def test_credit_is_used_by_what_a_writer_may_still_work_on() -> None:
    pair = Pair()
    first, second = pair.lend(20), pair.lend(12)
    usage = pair.borrower.tickets.usage
    assert usage(pair.lender.worker) == (2, 32)
    pair.silenced.add(pair.lender)
    pair.borrower.tickets.cancel(first.ticket)
    assert usage(pair.lender.worker) == (2, 32), "a cancelled one uses it until it is answered"
    post(pair, second, 12)
    pair.run(0.01)
    assert usage(pair.lender.worker) == (1, 20)
    pair.silenced.clear()
    pair.run(1.0, 0.01)
    assert usage(pair.lender.worker) == (0, 0)
    assert CancelTicket in [type(message) for _, _, message in pair.sent]
