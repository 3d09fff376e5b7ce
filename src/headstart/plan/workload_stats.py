"""What a workload asks of its workers, counted from the requests themselves: prefixes met again, and what a batch shares.

A request's context is a path of pieces (see bench.workload), so shared prefixes are shared paths. Requests are taken in
the order of play and a batch is a run of neighbours. That leaves out everything that time decides; the simulation that
follows does not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from headstart.bench.workload import Piece, Session, stream_id
from headstart.gateway.policy import TOKENS_PER_CHOICE

NUM_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt as pieces, and its answer as the last one."""

    prompt: tuple[Piece, ...]
    answer: Piece

    @property
    def prompt_len(self) -> int:
        return _length(self.prompt)

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.answer.length

    def halfway(self) -> tuple[Piece, ...]:
        """Prompt and half of the answer: what a running request holds on average."""
        return (*self.prompt, Piece(self.answer.stream, 0, self.answer.length // 2))

    def whole(self) -> tuple[Piece, ...]:
        return (*self.prompt, self.answer)


@dataclass(slots=True)
class _Branch:
    """A run of tokens of one stream, and what was seen to follow it, by stream and start."""

    length: int = 0
    behind: dict[tuple[int, int], "_Branch"] = field(default_factory=dict)

    def split(self, head: Piece) -> None:
        """End after `head`, which it begins with; the rest follows."""
        rest = _Branch(self.length - head.length, self.behind)
        self.length, self.behind = head.length, {(head.stream, head.start + head.length): rest}


class PathIndex:
    """Which prefixes of pieces were seen, and how many distinct tokens they make."""

    def __init__(self) -> None:
        self._root = _Branch()

    def known(self, pieces: Iterable[Piece]) -> int:
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

    def add(self, pieces: Iterable[Piece]) -> int:
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


def _after(piece: Piece, num_tokens: int) -> Piece:
    return Piece(piece.stream, piece.start + num_tokens, piece.length - num_tokens)


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


def asks_of(sessions: Sequence[Session]) -> list[Ask]:
    """Every request, first turns first: in a closed loop the sessions go forward side by side."""
    rounds: list[list[Ask]] = []
    for session in sessions:
        context: tuple[Piece, ...] = ()
        for number, turn in enumerate(session.turns):
            prompt = _joined((*_kept(context, turn.keep), *turn.fresh))
            ask = Ask(prompt, Piece(stream_id("answer", session.name, number), 0, turn.output_len))
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(ask)
            context = ask.whole()
    return [ask for asks in rounds for ask in asks]


def prompt_work(asks: Sequence[Ask], num_workers: int, *, warm: Sequence[Ask] = ()) -> list[PromptWork]:
    """What prefill workers compute when requests go round them in turn and each keeps every prompt it computed.

    No worker holds an answer: decode workers generate those. `warm` was asked before and is not counted.
    """
    indexes = [PathIndex() for _ in range(num_workers)]
    work = []
    for number, ask in enumerate((*warm, *asks)):
        index = indexes[number % num_workers]
        known = min(index.known(ask.prompt), ask.prompt_len - 1)
        index.add(ask.prompt)
        work.append(PromptWork(ask.prompt_len - 1 - known, known))
    return work[len(warm) :]


def placed(asks: Sequence[Ask], num_workers: int, at_once: int) -> list[list[Ask]]:
    """Which decode worker gets which request when the gateway weighs held prefixes against the last `at_once` choices."""
    indexes = [PathIndex() for _ in range(num_workers)]
    places: list[list[Ask]] = [[] for _ in indexes]
    recent: list[int] = []
    loads = [0] * num_workers
    for number, ask in enumerate(asks):
        if number >= at_once:
            loads[recent[number - at_once]] -= 1
        prices = [
            TOKENS_PER_CHOICE * load - index.known(ask.prompt) for load, index in zip(loads, indexes, strict=True)
        ]
        chosen = prices.index(min(prices))
        indexes[chosen].add(ask.whole())
        places[chosen].append(ask)
        recent.append(chosen)
        loads[chosen] += 1
    return places


def delta_tokens(places: Sequence[Sequence[Ask]], *, warm: Sequence[Ask] = ()) -> float:
    """Mean prompt tokens that a decode worker lacks when it keeps everything it ever held. `warm` is not counted."""
    uncounted = frozenset(warm)
    missing = []
    for place in places:
        index = PathIndex()
        for ask in place:
            if ask not in uncounted:
                missing.append(ask.prompt_len - index.known(ask.prompt))
            index.add(ask.whole())
    return fmean(missing)


def held(asks: Sequence[Ask], num_rows: int, *, whole: bool) -> Held:
    """A batch of `num_rows` neighbours, the mean over windows spread evenly. `whole`: with their whole answers."""
    num_rows = min(num_rows, len(asks))
    each, unique = [], []
    for start in _starts(len(asks) - num_rows):
        paths = [ask.whole() if whole else ask.halfway() for ask in asks[start : start + num_rows]]
        index = PathIndex()
        each.append(sum(map(_length, paths)))
        unique.append(sum(map(index.add, paths)))
    return Held(num_rows, fmean(each), fmean(unique))


def _starts(last: int) -> list[int]:
    return sorted({round(last * number / (NUM_WINDOWS - 1)) for number in range(NUM_WINDOWS)})


def _kept(context: tuple[Piece, ...], keep: int | None) -> tuple[Piece, ...]:
    if keep is None:
        return context
    kept: list[Piece] = []
    for piece in context:
        if keep <= 0:
            break
        kept.append(Piece(piece.stream, piece.start, min(piece.length, keep)))
        keep -= piece.length
    return tuple(kept)


def _joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same tokens, with neighbours that go on in one stream made one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.stream, last.start + last.length) == (piece.stream, piece.start):
            joined[-1] = Piece(last.stream, last.start, last.length + piece.length)
        else:
            joined.append(piece)
    return tuple(joined)


def _length(pieces: Iterable[Piece]) -> int:
    return sum(piece.length for piece in pieces)
