"""A call of which nothing is heard is asked again; the writer takes a repeat for nothing, or says that it has ended it."""

from headstart.core.errors import ErrorCode
from tests.support.decode_rig import P0, Rig


def fetching():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 2)
    rig.step()
    return rig, ref


def test_a_call_that_was_lost_on_its_way_is_asked_again_under_the_same_ref():
    rig, ref = fetching()
    rig.advance(1.9)
    assert len(rig.calls()) == 1
    rig.advance(0.2)
    first, again = rig.calls()
    assert again.ref == first.ref
    assert again.dst_pages.tolist() == first.dst_pages.tolist()
    assert again.remaining_s < first.remaining_s
    rig.serve(again)
    rig.run()
    assert rig.finished(ref)
    assert rig.is_clean()


def test_pages_that_arrive_put_the_next_question_off_and_questions_become_rarer():
    rig, _ = fetching()
    rig.advance(1.5)
    rig.notice(rig.calls()[0], 0, 3)
    rig.advance(1.5)
    assert len(rig.calls()) == 1
    for _ in range(300):
        rig.advance(0.1)
    assert len(rig.calls()) == 5  # after 2, 4, 8 and 16 s of silence


def test_a_writer_that_ended_the_call_unheard_is_left_at_once():
    rig, ref = fetching()
    rig.advance(2.1)
    rig.fail(rig.calls()[1])
    rig.run()
    assert rig.finished(ref)
    assert rig.is_clean()


def test_a_gateway_that_asks_for_an_attempt_that_has_ended_is_told_so():
    rig = Rig()
    ref = rig.submit("a", range(10), 3)
    rig.run()
    rig.mail.clear()  # its end is lost on the way
    rig.submit("a", range(10), 3)
    rig.run()
    assert rig.failed(ref) is ErrorCode.UNAVAILABLE
    assert rig.answer(ref) == []
    assert rig.is_clean()
