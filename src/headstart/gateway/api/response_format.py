"""The two APIs' bodies: chat messages and plain completions, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from headstart.gateway.api.response_bodies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    FinishedBy,
    TextCompletion,
    TokenText,
    Usage,
)
from headstart.gateway.stream import ChoiceOutput, Done, TextChunk, TokenLogprob
from headstart.text.tokenizer import TextTokenizer

ChunkUsage = Usage | None | UnsetType
"""A chunk's usage: none of it, null as OpenAI sends it before the last one, or the counts so far."""


@dataclass(frozen=True, slots=True)
class ResponseEnvelope:
    """What every body of one response has in common."""

    response_id: str
    created: int
    model: str
    prompts: tuple[list[int], ...]
    num_choices: int
    return_token_ids: bool
    with_logprobs: bool

    def token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self.return_token_ids else UNSET

    def prompt_ids(self, choice: int, *, opens: bool) -> list[int] | UnsetType:
        """The prompt's ids come with a choice's first part only."""
        return self.prompts[choice // self.num_choices] if self.return_token_ids and opens else UNSET


class ResponseFormat(Protocol):
    """Turns answers into bodies."""

    def full(self, answers: Sequence[ChoiceOutput], usage: Usage) -> Struct: ...

    def opening(self, choice: int, usage: ChunkUsage) -> Struct | None:
        """The chunk before a choice's first text, if the API has one."""
        ...

    def chunk(self, chunk: TextChunk, usage: ChunkUsage, *, opens: bool) -> Struct:
        """`opens`: this is the choice's first part with tokens."""
        ...

    def end(self, end: Done, usage: ChunkUsage) -> Struct: ...

    def usage(self, usage: Usage) -> Struct:
        """The chunk after the last choice has ended."""
        ...


class ChatFormat:
    """Chat completions."""

    def __init__(self, envelope: ResponseEnvelope, tokenizer: TextTokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def full(self, answers: Sequence[ChoiceOutput], usage: Usage) -> Struct:
        envelope = self._envelope
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(
            id=envelope.response_id, created=envelope.created, model=envelope.model, choices=choices, usage=usage
        )

    def opening(self, choice: int, usage: ChunkUsage) -> Struct | None:
        return self._chunk([ChatChunkChoice(index=choice, delta=ChatDelta("assistant", ""))], usage)

    def chunk(self, chunk: TextChunk, usage: ChunkUsage, *, opens: bool) -> Struct:
        choice = ChatChunkChoice(
            index=chunk.choice,
            delta=ChatDelta(content=chunk.text),
            logprobs=self._logprobs(chunk.logprobs),
            token_ids=self._envelope.token_ids(chunk.token_ids),
            prompt_token_ids=self._envelope.prompt_ids(chunk.choice, opens=opens),
        )
        return self._chunk([choice], usage)

    def end(self, end: Done, usage: ChunkUsage) -> Struct:
        reason = _finished_by(end)
        choice = ChatChunkChoice(index=end.choice, delta=ChatDelta(), finish_reason=reason, stop_reason=end.stop_reason)
        return self._chunk([choice], usage)

    def usage(self, usage: Usage) -> Struct:
        return self._chunk([], usage)

    def _choice(self, index: int, answer: ChoiceOutput) -> ChatChoice:
        assert answer.end is not None
        return ChatChoice(
            index=index,
            message=AnswerMessage("".join(answer.text)),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=_finished_by(answer.end),
            stop_reason=answer.end.stop_reason,
            token_ids=self._envelope.token_ids(answer.token_ids),
            prompt_token_ids=self._envelope.prompt_ids(index, opens=True),
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        envelope = self._envelope
        return ChatChunk(
            id=envelope.response_id, created=envelope.created, model=envelope.model, choices=choices, usage=usage
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self._envelope.with_logprobs:
            return None
        return ChatLogprobs([self._token_logprob(entry) for entry in entries if not entry.ends])

    def _token_logprob(self, entry: TokenLogprob) -> ChatTokenLogprob:
        best = [TokenText(*self._token(token_id, logprob)) for token_id, logprob in entry.top]
        return ChatTokenLogprob(*self._token(entry.token_id, entry.logprob), best)

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), logprob, list(data)


class CompletionFormat:
    """Plain completions."""

    def __init__(self, envelope: ResponseEnvelope, tokenizer: TextTokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def full(self, answers: Sequence[ChoiceOutput], usage: Usage) -> Struct:
        return self._body([self._choice(index, answer) for index, answer in enumerate(answers)], usage)

    def opening(self, choice: int, usage: ChunkUsage) -> Struct | None:
        return None

    def chunk(self, chunk: TextChunk, usage: ChunkUsage, *, opens: bool) -> Struct:
        choice = CompletionChoice(
            index=chunk.choice,
            text=chunk.text,
            logprobs=self._logprobs(chunk.logprobs),
            token_ids=self._envelope.token_ids(chunk.token_ids),
            prompt_token_ids=self._envelope.prompt_ids(chunk.choice, opens=opens),
        )
        return self._body([choice], usage)

    def end(self, end: Done, usage: ChunkUsage) -> Struct:
        reason = _finished_by(end)
        return self._body(
            [CompletionChoice(index=end.choice, text="", finish_reason=reason, stop_reason=end.stop_reason)], usage
        )

    def usage(self, usage: Usage) -> Struct:
        return self._body([], usage)

    def _choice(self, index: int, answer: ChoiceOutput) -> CompletionChoice:
        assert answer.end is not None
        return CompletionChoice(
            index=index,
            text="".join(answer.text),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=_finished_by(answer.end),
            stop_reason=answer.end.stop_reason,
            token_ids=self._envelope.token_ids(answer.token_ids),
            prompt_token_ids=self._envelope.prompt_ids(index, opens=True),
        )

    def _body(self, choices: list[CompletionChoice], usage: ChunkUsage) -> TextCompletion:
        envelope = self._envelope
        return TextCompletion(
            id=envelope.response_id, created=envelope.created, model=envelope.model, choices=choices, usage=usage
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self._envelope.with_logprobs:
            return None
        return CompletionLogprobs(
            [self._text(entry.token_id) for entry in entries],
            [entry.logprob for entry in entries],
            [self._top(entry) for entry in entries],
            [entry.text_offset for entry in entries],
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the sampled one whether or not it is among them."""
        best = {self._text(token_id): logprob for token_id, logprob in entry.top}
        return best | {self._text(entry.token_id): entry.logprob}

    def _text(self, token_id: int) -> str:
        """A token's text; part of a character as `bytes:\\xe2\\x82`, so that different tokens stay different."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finished_by(end: Done) -> FinishedBy:
    reason: Literal["stop", "length"] = "length" if end.finish_reason == "length" else "stop"
    return reason
