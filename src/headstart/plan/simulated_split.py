"""One split, simulated: what it serves, and how much of that within the targets."""

from dataclasses import dataclass, replace

from headstart.bench.measure import ReportRow, RunSpec
from headstart.bench.records import RequestRecord
from headstart.bench.workload import TokenSource
from headstart.plan.capacity import Split
from headstart.plan.deployment import Deployment
from headstart.plan.simulate_command import simulated_row
from headstart.plan.slo import Latencies, Targets, is_good


@dataclass(frozen=True, slots=True)
class SimulatedSplit:
    """What a simulation of one split gave. Rates are requests per second."""

    split: Split
    max_running: int
    throughput: float
    goodput: float
    """Of requests that met the targets, each for itself."""
    output_throughput: float
    latencies: Latencies
    running: float
    """Mean requests running on a decode worker."""
    pool_share: float
    """Mean share of a decode worker's pool that is neither free nor evictable."""


@dataclass(frozen=True, slots=True)
class SplitSimulator:
    """Simulates splits of one deployment under one load."""

    run_spec: RunSpec
    deployment: Deployment
    targets: Targets
    source: TokenSource

    def simulate(self, split: Split, max_running: int) -> SimulatedSplit:
        """Raises BenchError if a request fails."""
        measured = {session.name for session in self.run_spec.workload.measured}
        records: list[RequestRecord] = []

        def keep(record: RequestRecord) -> None:
            if record.request.session in measured:
                records.append(record)

        row = simulated_row(self.run_spec, self._resized(split, max_running), str(split), self.source, keep)
        good = sum(is_good(record, self.targets) for record in records)
        return _trial(split, max_running, row, good / row["duration"])

    def _resized(self, split: Split, max_running: int) -> Deployment:
        spec = self.deployment.spec
        decode = replace(spec.decode, max_running_requests=max_running)
        sized = replace(spec, num_prefill=split.num_prefill, num_decode=split.num_decode, decode=decode)
        return replace(self.deployment, spec=sized)


def _trial(split: Split, max_running: int, row: ReportRow, goodput: float) -> SimulatedSplit:
    decode = [worker for worker in row["workers"] if worker["worker"].startswith("decode")]
    return SimulatedSplit(
        split,
        max_running,
        row["request_throughput"],
        goodput,
        row["output_throughput"],
        Latencies(row["median_ttft_ms"], row["p99_ttft_ms"], row["median_itl_ms"], row["p99_itl_ms"]),
        sum(worker["running"]["mean"] for worker in decode) / len(decode),
        sum(worker["pool_usage"]["mean"] for worker in decode) / len(decode),
    )
