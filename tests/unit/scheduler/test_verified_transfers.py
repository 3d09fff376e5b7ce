"""Pages that arrive other than they were sent: seen before anybody reads them, and fetched again onto new pages."""

import pytest

from headstart.core.messages import ChunkNotice, Prefill, PrefillDone, TicketClosed, WorkerRef, encode_notice
from headstart.core.request import ChoiceRef
from headstart.transfer.contract import Notice
from tests.support.decode_rig import P0, P1, Rig


def fetching(*workers: WorkerRef) -> tuple[Rig, ChoiceRef, Prefill]:
    rig = Rig(verifies=True)
    rig.connect(*(workers or (P0,)))
    ref = rig.submit("a", range(43), 2, ranking=("prefill-0", "prefill-1"))
    rig.step()
    return rig, ref, rig.calls()[0]


def notice_with_damage(rig: Rig, call: Prefill, page: int, worker: WorkerRef = P0) -> None:
    """Everything lands and is noticed at once, but one page is not what was sent."""
    rig.write(call, 0, len(call.dst_pages))
    rig.pool[call.dst_pages[page], 0] ^= 1
    rig.notice(call, worker=worker, rewrite=False)


@pytest.mark.behaviour("A6")
def test_a_damaged_page_is_seen_before_the_first_token_and_its_range_is_fetched_again_onto_new_pages():
    rig, ref, call = fetching(P0, P1)
    rig.notice(call, 0, 3)
    rig.write(call, 3, 8)
    rig.pool[call.dst_pages[5], 2] ^= 1 << 40
    rig.notice(call, 3, rewrite=False)
    assert rig.counter("digest_mismatches") == 1
    assert rig.answer(ref) == []
    assert rig.cached_pages(range(43)) == 3
    again = rig.calls()[-1]
    assert (again.ref.ticket, again.ref.attempt, again.start) == (call.ref.ticket, 1, 12)
    assert not set(again.dst_pages.tolist()) & set(call.dst_pages.tolist())
    rig.serve(again)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    rig.tell(TicketClosed(call.ref), str(P0))
    assert rig.is_clean()


def test_a_first_mismatch_is_forgiven_a_second_goes_to_another_worker_and_then_the_rest_is_computed_here():
    rig, ref, call = fetching(P0, P1)
    notice_with_damage(rig, call, 2)
    (_, second) = rig.calls(P0)
    notice_with_damage(rig, second, 9)
    (third,) = rig.calls(P1)
    assert rig.counter("digest_mismatches") == 2
    notice_with_damage(rig, third, 0, worker=P1)
    assert len(rig.calls()) == 3
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.counter("local_prefill_tokens") == 42


@pytest.mark.behaviour("A5")
def test_a_page_that_is_still_being_written_after_its_notice_stays_the_writers_until_its_last_word():
    rig, ref, call = fetching()
    rig.write(call, 0, 7)  # the rest is on its way
    rig.notice(call, rewrite=False)
    assert rig.counter("digest_mismatches") == 1
    assert rig.cancels()[0].ref == call.ref
    rig.serve(rig.calls()[-1])
    rig.run()
    for page in range(7, 11):
        rig.scribble(call, page)
    assert rig.answer(ref) == [43, 44]
    assert rig.cache.counts().inflight == 11
    rig.tell(TicketClosed(call.ref), str(P0))
    assert rig.is_clean()


@pytest.mark.parametrize("word", ["done", "failed", "closed"])
def test_any_last_word_of_the_writer_gives_the_pages_back(word: str):
    rig, ref, call = fetching()
    notice_with_damage(rig, call, 0)
    if word == "done":
        rig.done(call)
    elif word == "failed":
        rig.fail(call)
    else:
        rig.tell(TicketClosed(call.ref), str(P0))
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.is_clean()


def test_damage_that_is_seen_after_done_frees_the_pages_at_once():
    rig, ref, call = fetching()
    rig.done(call)
    notice_with_damage(rig, call, 0)
    assert rig.cancels() == []
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.is_clean()


def test_a_repeated_notice_of_a_damaged_range_frees_nothing_before_its_bytes_are_there():
    rig, ref, call = fetching()
    notice_with_damage(rig, call, 4)
    rig.notice(call, rewrite=False)
    assert rig.counter("digest_mismatches") == 2
    assert set(call.dst_pages.tolist()) <= set(rig.cache.open_writes().tolist())
    rig.notice(call)
    assert not set(call.dst_pages.tolist()) & set(rig.cache.open_writes().tolist())
    assert len(rig.calls()) == 2, "neither is a second mismatch of the request"
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(ref) == [43, 44]


def test_two_pages_that_changed_places_are_damage():
    rig, _, call = fetching()
    rig.write(call, 0, len(call.dst_pages))
    rig.pool[call.dst_pages[[1, 2]]] = rig.pool[call.dst_pages[[2, 1]]]
    rig.notice(call, rewrite=False)
    assert rig.counter("digest_mismatches") == 1


@pytest.mark.parametrize("checksums", [b"", b"short", bytes(88)])
def test_a_notice_without_the_checksums_that_were_asked_for_is_taken_for_damage(checksums: bytes):
    rig, ref, call = fetching()
    rig.write(call, 0, 11)
    rig.scheduler.on_transfer(Notice(encode_notice(ChunkNotice(P0, call.ref, 0, 11, 0, checksums))))
    assert rig.counter("digest_mismatches") == 1
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(ref) == [43, 44]


def test_a_worker_that_does_not_verify_asks_for_no_checksums():
    rig = Rig()
    rig.connect(P0)
    rig.submit("a", range(43), 2)
    rig.step()
    assert [call.verify for call in rig.calls()] == [False]


def test_pages_of_a_request_that_left_are_given_back_by_intact_notices_only():
    rig, ref, call = fetching()
    rig.cancel(ref)
    notice_with_damage(rig, call, 3)
    assert rig.cache.counts().inflight == 11
    rig.tell(PrefillDone(call.ref, 0, 42), str(P0))
    assert rig.is_clean()
