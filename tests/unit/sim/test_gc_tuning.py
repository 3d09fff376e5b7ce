"""While a cluster runs the collector rests; afterwards everything is as before."""

import gc
import weakref

import pytest

from headstart.sim.cluster import SimCluster
from headstart.sim.gc_tuning import NUM_YOUNG, rare_collections


def fail() -> None:
    assert gc.get_threshold()[0] == NUM_YOUNG
    raise KeyError


def test_thresholds_are_given_back_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        fail()
    assert gc.get_threshold() == before


def test_a_cluster_that_is_no_longer_used_is_gone_before_the_next_one_runs() -> None:
    with rare_collections():
        cluster = SimCluster()
        cluster.run_for(1.0)
    remains = weakref.ref(cluster)
    del cluster
    with rare_collections():
        assert remains() is None
