"""What the requests of a benchmark report tell about steps: gaps between tokens, and what a prefill worker was busy with.

A client sees the time between two tokens of an answer: one decode step, whose rows are the answers under way then. The
decode worker tells how long each request waited for its prefill worker. Requests must have been sent to Headstart, one
decode worker, with `--details`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.config.errors import ConfigError

Floats = NDArray[np.float64]
SAME_STEP = 0.3
"""Tokens that reach clients within this share of a step's time are taken to be of one step."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. Times in seconds of the run, lengths in tokens."""

    group: int
    sent: float
    times: Floats  # [num_tokens], when each reached the client
    queue_s: float
    prefill_s: float
    first_step_s: float
    prompt_len: int
    num_computed: int  # prompt tokens, without the last, that somebody computed for it
    shared_len: int  # of the prompt: what others of its group begin with too
    is_remote: bool  # a prefill worker computed them
    bytes_moved: int

    @property
    def front_s(self) -> float:
        """What its time to first token spent outside its decode worker."""
        return float(self.times[0]) - self.sent - self.queue_s - self.prefill_s - self.first_step_s

    @property
    def called(self) -> tuple[float, float]:
        """When its prefill worker had it, about."""
        ready = float(self.times[0]) - self.first_step_s
        return ready - self.prefill_s, ready


def seen_in(run: dict[str, Any]) -> list[Seen]:
    """The requests of one run. Raises ConfigError where the report does not have them."""
    if "requests" not in run:
        raise ConfigError("the report does not keep single requests; measure again with --details")
    requests = run["requests"]
    if any(request["stages"] is None or request["cached"] is None for request in requests):
        raise ConfigError(
            "the report's server does not tell the stages of a request; calibrate with a Headstart server"
        )
    shared = _shared(requests)
    return [_seen(request, shared[request["group"]]) for request in requests]


def _seen(request: dict[str, Any], shared_len: int) -> Seen:
    stages = request["stages"]
    times = np.concatenate([_spaced(request["arrivals"], index) for index in range(len(request["arrivals"]))])
    return Seen(
        group=request["group"],
        sent=request["sent"],
        times=times,
        queue_s=stages["queue"],
        prefill_s=stages["prefill"],
        first_step_s=stages["first_step"],
        prompt_len=request["prompt_len"],
        num_computed=max(0, request["prompt_len"] - 1 - request["cached"]),
        shared_len=min(shared_len, request["prompt_len"]),
        is_remote=bool(request["bytes_moved"]),
        bytes_moved=request["bytes_moved"] or 0,
    )


def _spaced(arrivals: list[list[float]], index: int) -> Floats:
    """Tokens that were read together, spread over the time since the read before."""
    at_s, num_tokens = arrivals[index]
    before_s = arrivals[index - 1][0] if index else at_s
    return before_s + (at_s - before_s) * np.arange(1, num_tokens + 1) / num_tokens


def _shared(requests: list[dict[str, Any]]) -> dict[int, int]:
    """Group -> tokens that its prompts have in common: the least that a later first turn found sent before."""
    lengths: dict[int, list[int]] = {request["group"]: [] for request in requests}
    for request in requests:
        if request["turn"] == 0:
            lengths[request["group"]].append(request["possible_len"] or 0)
    return {group: min(found[1:], default=0) for group, found in lengths.items()}


# ---- decode steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gaps:
    """Decode steps, once for each answer that got a token of it. All [num_gaps]."""

    seconds: Floats
    rows: Floats
    new_tokens: Floats  # prompt tokens computed along with the rows included
    unique_tokens: Floats
    pair_tokens: Floats
    busy: Floats  # share of the gap in which a prefill worker was at work


def gaps_of(requests: list[Seen]) -> Gaps:
    """Of one run. A prompt that the decode worker computed is taken to be of the step that brought its first token."""
    answers = [request for request in requests if len(request.times) > 1]
    found = [gap for request in answers for gap in _gaps_of(request, requests)]
    columns = np.array(found, dtype=np.float64).reshape(-1, 6)
    return Gaps(*columns.T)


def _gaps_of(request: Seen, requests: list[Seen]) -> list[tuple[float, ...]]:
    times = request.times
    step_s = float(np.median(np.diff(times)))
    near_s = SAME_STEP * step_s
    around = [
        other for other in requests if other.times[0] < times[-1] + near_s and other.times[-1] > times[0] - near_s
    ]
    calls = [other.called for other in requests if other.is_remote]
    return [
        (float(end - begin), *_step(around, end, near_s, step_s), _overlap(calls, float(begin), float(end)))
        for begin, end in pairwise(times)
    ]


def _step(around: list[Seen], end: float, near_s: float, step_s: float) -> tuple[float, float, float, float]:
    """Rows, new tokens, unique tokens and pairs of the step whose tokens came at `end`."""
    rows = new_tokens = context = pairs = 0.0
    shared: dict[int, list[int]] = {}
    for other in around:
        if other.times[0] > end + near_s or other.times[-1] < end - near_s:
            continue
        length = other.prompt_len + int(np.searchsorted(other.times, end - near_s))
        rows += 1
        new_tokens += 1
        context += length
        pairs += length
        shared.setdefault(other.group, []).append(other.shared_len)
        if not other.is_remote and abs(other.times[0] - end) <= near_s:
            new_tokens += other.num_computed
            pairs += other.num_computed * (other.prompt_len - other.num_computed / 2)
    context -= sum((len(lengths) - 1) * min(lengths) for lengths in shared.values())
    return rows, new_tokens, context, pairs


def _overlap(calls: list[tuple[float, float]], begin: float, end: float) -> float:
    """Share of [begin, end) that some call covers."""
    covered, reached = 0.0, begin
    for since, until in sorted(calls):
        low, high = max(since, reached), min(until, end)
        if high > low:
            covered += high - low
            reached = high
    return covered / (end - begin) if end > begin else 0.0


# ---- prefill calls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spells:
    """Times in which a prefill worker had one call or several that overlap: it works through all of them, whatever their
    order. All [num_spells]."""

    seconds: Floats
    new_tokens: Floats
    pair_tokens: Floats
    busy: Floats  # share of the spell in which the decode worker had rows to run


def spells_of(requests: list[Seen]) -> Spells:
    """Of one run."""
    answers = [(float(request.times[0]), float(request.times[-1])) for request in requests if len(request.times) > 1]
    found = []
    ended = float("-inf")
    for request in sorted((request for request in requests if request.is_remote), key=lambda request: request.called):
        begin, end = request.called
        if begin >= ended:
            found.append([begin, end, 0.0, 0.0])
        spell = found[-1]
        num_new = request.num_computed
        held = request.prompt_len - 1 - num_new
        spell[1] = ended = max(spell[1], end)
        spell[2] += num_new
        spell[3] += num_new * held + num_new * (num_new + 1) / 2
    rows = [(end - begin, tokens, pairs, _overlap(answers, begin, end)) for begin, end, tokens, pairs in found]
    return Spells(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)
