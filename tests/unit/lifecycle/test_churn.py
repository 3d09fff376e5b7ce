"""Workers that come and go, transfers that time out, cancels at any moment: only what they concern is touched."""

from random import Random

import pytest

from headstart.core.errors import ErrorCode
from headstart.core.messages import Drain, Prefill, PrefillFailed
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.sim.network import NO_FAULT, MessageFault
from headstart.transfer.loopback import Fault
from tests.support.clusters import assert_right, make_cluster, prompt, settle, state, submit

GATEWAY = "gateway"
FEW_MS = 0.02


@pytest.mark.full
@pytest.mark.behaviour("E17")
def test_250_workers_join_and_150_leave_under_load_and_every_request_has_its_end() -> None:
    """A leave is a kill or a drain; every name comes back as a later incarnation, and each is a join."""
    cluster = make_cluster(num_prefill=3, num_decode=4, timing={"restart_s": None})
    rng = Random(17)
    names = sorted(cluster.workers)
    num_joins, num_leaves, away = len(names), 0, []
    while num_leaves < 150 or num_joins < 250:
        for _ in range(2):
            submit(cluster, prompt(rng.randrange(4, 50), rng.randrange(8)), rng.randrange(1, 12), remaining_s=20.0)
        present = [name for name in names if name in cluster.workers]
        if len(away) < 3 and num_leaves < 244:
            name = rng.choice(present)
            if rng.random() < 0.3:
                cluster.control.send(GATEWAY, str(cluster.workers[name].ref), Drain())
                cluster.run_for(0.3)
            cluster.kill(name)
            away.append(name)
            num_leaves += 1
        cluster.run_for(0.05)
        if len(away) > rng.randrange(3):
            cluster.restart(away.pop(0))
            num_joins += 1
        cluster.check()
    for name in away:
        cluster.restart(name)
    settle(cluster)
    assert all(handle.is_done for handle in cluster.handles)
    failed = {handle.error for handle in cluster.handles} - {None}
    assert failed <= {ErrorCode.WORKER_LOST, ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE}
    finished = [handle for handle in cluster.handles if handle.finished is not None]
    assert_right(*finished)
    assert len(finished) > 0.9 * len(cluster.handles)


@pytest.mark.full
@pytest.mark.behaviour("E13")
def test_one_transfer_in_a_hundred_is_stuck_past_every_deadline_and_only_its_requests_are_late() -> None:
    # Pools so large that what is stuck stays below the tenth that has a silent worker killed.
    cluster = make_cluster(num_prefill=2, num_decode=2, decode_pages=4000, prefill_pages=4000)
    rng = Random(13)
    cluster.inject_write_faults(lambda posted: Fault(delay_s=60.0) if rng.random() < 0.01 else Fault())
    for batch in range(64):
        for number in range(32):
            submit(cluster, prompt(20 + number, batch * 32 + number), 2, remaining_s=30.0)
        cluster.run_until(lambda: sum(not handle.is_done for handle in cluster.handles) < 16)
    cluster.finish()
    assert len(cluster.handles) == 2048
    assert_right(*cluster.handles)
    cluster.run_for(60.0)  # what was stuck completes: late, and for pages that wait for it
    settle(cluster)


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.INVALID])
@pytest.mark.behaviour("E20")
def test_a_prefill_worker_that_refuses_at_once_is_known_to_have_refused_at_once(code: ErrorCode) -> None:
    cluster = make_cluster()
    calls: list[Prefill] = []

    def swallow(sender: str, recipient: str, message: object) -> MessageFault:
        if not isinstance(message, Prefill):
            return NO_FAULT
        calls.append(message)
        return MessageFault(0)

    cluster.inject_message_faults(swallow)
    handle = submit(cluster, prompt(60), 4, remaining_s=30.0)
    cluster.run_until(lambda: bool(calls))
    worker, caller = cluster.workers["prefill-0"].ref, cluster.workers["decode-0"].ref
    cluster.control.send(str(worker), str(caller), PrefillFailed(calls[0].ref, code, "no"))
    began = cluster.clock.now()
    cluster.run_until(lambda: handle.is_done)
    assert cluster.clock.now() - began < 1.0
    if code is ErrorCode.INVALID:
        assert handle.error is ErrorCode.INVALID
    else:
        assert_right(handle)


@pytest.mark.parametrize("moment", ["waiting", "preparing", "running"])
@pytest.mark.behaviour("F6")
def test_a_cancel_before_during_or_after_the_transfer_is_never_worse_for_the_next_request(moment: str) -> None:
    def next_takes_s(*, cancels: bool) -> float:
        cluster = make_cluster(decode={"max_running_requests": 2})
        first = submit(cluster, prompt(60), 40)
        brought_to(cluster, moment, first)
        if cancels:
            cluster.cancel(first)
        following = submit(cluster, prompt(60, 5), 8)
        began = cluster.clock.now()
        cluster.run_until(lambda: following.is_done)
        assert_right(following)
        settle(cluster)
        assert following.ended_at is not None
        return following.ended_at - began

    assert next_takes_s(cancels=True) <= next_takes_s(cancels=False) + FEW_MS


def brought_to(cluster: SimCluster, moment: str, handle: Handle) -> None:
    if moment != "waiting":
        cluster.run_until(lambda: state(cluster, handle) == moment, limit_s=20.0)
