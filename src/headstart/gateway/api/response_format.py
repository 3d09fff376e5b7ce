"""The two APIs' JSON: chat messages and plain completions, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.gateway.stream import ChoiceOutput, Done, TextChunk, TokenLogprob
from headstart.text.tokenizer import TextTokenizer

Json = dict[str, Any]


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

    def body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": None,
        }

    def token_ids(self, choice: int, token_ids: Sequence[int], *, opens: bool) -> Json:
        """The fields that `return_token_ids` adds to a choice; the prompt's come with its first part only."""
        if not self.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self.prompts[choice // self.num_choices]} if opens else {}
        return {"token_ids": list(token_ids), **prompt}


class ResponseFormat(Protocol):
    """Turns answers into bodies."""

    def full(self, answers: Sequence[ChoiceOutput]) -> Json: ...

    def opening(self, choice: int) -> Json | None:
        """The chunk before a choice's first chunk, if the API has one."""
        ...

    def chunk(self, chunk: TextChunk, *, opens: bool) -> Json:
        """`opens`: this is the choice's first chunk."""
        ...

    def end(self, end: Done) -> Json: ...

    def usage(self, usage: Json) -> Json: ...


class ChatFormat:
    def __init__(self, envelope: ResponseEnvelope, tokenizer: TextTokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def full(self, answers: Sequence[ChoiceOutput]) -> Json:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.end is not None
            message = {"role": "assistant", "content": "".join(answer.text), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    **_ending(answer.end),
                    **self._envelope.token_ids(index, answer.token_ids, opens=True),
                }
            )
        return self._envelope.body("chat.completion", choices)

    def opening(self, choice: int) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": choice, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, chunk: TextChunk, *, opens: bool) -> Json:
        return self._chunk(
            {
                "index": chunk.choice,
                "delta": {"content": chunk.text},
                "logprobs": self._logprobs(chunk.logprobs),
                "finish_reason": None,
                **self._envelope.token_ids(chunk.choice, chunk.token_ids, opens=opens),
            }
        )

    def end(self, end: Done) -> Json:
        return self._chunk({"index": end.choice, "delta": {}, "logprobs": None, **_ending(end)})

    def usage(self, usage: Json) -> Json:
        return self._envelope.body("chat.completion.chunk", []) | {"usage": usage}

    def _chunk(self, choice: Json) -> Json:
        return self._envelope.body("chat.completion.chunk", [choice])

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._envelope.with_logprobs:
            return None
        content = []
        for entry in entries:
            if entry.ends:
                continue
            top = [self._logprob(token_id, logprob) for token_id, logprob in entry.top]
            content.append({**self._logprob(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class CompletionFormat:
    def __init__(self, envelope: ResponseEnvelope, tokenizer: TextTokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def full(self, answers: Sequence[ChoiceOutput]) -> Json:
        choices = []
        for index, answer in enumerate(answers):
            assert answer.end is not None
            choices.append(
                {
                    "index": index,
                    "text": "".join(answer.text),
                    "logprobs": self._logprobs(answer.logprobs),
                    **_ending(answer.end),
                    **self._envelope.token_ids(index, answer.token_ids, opens=True),
                }
            )
        return self._envelope.body("text_completion", choices)

    def opening(self, choice: int) -> Json | None:
        return None

    def chunk(self, chunk: TextChunk, *, opens: bool) -> Json:
        choice = {
            "index": chunk.choice,
            "text": chunk.text,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": None,
            **self._envelope.token_ids(chunk.choice, chunk.token_ids, opens=opens),
        }
        return self._envelope.body("text_completion", [choice])

    def end(self, end: Done) -> Json:
        choice = {"index": end.choice, "text": "", "logprobs": None, **_ending(end)}
        return self._envelope.body("text_completion", [choice])

    def usage(self, usage: Json) -> Json:
        return self._envelope.body("text_completion", []) | {"usage": usage}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if not self._envelope.with_logprobs:
            return None
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

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


def _ending(end: Done) -> Json:
    return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
