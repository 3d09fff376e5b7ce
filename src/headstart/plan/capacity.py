"""What a split of workers into prefill and decode can carry, in closed form: to choose what is worth simulating.

The steady state is taken to be the largest decode batch that nothing forbids. With B requests running on each of n_d
decode workers, outputs of O tokens and steps of T(B) seconds, requests end at the rate n_d * B / (O * T(B)); the batch
grows until it meets its first bound: its pool, its row limit, the inter-token target, the prefill workers' rate, the
link's, or the load itself. That bound is the binding constraint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import inf
from operator import itemgetter
from statistics import fmean

from headstart.plan.cost import CostModel
from headstart.plan.workload_stats import PlannedRequest, PromptWork, delta_tokens, held, placed, prompt_work
from headstart.sim.cost import StepShape


class Bound(Enum):
    """What keeps a decode batch from being larger. The value says it in words."""

    RESIDENCY = "decode residency: the pool holds no more requests"
    ROWS = "decode rows: the limit on running requests"
    ITL = "the ITL target: a larger batch makes steps too long"
    PREFILL = "prefill compute: the decode workers wait for prompts"
    LINK = "the link: KV does not arrive faster"
    DECODE = "decode bandwidth: everyone runs, and steps take the time"
    LATENCY = "the clients: they spend most of their time in prefill of an idle system"
    LOAD = "the offered load: all of it is served"


@dataclass(frozen=True, slots=True)
class Split:
    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Who requests what: clients that wait for their answers, or a rate of requests per second."""

    requests: tuple[PlannedRequest, ...]
    warm: tuple[PlannedRequest, ...] = ()
    """Sent before, and not counted."""
    num_clients: int | None = None
    rate: float | None = None

    @property
    def output_len(self) -> float:
        return fmean(request.answer.length for request in self.requests)


@dataclass(frozen=True, slots=True)
class Worker:
    """One prefill or decode worker of the deployment; both kinds have the same cards."""

    costs: CostModel
    pool_tokens: int
    chunk: int
    """Prompt tokens of one prefill step."""
    max_running: int
    keeps_cache: bool = True
    """Decode workers match prompts against what they hold; otherwise every request has KV of its own."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Steady state of a split. Times in seconds, rates in requests per second."""

    split: Split
    batch: int
    """Requests that run on each decode worker."""
    throughput: float
    ttft_s: float
    itl_s: float
    resident_tokens: float
    """KV that the batch pins on each decode worker, answers counted whole."""
    bound: Bound
    prefill_rate: float
    """What the prefill workers could carry."""
    link_rate: float
    """What the links could carry: inf where bytes take no time, or nothing moves."""


class Capacity:
    """Of any split of one kind of worker under one load. What one side alone decides is worked out once."""

    def __init__(self, offered: OfferedLoad, worker: Worker, itl_target_s: float | None = None) -> None:
        self._offered = offered
        self._worker = worker
        self._itl_target_s = itl_target_s
        self._prompt_s = lru_cache(None)(self._mean_prompt_s)
        self._decoding = lru_cache(None)(self._decoding_of)

    def of(self, split: Split) -> Estimate:
        """The largest batch within every bound. A batch of one is taken even where it breaks the target."""
        prompt_s, decoding = self._prompt_s(split.num_prefill), self._decoding(split.num_decode)
        steady = _Steady(split, self._offered, self._worker, self._itl_target_s, prompt_s, decoding)
        low, high = 1, self._worker.max_running + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if steady.bound(middle) is None else (low, middle)
        bound = steady.bound(high) or Bound.ROWS
        rate = steady.rate_at(bound, low)
        return Estimate(
            split,
            low,
            rate,
            steady.ttft(rate, low),
            decoding.step_s(low),
            decoding.resident(low),
            steady.spoken(bound, low),
            steady.prefill_rate,
            steady.link_rate,
        )

    def _mean_prompt_s(self, num_prefill: int) -> float:
        work = prompt_work(self._offered.requests, num_prefill, warm=self._offered.warm)
        return fmean(prompt_time(job, self._worker) for job in work)

    def _decoding_of(self, num_decode: int) -> "_Decoding":
        offered, worker = self._offered, self._worker
        places = placed((*offered.warm, *offered.requests), num_decode, offered.num_clients or worker.max_running)
        if worker.keeps_cache:
            moved = delta_tokens(places, warm=offered.warm)
        else:
            moved = fmean(request.prompt_len for request in offered.requests)
        return _Decoding(worker, max(places, key=len), round(moved * worker.costs.kv_token_bytes))


class _Decoding:
    """The decode worker with the most requests, as functions of the batch that it runs."""

    def __init__(self, worker: Worker, requests: Sequence[PlannedRequest], moved_bytes: int) -> None:
        self._worker = worker
        self._requests = requests
        self._moved_bytes = moved_bytes
        self.step_s = lru_cache(None)(self._step_s)
        self.resident = lru_cache(None)(self._resident)

    @property
    def transfer_s(self) -> float:
        """Of what a request lacks on average, until the decode worker hears of it in an idle system."""
        return self._worker.costs.link.idle_time(self._moved_bytes)

    @property
    def link_busy_s(self) -> float:
        """For which it keeps either end of a link busy."""
        return self._worker.costs.link.busy_time(self._moved_bytes)

    def _resident(self, batch: int) -> float:
        batch_held = held(self._requests, batch, whole=True)
        return batch_held.unique if self._worker.keeps_cache else batch_held.each

    def _step_s(self, batch: int) -> float:
        batch_held = held(self._requests, batch, whole=False)
        each = round(batch_held.each)
        unique = round(batch_held.unique) if self._worker.keeps_cache else each
        return self._worker.costs.decode_time(StepShape(batch, batch, each, unique, each))


@dataclass(frozen=True, slots=True)
class _Steady:
    """One split's rates as functions of the decode batch."""

    split: Split
    offered: OfferedLoad
    worker: Worker
    itl_target_s: float | None
    prompt_s: float
    decoding: _Decoding

    @property
    def prefill_rate(self) -> float:
        return self.split.num_prefill / self.prompt_s

    @property
    def link_rate(self) -> float:
        busy_s = self.decoding.link_busy_s
        return min(self.split.num_prefill, self.split.num_decode) / busy_s if busy_s else inf

    @property
    def idle_s(self) -> float:
        """What a request waits for its prompt in an idle system."""
        return self.prompt_s + self.decoding.transfer_s

    def rate(self, batch: int) -> float:
        return self.split.num_decode * batch / (self.offered.output_len * self.decoding.step_s(batch))

    @property
    def limits(self) -> dict[Bound, float]:
        """Rates that no batch goes beyond."""
        return {Bound.PREFILL: self.prefill_rate, Bound.LINK: self.link_rate, Bound.LOAD: self.offered.rate or inf}

    def rate_at(self, bound: Bound, batch: int) -> float:
        """With `batch` the largest that breaks nothing: a rate that binds is reached by a batch between two numbers."""
        return self.limits.get(bound, self.rate(batch))

    def ttft(self, rate: float, batch: int) -> float:
        """Clients that wait: what Little's law leaves beside decoding. A rate: an M/D/1 queue before prefill, or
        one without end where the links carry less."""
        step_s = self.decoding.step_s(batch)
        idle_s = self.idle_s + step_s
        if self.offered.num_clients is not None:
            return max(idle_s, self.offered.num_clients / rate - self.offered.output_len * step_s)
        use = rate / self.prefill_rate
        settles = use < 1 and rate < self.link_rate
        return idle_s + (use / (2 * (1 - use)) * self.prompt_s if settles else inf)

    def bound(self, batch: int) -> Bound | None:
        """The first bound that `batch` running requests on each decode worker break."""
        rate, clients = self.rate(batch), self.offered.num_clients
        tightest, limit = min(self.limits.items(), key=itemgetter(1))  # one request more may be beyond several
        broken = {
            Bound.RESIDENCY: self.decoding.resident(batch) > self.worker.pool_tokens,
            Bound.ROWS: batch > self.worker.max_running,
            Bound.ITL: self.itl_target_s is not None and self.decoding.step_s(batch) > self.itl_target_s,
            tightest: rate > limit,
            Bound.DECODE: clients is not None and self.split.num_decode * batch + rate * self.idle_s > clients,
        }
        return next((bound for bound, is_broken in broken.items() if is_broken), None)

    def spoken(self, bound: Bound, batch: int) -> Bound:
        """Clients that are all served wait for steps, or for prefill of an idle system: whichever takes longer."""
        waits = self.idle_s > self.offered.output_len * self.decoding.step_s(batch)
        return Bound.LATENCY if bound is Bound.DECODE and waits else bound


def prompt_time(job: PromptWork, worker: Worker) -> float:
    """Seconds of a prompt's chunks, one after the other and alone."""
    seconds, start, end = 0.0, job.num_cached, job.num_cached + job.num_new
    while start < end:
        stop = min(end, start + worker.chunk)
        num_new = stop - start
        pairs = num_new * start + num_new * (num_new + 1) // 2
        seconds += worker.costs.prefill_time(StepShape(0, num_new, stop, stop, pairs))
        start = stop
    return seconds


def narrowed(estimates: Sequence[Estimate], ttft_target_s: float | None, num_neighbours: int = 1) -> list[Split]:
    """The most promising split and those beside it, by prefill workers."""
    best = min(estimates, key=lambda e: (_excess(e.ttft_s, ttft_target_s), -e.throughput, e.split.num_prefill))
    by_prefill = sorted((e.split for e in estimates), key=lambda split: split.num_prefill)
    place = by_prefill.index(best.split)
    return by_prefill[max(0, place - num_neighbours) : place + num_neighbours + 1]


def _excess(value: float, target: float | None) -> float:
    return 0.0 if target is None else max(0.0, value / target - 1)
