"""What the HTTP handlers share. Built once by the server, or by a test around a scripted worker."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from prometheus_client import CollectorRegistry

from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode, RequestError
from headstart.core.identity import cache_owner
from headstart.gateway.api.auth import KeyRing
from headstart.gateway.dispatch import Dispatcher, DispatcherApi
from headstart.gateway.generation import Generation
from headstart.gateway.model import ServedModel
from headstart.gateway.token_memory import TokenMemory
from headstart.observe.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of one HTTP request."""

    request_timeout_s: float = 600.0  # deadline if the client sets none, and the longest it may set
    max_body_bytes: int = 16 << 20
    max_read_bytes: int = 64 << 20  # of all bodies being read and checked at a time; beyond it, 429
    body_timeout_s: float = 60.0  # for a body to arrive; beyond it, 408
    max_buffered_events: int = 4096  # of one response, while its client does not read; beyond it, it is cancelled
    send_timeout_s: float = 60.0  # for such a client to take something; beyond it, it loses its place
    cors_origins: tuple[str, ...] = ()  # sites whose pages may use the server; "*": all
    strict_fields: bool = False  # a field that nobody knows is a 400
    log_requests: bool = False  # a line for each answer


@dataclass(slots=True)
class OpenGenerations:
    """Generations that are being answered. open ─► draining (nothing new) ─► empty"""

    max_per_tenant: int = 0  # choices that one tenant may have open; 0: no bound
    max_prompt_tokens: int = (
        16 << 20
    )  # of all that are open, each choice counted: prompts wait in this process's memory
    is_draining: bool = False
    open: set[Generation] = field(default_factory=set)
    _num_open: Counter[bytes] = field(default_factory=Counter)  # choices of each tenant
    _num_prompt_tokens: int = 0

    def check_room(self, namespace: bytes, num_choices: int = 1) -> None:
        """Raise RequestError if the tenant of `namespace` may not open `num_choices` more now, or ever."""
        if not self.max_per_tenant:
            return
        if num_choices > self.max_per_tenant:
            message = f"this asks for {num_choices} choices; one API key may have {self.max_per_tenant} open"
            raise RequestError(ErrorCode.INVALID, message, "n")
        if self._num_open[cache_owner(namespace)] + num_choices > self.max_per_tenant:
            message = f"this API key may have {self.max_per_tenant} requests open, try again when some have ended"
            raise RequestError(ErrorCode.BUSY, message)

    def add(self, generation: Generation) -> None:
        """Raises RequestError if it is one too many for its tenant, or too much beside what is open."""
        self.check_room(generation.spec.namespace, generation.spec.num_total)
        if self.open and self._num_prompt_tokens + generation.spec.num_prompt_tokens > self.max_prompt_tokens:
            raise RequestError(ErrorCode.BUSY, "too many long prompts wait, try again later")
        self._num_prompt_tokens += generation.spec.num_prompt_tokens
        self._num_open[cache_owner(generation.spec.namespace)] += generation.spec.num_total
        self.open.add(generation)

    def discard(self, generation: Generation) -> None:
        generation.close()
        if generation not in self.open:
            return
        self.open.remove(generation)
        self._num_prompt_tokens -= generation.spec.num_prompt_tokens
        owner = cache_owner(generation.spec.namespace)
        self._num_open[owner] -= generation.spec.num_total
        if not self._num_open[owner]:
            del self._num_open[owner]

    def abandon(self) -> None:
        """End what still runs: streams get an error event."""
        for generation in list(self.open):
            generation.close(ErrorCode.UNAVAILABLE, "the server is shutting down")


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """What bounds a prompt plus its output, in tokens: the model's context, or a decode worker's pool."""

    model_len: int
    pool_len: int | None = None  # of the largest decode worker; None while none is known

    @property
    def num_tokens(self) -> int:
        return self.model_len if self.pool_len is None else min(self.model_len, self.pool_len)

    @property
    def sentence(self) -> str:
        """The limit in the words that clients know it by, and which of the two it is."""
        sentence = f"this model's maximum context length is {self.num_tokens} tokens"
        if self.num_tokens == self.model_len:
            return sentence
        return f"{sentence} here, what the pool of the largest decode worker holds (the model takes {self.model_len})"


@dataclass(frozen=True, slots=True)
class Telemetry:
    metrics: GatewayMetrics
    registry: CollectorRegistry
    clock: Clock


@dataclass(frozen=True, slots=True)
class GatewayState:
    model: ServedModel
    dispatcher: Dispatcher  # to look at
    calls: DispatcherApi  # to call
    memory: TokenMemory
    keys: KeyRing
    telemetry: Telemetry
    generations: OpenGenerations
    rng: Random
    limits: HttpLimits

    @property
    def context_limit(self) -> ContextLimit:
        """Longest prompt plus output that some known decode worker can hold."""
        return ContextLimit(self.model.bounds.context_len, self.dispatcher.capacity_tokens)
