"""What a session has said so far, as token ids or as text."""

from typing import Protocol

from headstart.bench.api_backends import PromptInput
from headstart.bench.records import Answer
from headstart.bench.text import word
from headstart.bench.workload import TokenSource, Turn


class SessionContext(Protocol):
    def prompt(self, turn: Turn) -> PromptInput:
        """What the context keeps, with the turn's fresh tokens behind it. That becomes the context."""
        ...

    def answered(self, answer: Answer) -> None: ...


class TokenContext:
    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.tokens: list[int] = []

    def prompt(self, turn: Turn) -> list[int]:
        self.tokens = self.tokens[: turn.keep] + self._source.tokens(turn.fresh)
        return self.tokens

    def answered(self, answer: Answer) -> None:
        self.tokens = self.tokens + list(answer.token_ids)


class TextContext:
    """A word per fresh token. An answer's text stands for all its tokens, so that lengths still count tokens."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._words: list[str] = []

    def prompt(self, turn: Turn) -> str:
        self._words = self._words[: turn.keep] + [word(token_id) for token_id in self._source.tokens(turn.fresh)]
        return "".join(self._words)

    def answered(self, answer: Answer) -> None:
        num_tokens = sum(arrival.num_tokens for arrival in answer.arrivals)
        self._words += [answer.text] + [""] * (num_tokens - 1)
