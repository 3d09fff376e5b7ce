"""Every metric the gateway exposes, and nothing else. Names start with `headstart_`; times are in seconds."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headstart.core.messages import WorkerLoad, WorkerState
from headstart.observe.latency_histogram import LatencyHistogram

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
PAGE_STATES = ("inflight", "private", "pinned", "cached", "free")


class GatewayMetrics:
    """What the gateway counts itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "headstart_requests", "Choices that ended, by how", ["endpoint", "outcome"], registry=registry
        )
        self.unfinished = Gauge("headstart_unfinished_requests", "Choices not yet ended", registry=registry)
        self.prompt_tokens = Counter("headstart_prompt_tokens", "Prompt tokens received", registry=registry)
        self.cached_tokens = Counter(
            "headstart_cached_tokens", "Prompt tokens whose KV was not computed for their request", registry=registry
        )
        self.output_tokens = Counter("headstart_output_tokens", "Tokens generated", registry=registry)
        self.bytes_moved = Counter("headstart_bytes_moved", "KV bytes moved for requests", registry=registry)
        self.first_token_s = Histogram(
            "headstart_time_to_first_token_seconds", "Arrival to first token", buckets=TTFT_BUCKETS, registry=registry
        )
        self.between_tokens_s = LatencyHistogram(
            "headstart_inter_token_seconds", "Gap between tokens of a choice", ITL_BUCKETS, registry
        )


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One worker as the gateway last heard of it."""

    name: str
    role: str
    state: WorkerState
    load: WorkerLoad


class WorkerCollector(Collector):
    """Turns the workers' last heartbeats into metrics when they are scraped. Register it with a registry."""

    def __init__(self, read: Callable[[], Iterable[WorkerSample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        labels = ["worker", "role"]
        up = GaugeMetricFamily("headstart_worker_up", "1 while the worker takes work", labels=labels)
        running = GaugeMetricFamily("headstart_worker_running", "Requests in steps", labels=labels)
        waiting = GaugeMetricFamily("headstart_worker_waiting", "Requests that wait", labels=labels)
        queued = GaugeMetricFamily("headstart_worker_queued_tokens", "Prompt tokens not computed yet", labels=labels)
        overdue = GaugeMetricFamily("headstart_worker_overdue_pages", "Pages kept for a late peer", labels=labels)
        pages = GaugeMetricFamily("headstart_worker_pages", "KV pages by state", labels=[*labels, "state"])
        events = CounterMetricFamily("headstart_worker_events", "Monotonic totals", labels=[*labels, "event"])
        for sample in self._read():
            key, load = [sample.name, sample.role], sample.load
            up.add_metric(key, float(sample.state == WorkerState.ALIVE))
            running.add_metric(key, load.num_running)
            waiting.add_metric(key, load.num_waiting)
            queued.add_metric(key, load.queued_tokens)
            overdue.add_metric(key, load.overdue_pages)
            for state in PAGE_STATES:
                pages.add_metric([*key, state], getattr(load, f"{state}_pages"))
            for event, total in sorted(load.counters.items()):
                events.add_metric([*key, event], total)
        yield from (up, running, waiting, queued, overdue, pages, events)
