"""What is said about workers."""

from typing import Any

import pytest

from headstart.core.messages import WorkerLoad
from headstart.plan.utilisation import Watch, look_of, workers_table
from headstart.sim.cluster import SimCluster
from headstart.sim.spec import ClusterSpec, Modelling, Timing


def row(name: str, running: float = 1.0, hits: float | None = None) -> dict[str, Any]:
    spread = {"mean": running, "median": running, "max": running}
    counts = {"retractions": 2, "pages_moved": 10}
    return {"worker": name, "running": spread, "waiting": spread, "pool_usage": spread, "hit_rate": hits, **counts}


def test_a_page_in_use_is_neither_free_nor_evictable() -> None:
    load = WorkerLoad(inflight_pages=1, private_pages=2, pinned_pages=3, cached_pages=10, free_pages=4)
    assert look_of(load).pool_usage == 6 / 20


def test_few_workers_have_a_line_each() -> None:
    lines = workers_table([row("prefill-0"), row("decode-0", 3.0, 0.5), row("decode-1", 5.0)]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["prefill-0", "decode-0", "decode-1"]
    assert lines[2].split()[1:] == ["3.0", "3", "3.0", "3.000", "3.000", "0.500", "2", "10"]


def test_many_of_a_role_share_one() -> None:
    decode = [row(f"decode-{n}", float(n), 0.5 if n else None) for n in range(101)]
    lines = workers_table([row("prefill-0"), *decode]).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("decode x 101")
    assert lines[2].split()[3:] == ["50.0", "100", "50.0", "50.000", "100.000", "0.500", "202", "1010"]


@pytest.mark.parametrize("jumps", [True, False])
def test_every_sample_is_of_its_time(jumps: bool) -> None:
    """Although a worker in which nothing has changed is not looked at again."""
    cluster = SimCluster(
        ClusterSpec(timing=Timing(control_delay_s=(0.001, 0.001)), modelling=Modelling("none", jumps=jumps))
    )
    watch = Watch(cluster)
    watch.start()
    cluster.at(0.2, lambda: cluster.submit(cluster.request(range(8), 20)) and None)
    for _ in range(60):
        cluster.run_for(0.01)
        watch._take()
        looks = [look_of(worker.load()) for worker in cluster.workers.values()]
        assert [tuple(look) for look in watch._samples[-1].looks.tolist()] == looks
    assert watch.between(0.1, cluster.clock.now())[1]["running"]["max"] == 1
