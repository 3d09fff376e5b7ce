"""What the HTTP handlers share. Built once by the server, or by a test around a scripted worker."""

from dataclasses import dataclass, field
from random import Random

from prometheus_client import CollectorRegistry

from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode
from headstart.gateway.api.auth import KeyRing
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.job import Job
from headstart.gateway.model import ServedModel
from headstart.gateway.token_memory import TokenMemory
from headstart.observe.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one HTTP request."""

    request_timeout_s: float = 600.0  # deadline where the client sets none, and the longest it may set
    max_body_bytes: int = 16 << 20
    max_buffered_events: int = 4096  # of one response, while its client does not read; beyond it, it is cancelled


@dataclass(slots=True)
class OpenJobs:
    """Jobs being answered. open ─► draining (nothing new) ─► empty"""

    is_draining: bool = False
    jobs: set[Job] = field(default_factory=set)

    def add(self, job: Job) -> None:
        self.jobs.add(job)

    def discard(self, job: Job) -> None:
        job.close()
        self.jobs.discard(job)

    def abandon(self) -> None:
        """End what still runs: streams get an error event."""
        for job in list(self.jobs):
            job.close(ErrorCode.UNAVAILABLE, "the server is shutting down")


@dataclass(frozen=True, slots=True)
class Telemetry:
    metrics: GatewayMetrics
    registry: CollectorRegistry
    clock: Clock


@dataclass(frozen=True, slots=True)
class GatewayState:
    model: ServedModel
    dispatcher: Dispatcher
    memory: TokenMemory
    keys: KeyRing
    telemetry: Telemetry
    jobs: OpenJobs
    rng: Random
    limits: HttpLimits

    @property
    def context_len(self) -> int:
        """Longest prompt plus output that can be served now, tokens."""
        capacity = self.dispatcher.capacity_tokens
        context_len = self.model.bounds.context_len
        return context_len if capacity is None else min(context_len, capacity)
