"""Which long prompts wait for their turn before pages are leased for them."""

from headstart.core.messages import WorkerRef
from tests.support.decode_rig import P0, P1, Rig


def connected(*workers: WorkerRef, num_pages: int = 64) -> Rig:
    rig = Rig(num_pages=num_pages)
    rig.connect(*workers)
    return rig


def lengths(rig: Rig, worker: WorkerRef = P0) -> list[int]:
    return [len(call.tokens) + 1 for call in rig.calls(worker)]


def test_a_second_long_prompt_leases_nothing_while_its_worker_has_one() -> None:
    rig = connected(P0)
    rig.submit("a", range(81))
    rig.submit("b", range(500, 581))
    rig.step()
    assert lengths(rig) == [81]
    assert rig.cache.counts().inflight == 20
    (call,) = rig.calls()
    rig.notice(call)
    rig.step()
    assert lengths(rig) == [81, 81]


def test_shorter_ones_pass_it_and_that_is_no_overtaking() -> None:
    rig = connected(P0, num_pages=128)
    rig.submit("a", range(161))
    rig.submit("b", range(500, 661))
    for number in range(80):
        ref = rig.submit(f"s{number}", range(2000 + 10 * number, 2009 + 10 * number))
        rig.step()
        rig.notice(rig.calls()[-1])
        rig.run()
        assert rig.finished(ref)
    assert lengths(rig).count(161) == 1


def test_one_that_is_a_little_shorter_does_not_pass_it() -> None:
    rig = connected(P0)
    rig.submit("a", range(45))  # 11 pages
    rig.submit("b", range(500, 561))  # 15: too much beside those
    rig.submit("c", range(700, 745))  # 11: would not be
    rig.step()
    assert lengths(rig) == [45]
    rig.notice(rig.calls()[0])
    rig.step()
    assert lengths(rig)[:2] == [45, 61]


def test_each_worker_has_a_turn_of_its_own() -> None:
    rig = connected(P0, P1, num_pages=128)
    rig.submit("a", range(161), ranking=("prefill-0", "prefill-1"))
    rig.submit("b", range(500, 661), ranking=("prefill-1", "prefill-0"))
    rig.step()
    assert lengths(rig, P0) == lengths(rig, P1) == [161]
