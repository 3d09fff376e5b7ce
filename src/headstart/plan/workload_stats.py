"""What a workload asks of its workers, counted from the requests themselves: prefixes met again, and what a batch shares.

A request's context is a path of pieces (see bench.workload), so shared prefixes are shared paths. Requests are taken in
the order of play and a batch is a run of neighbours. That leaves out everything that time decides; the simulation that
follows does not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from headstart.bench.workload import Session, TokenSpan, stream_id
from headstart.gateway.policy import TOKENS_PER_CHOICE

NUM_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: its prompt as pieces, and its answer as the last one."""

    prompt: tuple[TokenSpan, ...]
    answer: TokenSpan

    @property
    def prompt_len(self) -> int:
        return _length(self.prompt)

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.answer.length

    def halfway(self) -> tuple[TokenSpan, ...]:
        """Prompt and half of the answer: what a running request holds on average."""
        return (*self.prompt, TokenSpan(self.answer.stream, 0, self.answer.length // 2))

    def whole(self) -> tuple[TokenSpan, ...]:
        return (*self.prompt, self.answer)


@dataclass(slots=True)
class _Branch:
    """A run of tokens of one stream, and what was seen to follow it, by stream and start."""

    length: int = 0
    behind: dict[tuple[int, int], "_Branch"] = field(default_factory=dict)

    def split(self, head: TokenSpan) -> None:
        """End after `head`, which it begins with; the rest follows."""
        rest = _Branch(self.length - head.length, self.behind)
        self.length, self.behind = head.length, {(head.stream, head.start + head.length): rest}


class PathIndex:
    """Which prefixes of pieces were seen, and how many distinct tokens they make."""

    def __init__(self) -> None:
        self._root = _Branch()

    def known(self, pieces: Iterable[TokenSpan]) -> int:
        """Tokens of the longest seen prefix."""
        branch, known = self._root, 0
        for piece in pieces:
            while piece.length:
                following = branch.behind.get((piece.stream, piece.start))
                if following is None:
                    return known
                if following.length > piece.length:
                    return known + piece.length  # what the path goes on with is not the run's rest: paths are joined
                known += following.length
                branch, piece = following, _after(piece, following.length)
        return known

    def add(self, pieces: Iterable[TokenSpan]) -> int:
        """See a path. Returns the tokens that were new."""
        branch, new = self._root, 0
        for piece in pieces:
            while piece.length:
                key = piece.stream, piece.start
                following = branch.behind.get(key)
                if following is None:
                    following = branch.behind[key] = _Branch(piece.length)
                    new += piece.length
                elif following.length > piece.length:
                    following.split(piece)
                branch, piece = following, _after(piece, following.length)
        return new


def _after(piece: TokenSpan, num_tokens: int) -> TokenSpan:
    return TokenSpan(piece.stream, piece.start + num_tokens, piece.length - num_tokens)


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens of a batch: every row's own, and with what rows share counted once."""

    num_rows: int
    each: float
    unique: float


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a prefill worker computes for one request: `num_new` tokens behind `num_cached`."""

    num_new: int
    num_cached: int


def planned_requests(sessions: Sequence[Session]) -> list[PlannedRequest]:
    """Every request, first turns first: in a closed loop the sessions go forward side by side."""
    rounds: list[list[PlannedRequest]] = []
    for session in sessions:
        context: tuple[TokenSpan, ...] = ()
        for number, turn in enumerate(session.turns):
            prompt = _joined((*_kept(context, turn.keep), *turn.fresh))
            request = PlannedRequest(prompt, TokenSpan(stream_id("answer", session.name, number), 0, turn.output_len))
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(request)
            context = request.whole()
    return [request for requests in rounds for request in requests]


def prompt_work(
    requests: Sequence[PlannedRequest], num_workers: int, *, warm: Sequence[PlannedRequest] = ()
) -> list[PromptWork]:
    """What prefill workers compute when requests go round them in turn and each keeps every prompt it computed.

    No worker holds an answer: decode workers generate those. `warm` was sent before and is not counted.
    """
    indexes = [PathIndex() for _ in range(num_workers)]
    work = []
    for number, request in enumerate((*warm, *requests)):
        index = indexes[number % num_workers]
        known = min(index.known(request.prompt), request.prompt_len - 1)
        index.add(request.prompt)
        work.append(PromptWork(request.prompt_len - 1 - known, known))
    return work[len(warm) :]


def placed(requests: Sequence[PlannedRequest], num_workers: int, at_once: int) -> list[list[PlannedRequest]]:
    """Which decode worker gets which request when the gateway weighs held prefixes against the last `at_once` choices."""
    indexes = [PathIndex() for _ in range(num_workers)]
    places: list[list[PlannedRequest]] = [[] for _ in indexes]
    recent: list[int] = []
    loads = [0] * num_workers
    for number, request in enumerate(requests):
        if number >= at_once:
            loads[recent[number - at_once]] -= 1
        prices = [
            TOKENS_PER_CHOICE * load - index.known(request.prompt) for load, index in zip(loads, indexes, strict=True)
        ]
        chosen = prices.index(min(prices))
        indexes[chosen].add(request.whole())
        places[chosen].append(request)
        recent.append(chosen)
        loads[chosen] += 1
    return places


def delta_tokens(places: Sequence[Sequence[PlannedRequest]], *, warm: Sequence[PlannedRequest] = ()) -> float:
    """Mean prompt tokens that a decode worker lacks when it keeps everything it ever held. `warm` is not counted."""
    uncounted = frozenset(warm)
    missing = []
    for place in places:
        index = PathIndex()
        for request in place:
            if request not in uncounted:
                missing.append(request.prompt_len - index.known(request.prompt))
            index.add(request.whole())
    return fmean(missing)


def held(requests: Sequence[PlannedRequest], num_rows: int, *, whole: bool) -> Held:
    """A batch of `num_rows` neighbours, the mean over windows spread evenly. `whole`: with their whole answers."""
    num_rows = min(num_rows, len(requests))
    each, unique = [], []
    for start in _starts(len(requests) - num_rows):
        paths = [request.whole() if whole else request.halfway() for request in requests[start : start + num_rows]]
        index = PathIndex()
        each.append(sum(map(_length, paths)))
        unique.append(sum(map(index.add, paths)))
    return Held(num_rows, fmean(each), fmean(unique))


def _starts(last: int) -> list[int]:
    return sorted({round(last * number / (NUM_WINDOWS - 1)) for number in range(NUM_WINDOWS)})


def _kept(context: tuple[TokenSpan, ...], keep: int | None) -> tuple[TokenSpan, ...]:
    if keep is None:
        return context
    kept: list[TokenSpan] = []
    for piece in context:
        if keep <= 0:
            break
        kept.append(TokenSpan(piece.stream, piece.start, min(piece.length, keep)))
        keep -= piece.length
    return tuple(kept)


def _joined(pieces: Iterable[TokenSpan]) -> tuple[TokenSpan, ...]:
    """The same tokens, with neighbours that go on in one stream made one."""
    joined: list[TokenSpan] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.stream, last.start + last.length) == (piece.stream, piece.start):
            joined[-1] = TokenSpan(last.stream, last.start, last.length + piece.length)
        else:
            joined.append(piece)
    return tuple(joined)


def _length(pieces: Iterable[TokenSpan]) -> int:
    return sum(piece.length for piece in pieces)
