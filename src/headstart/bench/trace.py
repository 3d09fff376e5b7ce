"""Recorded traffic: lengths, times and block hashes from a file, turned into sessions.

Three formats, told apart by their fields: Mooncake's (one request a line, no sessions), the same with `session_id` (and
`delay_ms`, or none), and whole sessions a line whose requests say how many blocks they share with an earlier one.

Equal block hashes become equal tokens. Where a turn begins with all of the previous turn's blocks and is long enough for
its answer, it continues it: previous prompt + the server's own output + fresh tokens.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from headstart.bench.errors import BenchError
from headstart.bench.workload import Session, TokenSpan, Turn, Workload, stream_id

MOONCAKE_BLOCK_SIZE = 512
ASSUMED_TOKEN_S = 0.02
"""Seconds per output token inside a gap between turns whose file does not say how long the answer took."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. `hash_ids` may stop short of the prompt's end: what follows is the prompt's own."""

    at_s: float
    input_len: int
    output_len: int
    block_size: int
    hash_ids: tuple[int, ...]
    session: str = ""
    delay_s: float | None = None


def read_trace(path: Path) -> list[TraceRequest]:
    """Raises BenchError, naming the line, for a file that is none of the formats."""
    requests: list[TraceRequest] = []
    new_ids = count()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = _object(json.loads(line))
                requests.extend(_session_line(row, new_ids) if "requests" in row else [_request_line(row)])
            except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
                raise BenchError(f"{path.name}, line {number}: not a request of a known format ({error!r})") from error
    if not requests:
        raise BenchError(f"{path.name} holds no requests")
    return requests


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _request_line(row: dict[str, Any]) -> TraceRequest:
    delay_ms = row.get("delay_ms")
    return TraceRequest(
        at_s=_finite(row["timestamp"] / 1e3),
        input_len=_positive(row["input_length"]),
        output_len=_positive(row["output_length"]),
        block_size=_positive(row.get("block_size", MOONCAKE_BLOCK_SIZE)),
        hash_ids=tuple(row["hash_ids"]),
        session=str(row["session_id"]) if "session_id" in row else "",
        delay_s=None if delay_ms is None else _finite(delay_ms / 1e3),
    )


def _session_line(row: dict[str, Any], new_ids: Iterator[int]) -> Iterator[TraceRequest]:
    """Each agent of a recorded session is a session of its own; all share blocks as recorded."""
    block_size = _positive(row["block_size"])
    known: list[tuple[int, ...]] = []
    for request in row["requests"]:
        num_blocks = _positive(request["in"]) // block_size
        shared = known[request["share_with"]][: request["share_blocks"]] if request["share_with"] >= 0 else ()
        shared = shared[:num_blocks]
        known.append(shared + tuple(next(new_ids) for _ in range(num_blocks - len(shared))))
        yield TraceRequest(
            at_s=_finite(float(request["t"])),
            input_len=request["in"],
            output_len=_positive(request["out"] or 1),
            block_size=block_size,
            hash_ids=known[-1],
            session=f"{row['id']}.{request['agent']}",
            delay_s=_finite(float(request["think_time"] or 0)),  # a first request has none
        )


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value} where a positive whole number belongs")
    return value


def _finite(seconds: float) -> float:
    if not isfinite(seconds):
        raise ValueError(f"{seconds} where a time belongs")
    return seconds


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """A trace as a workload. The first `num_warmup` sessions are played before the sample begins."""

    name: str
    requests: tuple[TraceRequest, ...]
    num_warmup: int = 1
    num_sessions: int | None = None
    """Play this many sessions, in order of their first request. None: all."""
    context_len: int | None = None
    """Cut a session at its first request that needs more tokens, output included."""

    def build(self, seed: int) -> Workload:
        sessions = []
        for name, requests in self._grouped():
            turns = tuple(_turns(name, self._fitting(requests), seed))
            if turns:
                sessions.append(Session(name, turns))
            if self.num_sessions is not None and len(sessions) == self.num_sessions + self.num_warmup:
                break
        if len(sessions) <= self.num_warmup:
            raise BenchError(
                f"{self.name}: {len(sessions)} sessions fit; none is left after {self.num_warmup} warm-ups"
            )
        warmup, measured = sessions[: self.num_warmup], sessions[self.num_warmup :]
        return Workload("trace", tuple(map(_at_once, warmup)), tuple(_from_zero(measured)))

    def _grouped(self) -> Iterable[tuple[str, list[TraceRequest]]]:
        groups: dict[str, list[TraceRequest]] = {}
        for number, request in enumerate(self.requests):
            groups.setdefault(request.session or f"r{number}", []).append(request)
        for requests in groups.values():
            requests.sort(key=lambda request: request.at_s)
        return sorted(groups.items(), key=lambda item: item[1][0].at_s)

    def _fitting(self, requests: list[TraceRequest]) -> Iterator[TraceRequest]:
        for request in requests:
            if self.context_len is not None and request.input_len + request.output_len > self.context_len:
                return
            yield request


def _turns(name: str, requests: Iterable[TraceRequest], seed: int) -> Iterator[Turn]:
    previous: TraceRequest | None = None
    for number, request in enumerate(requests):
        keep = 0 if previous is None else kept_len(previous, request)
        yield Turn(
            fresh=tuple(_fresh(f"{name}.{number}", request, keep, seed)),
            output_len=request.output_len,
            keep=keep,
            delay_s=0.0 if previous is None else _delay(previous, request),
            due_s=request.at_s,
        )
        previous = request


def kept_len(previous: TraceRequest, request: TraceRequest) -> int:
    """Tokens of `previous`'s prompt and answer that `request` begins with."""
    shared = 0
    for mine, theirs in zip(previous.hash_ids, request.hash_ids, strict=False):
        if mine != theirs:
            break
        shared += 1
    whole_blocks = previous.input_len // previous.block_size  # a last partial block is hashed with what follows it
    context_len = previous.input_len + previous.output_len
    if shared >= whole_blocks and request.input_len > context_len:
        return context_len
    return min(shared * previous.block_size, previous.input_len, request.input_len - 1)


def _fresh(name: str, request: TraceRequest, keep: int, seed: int) -> Iterator[TokenSpan]:
    """Pieces of positions [keep, input_len): each block's own stream, then the request's own."""
    size = request.block_size
    known_len = min(len(request.hash_ids) * size, request.input_len)
    position = keep
    while position < known_len:
        end = min(position - position % size + size, known_len)
        block = request.hash_ids[position // size]
        yield TokenSpan(stream_id(seed, "block", block), position % size, end - position)
        position = end
    if position < request.input_len:
        yield TokenSpan(stream_id(seed, "tail", name), position, request.input_len - position)


def _delay(previous: TraceRequest, request: TraceRequest) -> float:
    if request.delay_s is not None:
        return request.delay_s
    return max(0.0, request.at_s - previous.at_s - ASSUMED_TOKEN_S * previous.output_len)


def _at_once(session: Session) -> Session:
    turns = tuple(Turn(t.fresh, t.output_len, t.keep, due_s=0.0) for t in session.turns)
    return Session(session.name, turns, session.group)


def _from_zero(sessions: list[Session]) -> Iterator[Session]:
    begin = min(turn.due_s or 0.0 for session in sessions for turn in session.turns)
    for session in sessions:
        turns = tuple(Turn(t.fresh, t.output_len, t.keep, t.delay_s, (t.due_s or 0.0) - begin) for t in session.turns)
        yield Session(session.name, turns, session.group)
