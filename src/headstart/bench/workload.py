"""What is asked of a server: sessions of turns, fixed by options and a seed before the first is sent.

A turn's prompt is the session's context so far (previous prompt + the server's own output) followed by fresh tokens, so
that KV of generated tokens can be reused. A workload of single requests is one of sessions with one turn.
"""

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WARMUP_OUTPUT_LEN = 32


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, start + length) of the endless random stream named by `stream`."""

    stream: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    fresh: tuple[TokenSpan, ...]
    output_len: int
    keep: int | None = None
    """Tokens of the context so far that the prompt begins with. None: all of them."""
    delay_s: float = 0.0
    """Closed loop: seconds between the previous answer's end and this request."""
    due_s: float | None = None
    """Open loop: seconds after the workload's begin."""


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    turns: tuple[Turn, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """`warmup` is played first and kept out of the sample."""

    name: str
    warmup: tuple[Session, ...]
    measured: tuple[Session, ...]


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens: uniform in [max(int(tokens * ratio), 1), tokens], or normal around `tokens` where `sd` is set."""

    tokens: int
    ratio: float = 1.0
    sd: float = 0.0

    def draw(self, rng: Random) -> int:
        if self.tokens == 0:
            return 0
        if self.sd:
            return max(1, round(rng.gauss(self.tokens, self.sd)))
        return rng.randint(max(int(self.tokens * self.ratio), 1), self.tokens)

    def scaled(self, divisor: float) -> "Length":
        if self.tokens == 0:
            return self
        return Length(max(1, round(self.tokens / divisor)), self.ratio, self.sd / divisor)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The semantics of SGLang's generated-shared-prefix data set, in exact token counts."""

    num_groups: int
    prompts_per_group: int
    system: Length
    question: Length
    output: Length
    num_turns: int = 1
    ordered: bool = False
    group_distribution: Literal["uniform", "zipf"] = "uniform"
    zipf_alpha: float = 1.0

    def build(self, seed: int) -> Workload:
        """One draw per group for the system prompt, per (prompt, turn) for the question, per prompt for the output.

        zipf: the group of a prompt is drawn anew, rank k with weight 1 / k^alpha; its questions stay as they were.
        """
        rng = Random(f"shared-prefix {seed}")
        systems = [TokenSpan(stream_id(seed, "system", g), 0, self.system.draw(rng)) for g in range(self.num_groups)]
        measured = []
        for number in range(self.num_groups * self.prompts_per_group):
            group = self._group(number, rng)
            name = f"g{group}-{number}"
            measured.append(self._session(name, group, systems[group], self.output.draw(rng), seed, rng))
        if not self.ordered:
            rng.shuffle(measured)
        short = [min(self.output.draw(rng), WARMUP_OUTPUT_LEN) for _ in systems]
        warmup = [
            self._session(f"warmup-g{group}", group, system, short[group], seed, rng, num_turns=1)
            for group, system in enumerate(systems)
        ]
        return Workload("shared-prefix", tuple(warmup), tuple(measured))

    def _group(self, number: int, rng: Random) -> int:
        if self.group_distribution == "uniform":
            return number // self.prompts_per_group
        weights = [1 / rank**self.zipf_alpha for rank in range(1, self.num_groups + 1)]
        return rng.choices(range(self.num_groups), weights)[0]

    def _session(
        self,
        name: str,
        group: int,
        system: TokenSpan,
        output_len: int,
        seed: int,
        rng: Random,
        num_turns: int | None = None,
    ) -> Session:
        turns = []
        for turn in range(num_turns or self.num_turns):
            question = TokenSpan(stream_id(seed, "question", name, turn), 0, self.question.draw(rng))
            pieces = (system, question) if turn == 0 else (question,)
            turns.append(Turn(tuple(piece for piece in pieces if piece.length), output_len))
        return Session(name, tuple(turns), group)


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations: `first` tokens open each, `fresh` are added in every later turn."""

    num_sessions: int
    num_turns: int
    first: Length
    fresh: Length
    output: Length
    delay_s: float = 0.0

    def build(self, seed: int) -> Workload:
        rng = Random(f"multi-turn {seed}")
        sessions = [self._session(f"s{number}", seed, rng) for number in range(self.num_sessions)]
        return Workload("multi-turn", (self._session("warmup", seed, rng),), tuple(sessions))

    def _session(self, name: str, seed: int, rng: Random) -> Session:
        turns = []
        for turn in range(self.num_turns):
            length = (self.fresh if turn else self.first).draw(rng)
            piece = TokenSpan(stream_id(seed, "turn", name, turn), 0, length)
            turns.append(Turn((piece,), self.output.draw(rng), delay_s=self.delay_s if turn else 0.0))
        return Session(name, tuple(turns))


@dataclass(frozen=True, slots=True)
class NoReuse:
    """Prompts that share nothing: what a cache costs where it cannot help."""

    num_prompts: int
    prompt: Length
    output: Length

    def build(self, seed: int) -> Workload:
        rng = Random(f"no-reuse {seed}")
        sessions = [self._session(f"p{number}", seed, rng) for number in range(self.num_prompts)]
        return Workload("no-reuse", (self._session("warmup", seed, rng),), tuple(sessions))

    def _session(self, name: str, seed: int, rng: Random) -> Session:
        piece = TokenSpan(stream_id(seed, "prompt", name), 0, self.prompt.draw(rng))
        return Session(name, (Turn((piece,), self.output.draw(rng)),))


def stream_id(*parts: int | str) -> int:
    """A stream's name as 64 bits, the same in every process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Turns pieces into token ids of [low, high): a counter hashed with splitmix64's finaliser, so any part of a stream
    comes without the parts before it."""

    low: int
    high: int

    def tokens(self, pieces: tuple[TokenSpan, ...]) -> list[int]:
        if not pieces:
            return []
        lengths = [piece.length for piece in pieces]
        streams = np.repeat(np.array([piece.stream for piece in pieces], np.uint64), lengths)
        positions = np.concatenate([np.arange(p.start, p.start + p.length, dtype=np.uint64) for p in pieces])
        mixed = _splitmix(streams + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
        ids: list[int] = (mixed % np.uint64(self.high - self.low) + np.uint64(self.low)).astype(np.int64).tolist()
        return ids


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
