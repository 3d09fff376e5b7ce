"""Sends one request, reads its stream, and notes when each part arrived."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any, Protocol

import httpx

from headstart.bench.api_backends import ApiBackend, Delta, PromptInput
from headstart.bench.errors import BenchError
from headstart.bench.records import Answer, Arrival, ReportedUsage
from headstart.bench.sse import DONE, EventParser
from headstart.core.clock import Clock


class PerfClock:
    """The machine's highest-resolution clock."""

    def now(self) -> float:
        return perf_counter()


class BadReply(Exception):
    """The server refused, or the connection failed."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a reply. `waited`: the network was waited for; otherwise they came along with the bytes before."""

    data: bytes
    waited: bool = True


class StreamTransport(Protocol):
    def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Read]:
        """Post `body` and yield the reply as the network brings it. Raises BadReply."""
        ...


class HttpTransport:
    """A StreamTransport over an httpx client whose base URL is the server's."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Read]:
        try:
            async with self._http.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    raise BadReply(f"HTTP {reply.status_code}: {text[:300]}")
                async for read in _with_waits(reply.aiter_raw()):
                    yield read
        except httpx.HTTPError as error:
            raise BadReply(f"{type(error).__name__}: {error}") from error


async def _with_waits(chunks: AsyncIterator[bytes]) -> AsyncIterator[Read]:
    """A client that was kept from its socket finds several chunks there, and httpx gives them out one by one. Those that
    come without a turn of the event loop were in one read; to time them apart would show latencies near 0."""
    loop = asyncio.get_running_loop()
    waited = True

    def turned() -> None:
        nonlocal waited
        waited = True

    turn = loop.call_soon(turned)
    async for chunk in chunks:
        turn.cancel()
        yield Read(chunk, waited)
        waited = False
        turn = loop.call_soon(turned)
    turn.cancel()


class Client:
    """One server, reached through its API."""

    def __init__(self, transport: StreamTransport, backend: ApiBackend, clock: Clock) -> None:
        self._transport = transport
        self._backend = backend
        self._clock = clock

    @property
    def returns_ids(self) -> bool:
        return self._backend.returns_ids

    async def generate(self, prompt: PromptInput, output_len: int) -> Answer:
        """Never raises for what the server does: an answer that failed says so in `error`."""
        body = self._backend.body(prompt, output_len)
        reader = AnswerReader(self._backend, self._clock.now())
        try:
            async for read in self._transport.stream(self._backend.path, body):
                reader.take(read, self._clock.now())
        except (BadReply, BenchError, ValueError) as error:
            return reader.answer(str(error) or type(error).__name__)
        return reader.answer("" if reader.is_done else "the stream ended without [DONE]")


class AnswerReader:
    """An answer under way. Tokens of one network read arrived together: they make one Arrival."""

    def __init__(self, backend: ApiBackend, sent_s: float) -> None:
        self.is_done = False
        self._reader = backend.reader()
        self._parser = EventParser()
        self._sent_s = sent_s
        self._arrivals: list[Arrival] = []
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._usage = ReportedUsage()

    def take(self, read: Read, now: float) -> None:
        num_tokens = 0
        for data in self._parser.feed(read.data):
            if data == DONE:
                self.is_done = True
                continue
            delta = self._reader.read(json.loads(data))
            num_tokens += delta.num_tokens
            self._keep(delta)
        if num_tokens and not read.waited and self._arrivals:
            earlier = self._arrivals.pop()
            self._arrivals.append(Arrival(earlier.at_s, earlier.num_tokens + num_tokens))
        elif num_tokens:
            self._arrivals.append(Arrival(now, num_tokens))

    def _keep(self, delta: Delta) -> None:
        self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._usage = merged(self._usage, delta.usage)

    def answer(self, error: str) -> Answer:
        arrivals, ids = tuple(self._arrivals), tuple(self._token_ids)
        return Answer(self._sent_s, arrivals, ids, "".join(self._text), self._usage, error)


def merged(older: ReportedUsage, newer: ReportedUsage) -> ReportedUsage:
    """Each field's last known value."""
    values = {}
    for field in fields(ReportedUsage):
        value = getattr(newer, field.name)
        values[field.name] = getattr(older, field.name) if value is None else value
    return ReportedUsage(**values)
