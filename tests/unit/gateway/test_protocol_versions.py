"""During a rolling update, workers of another protocol version get no requests, and the log says both versions."""

import pytest
from msgspec import structs

from headstart.core.identity import PROTOCOL_VERSION
from headstart.core.messages import Join, Role, WorkerRef
from tests.support.dispatchers import HERE, SPEC, World


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_worker_of_another_version_is_not_taken_in_and_both_versions_are_named(
    role: Role, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    other = WorkerRef(f"{role}-9", 1)
    spec = structs.replace(SPEC, protocol_version=version)
    for _ in range(2):
        world.say(other, Join(other, role, spec, "tcp://elsewhere", 4096, lock_domain=HERE))
    assert world.dispatcher.registry.get(other) is None
    (line,) = (line for line in caplog.records if line.getMessage() == "worker not taken in")
    reason = vars(line)["reason"]
    assert f"version {version} of" in reason
    assert f"version {PROTOCOL_VERSION};" in reason


def test_the_others_go_on() -> None:
    world = World()
    old = WorkerRef("decode-9", 1)
    world.say(old, Join(old, Role.DECODE, structs.replace(SPEC, protocol_version=1), "", 4096, lock_domain=HERE))
    current = world.join("decode-0")
    assert [record.ref for record in world.dispatcher.registry.alive(Role.DECODE)] == [current]
