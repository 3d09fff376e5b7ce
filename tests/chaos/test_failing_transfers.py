"""One transfer in ten fails: every request has its one end, no output is wrong, the ledger is exact, and it costs little."""

import itertools
import random

from headstart.sim.cluster import SimCluster
from headstart.sim.kv_fingerprints import oracle
from headstart.sim.spec import ClusterSpec
from headstart.transfer.loopback import Fault, Posted

NUM_REQUESTS = 1000
NUM_AT_ONCE = 24
NUM_NEW = 4
FAILURES = (Fault(fails=True), Fault(fails=True), Fault(refused=True), Fault(num_notices=0))
SPEC = ClusterSpec(num_prefill=2, num_decode=2, prefill_pages=256, decode_pages=256)


def serve(share_failing: float) -> SimCluster:
    """Requests with little in common, always `NUM_AT_ONCE` of them unfinished. Returns the cluster at rest."""
    cluster, rng = SimCluster(SPEC, seed=1), random.Random(2)

    def inject(posted: Posted) -> Fault:
        return rng.choice(FAILURES) if rng.random() < share_failing else Fault()

    cluster.inject_write_faults(inject)
    cluster.run_for(0.1)
    for step in itertools.count():
        num_open = cluster.gateway.num_unfinished
        for _ in range(min(NUM_AT_ONCE - num_open, NUM_REQUESTS - len(cluster.handles))):
            cluster.submit(cluster.request([rng.randrange(97) for _ in range(rng.randint(20, 60))], NUM_NEW))
        if len(cluster.handles) == NUM_REQUESTS and not cluster.gateway.num_unfinished:
            break
        cluster.step()
        if step % 20 == 0:
            cluster.check()
    cluster.run_until(cluster.is_quiet, limit_s=30.0)
    cluster.check_idle()
    return cluster


def duration_s(cluster: SimCluster) -> float:
    return max(handle.ended_at or 0.0 for handle in cluster.handles)


def test_1000_requests_with_one_transfer_in_ten_failing() -> None:
    cluster = serve(0.1)
    assert len(cluster.handles) == NUM_REQUESTS
    for handle in cluster.handles:
        assert handle.finished is not None, handle.failed
        assert handle.tokens == oracle(handle.request.prompt, NUM_NEW, SPEC.vocab_size)
    retries = sum(cluster.load(f"decode-{i}")["prefill_retries"] for i in range(2))
    assert retries > 50
    undisturbed, disturbed = duration_s(serve(0.0)), duration_s(cluster)
    print(f"{NUM_REQUESTS} requests: {undisturbed:.2f} s, with failures {disturbed:.2f} s, {retries:.0f} retries")
    assert disturbed < 1.6 * undisturbed
