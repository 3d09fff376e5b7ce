"""How each kind of server is asked and answers: OpenAI completions, and SGLang's /generate."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from headstart.bench.errors import BenchError
from headstart.bench.records import NO_REPORTED_USAGE, ReportedUsage

Json = dict[str, Any]
PromptInput = list[int] | str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event added. `num_tokens`: as the server counts them, or 1 for an event with text where it does not."""

    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    usage: ReportedUsage = NO_REPORTED_USAGE


class Reader(Protocol):
    """Reads one answer's events in order."""

    def read(self, event: Json) -> Delta:
        """Raises BenchError for an event that reports an error."""
        ...


class ApiBackend(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def returns_ids(self) -> bool: ...

    def body(self, prompt: PromptInput, output_len: int) -> Json: ...

    def reader(self) -> Reader: ...


@dataclass(frozen=True, slots=True)
class OpenAICompletions:
    """POST /v1/completions. `returns_ids` asks for token ids in the answer, which not every server knows."""

    model: str
    returns_ids: bool
    temperature: float = 0.0
    path: str = "/v1/completions"

    def body(self, prompt: PromptInput, output_len: int) -> Json:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"return_token_ids": True} if self.returns_ids else body

    def reader(self) -> Reader:
        return CompletionsReader()


class CompletionsReader:
    def read(self, event: Json) -> Delta:
        if event.get("error"):
            raise BenchError(_message(event["error"]))
        delta = Delta()
        for choice in event.get("choices") or ():
            ids = tuple(choice.get("token_ids") or ())
            text = choice.get("text") or ""
            delta = Delta(len(ids) or int(bool(text)), ids, text)
        if usage := event.get("usage"):
            delta = replace(delta, usage=completion_usage(usage))
        return delta


def completion_usage(usage: Json) -> ReportedUsage:
    ours = usage.get("headstart") or {}
    return ReportedUsage(
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        decode_prefix_len=ours.get("decode_prefix_len"),
        bytes_moved=ours.get("bytes_moved"),
        stage_s=ours.get("stage_s"),
    )


@dataclass(frozen=True, slots=True)
class SGLangGenerate:
    """POST /generate: cumulative text, counts in `meta_info`."""

    temperature: float = 0.0
    path: str = "/generate"
    returns_ids: bool = True

    def body(self, prompt: PromptInput, output_len: int) -> Json:
        sampling = {"temperature": self.temperature, "max_new_tokens": output_len, "ignore_eos": True}
        name = "text" if isinstance(prompt, str) else "input_ids"
        return {name: prompt, "sampling_params": sampling, "stream": True}

    def reader(self) -> Reader:
        return GenerateReader()


class GenerateReader:
    """`output_ids` come cumulative from some versions and as increments from others: the count tells which."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_ids = 0
        self._text = ""

    def read(self, event: Json) -> Delta:
        if event.get("error"):
            raise BenchError(_message(event["error"]))
        meta = event.get("meta_info") or {}
        text = event.get("text") or ""
        total = meta.get("completion_tokens", self._num_tokens)
        fresh_text = text[len(self._text) :] if text.startswith(self._text) else text
        self._text = text if text.startswith(self._text) else self._text + text
        ids = tuple(event.get("output_ids") or ())
        fresh_ids = ids[self._num_ids :] if len(ids) == total else ids
        self._num_ids += len(fresh_ids)
        num_tokens, self._num_tokens = total - self._num_tokens, total
        usage = ReportedUsage(meta.get("prompt_tokens"), total, meta.get("cached_tokens"))
        return Delta(num_tokens, fresh_ids, fresh_text, usage)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
