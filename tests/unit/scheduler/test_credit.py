"""Credit is what a pair's open calls leave of it, whenever they were opened and however they end."""

from headstart.core.errors import ErrorCode
from headstart.core.messages import TicketClosed
from tests.support.decode_rig import P0, Rig


def test_calls_of_earlier_passes_count_until_they_are_answered() -> None:
    rig = Rig()
    rig.connect(P0, credit=60)
    rig.submit("a", range(43), 1)
    rig.step()
    later = rig.submit("b", range(100, 143), 1)
    for _ in range(5):
        rig.advance(0.3)
        rig.step()
    assert len(rig.calls()) == 1, "42 of 60 tokens are open, and another 42 do not fit"
    rig.submit("small", range(500, 510), 1)
    rig.step()
    assert [len(call.tokens) for call in rig.calls()] == [42, 9], "what is left is enough for a short prompt"
    rig.serve(rig.calls()[0])
    rig.step()
    rig.serve(rig.calls()[1])
    rig.serve(rig.calls()[2])
    rig.run()
    assert rig.finished(later)


def test_a_cancelled_call_keeps_its_credit_until_the_writer_says_that_it_stopped() -> None:
    rig = Rig()
    rig.connect(P0, credit=60)
    leaves = rig.submit("a", range(43), 1)
    rig.step()
    rig.cancel(leaves)
    rig.submit("b", range(100, 143), 1)
    rig.step()
    assert len(rig.calls()) == 1
    rig.tell(TicketClosed(rig.calls()[0].ref), str(P0))
    rig.step()
    assert len(rig.calls()) == 2


def test_a_failed_call_gives_its_credit_back() -> None:
    rig = Rig()
    rig.connect(P0, credit=60)
    fails = rig.submit("a", range(43), 1)
    rig.step()
    rig.submit("b", range(100, 143), 1)
    rig.step()
    assert len(rig.calls()) == 1
    rig.fail(rig.calls()[0], ErrorCode.INVALID)
    rig.step()
    assert rig.failed(fails) is ErrorCode.INVALID
    assert len(rig.calls()) == 2
