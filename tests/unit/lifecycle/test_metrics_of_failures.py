"""Case M6: while everything goes wrong, what the workers say of themselves can be scraped and logged."""

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headstart.core.errors import ErrorCode
from headstart.observe.decode_line import INTERVAL_S, LoadLine
from headstart.observe.metrics import WorkerCollector, WorkerSample
from headstart.sim.cluster import SimCluster
from headstart.transfer.loopback import Fault, Posted
from tests.support.clusters import make_cluster, prompt, settle, submit


def every_third_fails(posted: Posted) -> Fault:
    return Fault(fails=True) if posted.index % 3 == 2 else Fault(num_notices=2 if posted.index % 3 else 1)


class Watch:
    """Scrapes and logs every worker after each event of a cluster."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._registry = CollectorRegistry()
        self._registry.register(WorkerCollector(self._samples))
        self._lines: dict[str, LoadLine] = {}
        self.num_looks = 0
        self.last = ""

    def _samples(self) -> list[WorkerSample]:
        return [
            WorkerSample(name, worker.join.role, "alive", worker.organs.scheduler.load())
            for name, worker in self._cluster.workers.items()
        ]

    def look(self) -> None:
        self.last = generate_latest(self._registry).decode()
        for name, worker in self._cluster.workers.items():
            line = self._lines.setdefault(name, LoadLine(name, 4, 32))
            line.observe(self.num_looks * INTERVAL_S, worker.organs.scheduler.load())
        self.num_looks += 1


@pytest.mark.behaviour("M6")
def test_a_history_of_failures_can_be_scraped_and_logged_at_every_moment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cluster = make_cluster(num_prefill=2, decode_pages=40, timing={"restart_s": 0.2})
    cluster.inject_write_faults(every_third_fails)
    watch = Watch(cluster)
    handles = [submit(cluster, prompt(30, first), 20) for first in range(6)]
    late = submit(cluster, prompt(60, 7), 60, remaining_s=0.2)
    huge = submit(cluster, prompt(10), 1000)
    empty = submit(cluster, [])
    began = cluster.clock.now()
    faults = [
        (0.05, lambda: cluster.cancel(handles[0])),
        (0.1, lambda: cluster.kill("prefill-0")),
        (0.3, lambda: cluster.kill("decode-0")),
    ]
    while not all(handle.is_done for handle in cluster.handles):
        cluster.step()
        watch.look()
        if faults and cluster.clock.now() >= began + faults[0][0]:
            faults.pop(0)[1]()
    assert not faults
    settle(cluster)
    watch.look()
    assert (late.error, huge.error, empty.error) == (ErrorCode.DEADLINE, ErrorCode.TOO_LONG, ErrorCode.INVALID)
    assert handles[0].error is ErrorCode.CANCELLED
    assert watch.num_looks > 50
    assert 'event="failed_writes"' in watch.last
    assert len([line for line in caplog.records if line.name == "headstart.worker"]) > 50
