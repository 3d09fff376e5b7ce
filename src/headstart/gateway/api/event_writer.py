"""A response as server-sent events: what came together goes out in one piece."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from msgspec import UNSET, Struct, json

from headstart.gateway.api import sse
from headstart.gateway.api.errors import error_body
from headstart.gateway.api.prepared import Prepared
from headstart.gateway.api.response_format import ChunkUsage
from headstart.gateway.api.usage import usage_so_far
from headstart.gateway.generation import Generation, all_choices
from headstart.gateway.request_metrics import RequestMetrics
from headstart.gateway.stream import ChoiceOutput, Done, Event, Failure, TextChunk

TEXT_MARK = "\0the text of a chunk\0"
"""Stands for the text where the bytes around it are found. No name of a model has control characters."""


async def stream(generation: Generation, prepared: Prepared, metrics: RequestMetrics) -> AsyncIterator[bytes]:
    """Server-sent events, those that came together in one piece."""
    writer = EventWriter(prepared, metrics)
    while events := await generation.next_events():
        if data := b"".join(map(writer.write, events)):
            yield data
        if writer.has_failed:
            return
    yield writer.finish()


class TextFrame(NamedTuple):
    """The bytes around the text of an event whose chunk has nothing else that changes."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, chunk: Struct) -> "TextFrame":
        """`chunk` has the text TEXT_MARK."""
        before, after = sse.event(chunk).split(json.encode(TEXT_MARK))
        return cls(before, after)

    def around(self, text: str) -> bytes:
        return self.before + json.encode(text) + self.after


class EventWriter:
    """Turns one response's events into its server-sent events."""

    def __init__(self, prepared: Prepared, metrics: RequestMetrics) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self._format = prepared.response_format
        self._answers: list[ChoiceOutput] = [ChoiceOutput() for _ in all_choices(prepared.spec)]
        self._opened: set[int] = set()
        self._frames: dict[int, TextFrame] = {}  # of the choices whose chunks have text alone
        self._num_tokens = 0
        self.has_failed = False

    def write(self, event: Event) -> bytes:
        """What an event adds to the stream; nothing for half a character."""
        self._metrics.observe(event)
        if isinstance(event, Failure):
            self.has_failed = True
            return sse.event(error_body(self._prepared.error(event)))
        answer = self._answers[event.choice]
        opens = not answer.token_ids
        answer.add(event)
        if (frame := self._frames.get(event.choice)) is not None and isinstance(event, TextChunk):
            return frame.around(event.text) if event.text else b""
        return self._open(event.choice) + self._body(event, opens=opens)

    def finish(self) -> bytes:
        """What comes after the last choice has ended."""
        if not self._prepared.output.include_usage:
            return sse.DONE
        return sse.event(self._format.usage(self._prepared.usage(self._answers))) + sse.DONE

    def _body(self, event: TextChunk | Done, *, opens: bool) -> bytes:
        if isinstance(event, Done):
            self._prepared.on_answer(self._answers[event.choice])
            return sse.event(self._format.end(event, self._chunk_usage()))
        self._num_tokens += len(event.token_ids)
        if not self._shows(event):
            return b""
        return sse.event(self._format.chunk(event, self._chunk_usage(), opens=opens and bool(event.token_ids)))

    def _open(self, choice: int) -> bytes:
        """The chunk before a choice's first one."""
        if choice in self._opened:
            return b""
        self._opened.add(choice)
        if self._is_text_alone:
            chunk = self._format.chunk(TextChunk(choice, TEXT_MARK, ()), self._chunk_usage(), opens=False)
            self._frames[choice] = TextFrame.of(chunk)
        opening = self._format.opening(choice, self._chunk_usage())
        return b"" if opening is None else sse.event(opening)

    @property
    def _is_text_alone(self) -> bool:
        """Whether the chunks of a choice differ in their text only."""
        output = self._prepared.output
        has_logprobs = self._prepared.spec.num_top_logprobs is not None
        return not (has_logprobs or output.return_token_ids or output.continuous_usage)

    def _chunk_usage(self) -> ChunkUsage:
        output = self._prepared.output
        if not output.include_usage:
            return UNSET
        return usage_so_far(self._prepared.spec, self._num_tokens) if output.continuous_usage else None

    def _shows(self, chunk: TextChunk) -> bool:
        """Whether a chunk has anything for the client: half a character has not."""
        return bool(chunk.text or chunk.logprobs or (self._prepared.output.return_token_ids and chunk.token_ids))
