"""Passes that only take a step's output ask for the same wakeup, until something happens that changes it."""

import pytest
from decode_rig import P0, Rig

from headstart.scheduler.decode import prefill_client
from headstart.scheduler.tickets import FIRST_REPEAT_S


@pytest.fixture
def rig() -> Rig:
    rig = Rig(num_pages=256, local_prefill_tokens=8)
    rig.connect(P0)
    rig.advance(10.0)  # the link has settled
    rig.submit("steps", range(6), max_new=200, remaining_s=1000.0)
    for _ in range(3):
        rig.step()
    return rig


def quiet_wakeup(rig: Rig) -> float | None:
    """What several passes in a row ask for, of which none has anything to do."""
    asked = []
    for _ in range(5):
        rig.step()
        asked.append(rig.wakeup)
    assert len(set(asked)) == 1
    return asked[0]


def test_a_deadline_that_comes_sooner_is_woken_for(rig: Rig):
    assert quiet_wakeup(rig) == 510.0
    sooner = rig.submit("sooner", range(50, 56), max_new=200, remaining_s=10.0)
    rig.step()
    assert quiet_wakeup(rig) == 15.0
    rig.advance(5.0)
    assert quiet_wakeup(rig) == 20.0
    rig.advance(5.0)
    assert rig.failed(sooner).value == "deadline"
    assert quiet_wakeup(rig) == 510.0


def test_a_call_is_woken_for_when_it_is_opened_and_when_it_is_cut(rig: Rig):
    fetched = rig.submit("fetched", range(100, 140))
    rig.step()
    assert rig.calls()
    assert quiet_wakeup(rig) == 10.0 + prefill_client.FIRST_REPEAT_S
    rig.cancel(fetched)
    assert len(rig.cancels()) == 1
    assert quiet_wakeup(rig) == 10.0 + FIRST_REPEAT_S
    rig.advance(FIRST_REPEAT_S)
    assert len(rig.cancels()) == 2
