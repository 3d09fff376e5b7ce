"""The canary: without the fence, a writer that was stopped past its deadline spoils the pages of another request, and the
fingerprints tell. With it, nothing is spoilt."""

import pytest

from headstart.core.arrays import Int32Array
from headstart.kv.cache import PrefixCache
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.sim.kv_fingerprints import oracle
from headstart.sim.spec import ClusterSpec
from headstart.transfer.loopback import Fault

WRITTEN_TOO_LATE = "holds another sequence's KV|changed while a step read it|was written while a step wrote it"


class Unfenced(PrefixCache):
    """A page that a peer may still write is nobody's as soon as its request has left."""

    def open_write(self, pages: Int32Array) -> None: ...

    def close_write(self, pages: Int32Array) -> None: ...


def stop_the_writer_past_its_deadline(cluster: SimCluster) -> Handle:
    """Its writes are in the air, their request has ended, and another uses the pool when the writer goes on."""
    cluster.run_for(0.1)
    cluster.inject_write_faults(lambda posted: Fault(delay_s=1.0))
    left = cluster.submit(cluster.request(range(41), deadline_s=0.5))
    cluster.run_for(0.2)
    assert cluster.links.num_open_writes()
    cluster.stall("prefill-0")
    cluster.run_for(3.5)
    assert left.is_done  # at half its time it went on without the writer, onto new pages
    other = cluster.submit(cluster.request(range(30, 90), 8))
    cluster.run_until(lambda: len(other.tokens) == 2)
    cluster.inject_write_faults(lambda posted: Fault())
    cluster.resume("prefill-0")
    return other


def test_a_writer_stopped_past_its_deadline_leaves_every_fingerprint_intact_when_it_goes_on() -> None:
    cluster = SimCluster(ClusterSpec(decode_pages=32))
    other = stop_the_writer_past_its_deadline(cluster)
    while not (other.is_done and cluster.is_quiet()):
        cluster.step()
        cluster.check()
    assert other.tokens == oracle(other.request.prompt, 8, cluster.spec.vocab_size)
    cluster.check_idle()


def test_with_the_fence_removed_the_same_writer_is_caught_by_the_fingerprints() -> None:
    cluster = SimCluster(ClusterSpec(decode_pages=32), make_cache=Unfenced)
    stop_the_writer_past_its_deadline(cluster)
    with pytest.raises(AssertionError, match=WRITTEN_TOO_LATE):
        cluster.finish()
