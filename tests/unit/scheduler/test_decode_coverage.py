"""A delta is there when the noticed ranges cover it, whatever their order."""

from tests.support.decode_rig import P0, Rig


def test_the_last_pages_alone_complete_nothing_and_open_no_page() -> None:
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 2)
    rig.step()
    (call,) = rig.calls()
    rig.notice(call, 8, 3)
    assert rig.step() is None
    assert rig.scheduler.load().inflight_pages == 8
    rig.notice(call, 0, 8)
    rig.done(call)
    rig.run()
    assert rig.finished(ref)
    assert rig.is_clean()
