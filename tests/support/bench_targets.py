"""A server played by the test, in virtual time: what it is sent, and what it says when."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from headstart.bench.api_backends import OpenAICompletions
from headstart.bench.client import BadReply, Client, Read
from headstart.bench.load_generator import LoadEnvironment
from headstart.bench.records import Answer, Arrival, ReportedUsage, RequestRecord, SentRequest
from headstart.bench.reuse import ReuseIndex
from headstart.bench.workload import TokenSource

SOURCE = TokenSource(1000, 30_000)


@dataclass
class VirtualTime:
    """A clock whose sleepers wake in order, each when nothing else has anything to do."""

    time: float = 100.0
    sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        waking = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.time + seconds, waking))
        await waking

    def run(self, work: Any) -> Any:
        async def go() -> Any:
            task = asyncio.ensure_future(work)
            while not task.done():
                for _ in range(20):
                    await asyncio.sleep(0)
                if self.sleepers and not task.done():
                    self.sleepers.sort(key=lambda sleeper: sleeper[0])
                    self.time, waking = self.sleepers.pop(0)
                    waking.set_result(None)
            return await task

        return asyncio.run(go())


def events(*bodies: Any) -> bytes:
    return b"".join(
        b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n" for body in bodies
    )


def token(*ids: int, text: str = "x") -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "token_ids": list(ids)}]}


def usage(prompt: int, output: int, **ours: int) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if ours:
        body |= {"prompt_tokens_details": {"cached_tokens": ours.pop("cached", 0)}, "headstart": ours}
    return {"choices": [], "usage": body}


@dataclass
class Server:
    """Answers every request with ids 1, 2, 3, ... a second apart, the first after two."""

    time: VirtualTime
    prompts: list[Any] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    fails: Callable[[int], bool] = lambda number: False

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Read]:
        self.prompts.append(body["prompt"])
        self.sent_at.append(self.time.now())
        number = len(self.prompts)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.time.sleep(1)
        self.at_once -= not body["max_tokens"]
        if self.fails(number):
            self.at_once -= 1
            raise BadReply("HTTP 500: no")
        for index in range(body["max_tokens"]):
            await self.time.sleep(1)
            yield Read(events(token(index + 1)))
        self.at_once -= 1
        yield Read(events(usage(len(body["prompt"]), body["max_tokens"]), b"[DONE]"), waited=False)


def load_env(server: Server, *, returns_ids: bool = True, as_text: bool = False) -> LoadEnvironment:
    client = Client(server, OpenAICompletions("m", returns_ids), server.time)
    return LoadEnvironment(client, SOURCE, ReuseIndex(), server.time, server.time.sleep, as_text)


class Script:
    """A transport that replays reads: (seconds until it comes, bytes, whether the network was waited for)."""

    def __init__(self, time: VirtualTime, *reads: tuple[float, bytes, bool]) -> None:
        self._time = time
        self._reads = reads

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Read]:
        for seconds, data, waited in self._reads:
            self._time.time += seconds
            yield Read(data, waited)


def record(
    *arrivals: tuple[float, int], sent: float = 0.0, asked: int | None = None, prompt: int = 10, **said: Any
) -> RequestRecord:
    """A complete answer; `asked` is the output length that was wanted, by default what arrived."""
    num = sum(count for _, count in arrivals)
    stated = {"prompt_tokens": prompt, "completion_tokens": num, **said}
    answer = Answer(sent, tuple(Arrival(at, count) for at, count in arrivals), usage=ReportedUsage(**stated))
    return RequestRecord(SentRequest("s", 0, 0, num if asked is None else asked, prompt_len=prompt), answer)
