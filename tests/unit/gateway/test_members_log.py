"""What the gateway's log says of its members: one line for each change, none for a sign of life."""

import pytest

from headstart.core.messages import Leave, WorkerExited
from tests.support.dispatchers import World


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO")
    return caplog


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    """Since last asked: the event up to its first comma or colon, and who it is about."""
    taken = [f"{r.getMessage().split(',')[0].split(':')[0]} {vars(r)['worker']}" for r in said.records]
    said.clear()
    return taken


def test_a_worker_that_joins_serves_and_leaves_is_two_lines(said: pytest.LogCaptureFixture) -> None:
    world = World()
    ref = world.join("prefill-0", role="prefill")
    (record,) = said.records
    assert (vars(record)["role"], vars(record)["peer_address"]) == ("prefill", "tcp://prefill-0")
    world.join("prefill-0", role="prefill")
    world.run(5)
    world.say(ref, Leave(ref))
    world.dispatcher.handle("launcher", WorkerExited(ref, 0))
    assert lines(said) == ["worker joined prefill-0#1", "worker left prefill-0#1"]


def test_a_worker_that_falls_silent_and_returns_is_followed(said: pytest.LogCaptureFixture) -> None:
    world = World()
    ref = world.join("decode-0")
    world.beating.clear()
    world.run(5)
    assert lines(said) == ["worker joined decode-0#1", "worker is suspect decode-0#1", "worker is dead decode-0#1"]
    world.beating.add(ref)
    world.run(1)
    assert lines(said) == ["worker is back decode-0#1"]


def test_a_loop_that_stands_still_is_told_from_silence(said: pytest.LogCaptureFixture) -> None:
    world = World()
    ref = world.join("decode-0")
    world.beating.clear()
    world.beat(ref, loop_age_s=2.5)
    world.run(0.1)
    assert "its loop stands still for 2.5 s" in said.records[-1].getMessage()


def test_a_crash_says_its_status_and_a_successor_whom_it_replaces(said: pytest.LogCaptureFixture) -> None:
    world = World()
    ref = world.join("decode-0")
    world.dispatcher.handle("launcher", WorkerExited(ref, -9))
    assert said.records[-1].getMessage() == "worker ended with status -9"
    world.join("decode-0", incarnation=2)
    world.join("decode-0", incarnation=3)
    assert vars(said.records[-1])["replaces"] == "decode-0#2"
