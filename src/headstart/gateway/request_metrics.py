"""Counts events into the metrics. Nothing here can fail a request."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from headstart.core.clock import Clock
from headstart.gateway.stream import Done, Event, Failure, TextChunk
from headstart.observe.metrics import GatewayMetrics


class RequestMetrics:
    """Watches the events of one generation, in order."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock, endpoint: str, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._endpoint = endpoint
        self._started_at = clock.now()
        self._last: dict[int, float] = {}  # choice -> when its latest chunk came
        metrics.prompt_tokens.inc(num_prompt_tokens)

    def observe(self, event: Event) -> None:
        if isinstance(event, TextChunk):
            self._observe_chunk(event.choice)
            return
        outcome = event.code.value if isinstance(event, Failure) else event.finish_reason
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        if isinstance(event, Done):
            self._metrics.output_tokens.inc(event.num_tokens)
            self._metrics.cached_tokens.inc(event.stats.cached_tokens)
            self._metrics.bytes_moved.inc(event.stats.bytes_moved)

    def _observe_chunk(self, choice: int) -> None:
        now, last = self._clock.now(), self._last
        if (before := last.get(choice)) is not None:
            self._metrics.between_tokens_s.observe(now - before)
        elif not last:
            self._metrics.first_token_s.observe(now - self._started_at)
        last[choice] = now


class DispatchCollector(Collector):
    """The dispatcher's own totals, read when scraped: hand-overs, gaps, late and foreign messages, refusals."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily("headstart_dispatch_events", "What the dispatcher saw", labels=["event"])
        for event, total in sorted(self._counters.items()):
            family.add_metric([event], total)
        yield family
