"""Plays sessions against a client: closed loop by session, or open loop by due times."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from headstart.bench.api_backends import PromptInput
from headstart.bench.context import SessionContext, TextContext, TokenContext
from headstart.bench.errors import BenchError
from headstart.bench.records import Answer, RequestRecord, SentRequest
from headstart.bench.reuse import ReuseIndex, chain_of
from headstart.bench.workload import Session, TokenSource, Turn
from headstart.core.clock import Clock


class LoadClient(Protocol):
    """What Client does, as far as sessions need it."""

    @property
    def returns_ids(self) -> bool: ...

    async def generate(self, prompt: PromptInput, output_len: int) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent."""

    max_concurrency: int | None = None
    """Closed loop: sessions played at once, each with at most one request. Open loop: requests at once."""
    request_rate: float = math.inf
    """Closed loop: session starts per second, with exponential gaps."""
    open_loop: bool = False
    """Send each turn at its due time, though never before its predecessor was answered."""
    speed: float = 1.0
    """Divides delays and due times."""


@dataclass(frozen=True, slots=True)
class LoadEnvironment:
    """What a phase plays on."""

    client: LoadClient
    source: TokenSource
    reuse: ReuseIndex
    clock: Clock
    sleep: Callable[[float], Awaitable[None]]
    as_text: bool = False
    on_record: Callable[[RequestRecord], None] = lambda record: None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`num_unsent`: later turns of sessions that broke off."""

    records: tuple[RequestRecord, ...]
    began_s: float
    ended_s: float
    num_unsent: int = 0

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


async def play(sessions: Sequence[Session], pace: Pace, load_env: LoadEnvironment, rng: Random) -> LoadResult:
    """Send everything and wait for every answer."""
    continues = any(turn.keep != 0 for session in sessions for turn in session.turns[1:])
    if continues and not load_env.as_text and not load_env.client.returns_ids:
        raise BenchError("this server returns no token ids, which a continuing turn needs; use --prompt-format text")
    limit = pace.max_concurrency
    places: AbstractAsyncContextManager[object] = nullcontext() if limit is None else asyncio.Semaphore(limit)
    begin_s = start_s = load_env.clock.now()
    players = []
    for session in sessions:
        if not pace.open_loop and math.isfinite(pace.request_rate):
            start_s += rng.expovariate(pace.request_rate)
        players.append(SessionPlayer(session, pace, load_env, start_s))
    played = await asyncio.gather(*(player.play(places) for player in players))
    records = tuple(record for some in played for record in some)
    num_turns = sum(len(session.turns) for session in sessions)
    return LoadResult(records, begin_s, load_env.clock.now(), num_turns - len(records))


class SessionPlayer:
    """One session."""

    def __init__(self, session: Session, pace: Pace, load_env: LoadEnvironment, start_s: float) -> None:
        self._session = session
        self._pace = pace
        self._load_env = load_env
        self._start_s = start_s

    async def play(self, places: AbstractAsyncContextManager[object]) -> list[RequestRecord]:
        """Turn after turn, up to the first that fails. The context lives as long as that, not as long as the player."""
        source = self._load_env.source
        context: SessionContext = TextContext(source) if self._load_env.as_text else TokenContext(source)
        if self._pace.open_loop:
            return await self._play_open(context, places)
        await self._until(self._start_s)
        async with places:
            return await self._play_closed(context)

    async def _play_open(
        self, context: SessionContext, places: AbstractAsyncContextManager[object]
    ) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        for index, turn in enumerate(self._session.turns):
            due_s = self._start_s + (turn.due_s or 0.0) / self._pace.speed
            await self._until(due_s)
            async with places:
                records.append(await self._send(context, index, turn, due_s))
            if not records[-1].is_complete:
                break
        return records

    async def _play_closed(self, context: SessionContext) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        for index, turn in enumerate(self._session.turns):
            if turn.delay_s:
                await self._load_env.sleep(turn.delay_s / self._pace.speed)
            records.append(await self._send(context, index, turn, None))
            if not records[-1].is_complete:
                break
        return records

    async def _until(self, at_s: float) -> None:
        wait_s = at_s - self._load_env.clock.now()
        if wait_s > 0:
            await self._load_env.sleep(wait_s)

    async def _send(self, context: SessionContext, index: int, turn: Turn, due_s: float | None) -> RequestRecord:
        load_env = self._load_env
        request = SentRequest(self._session.name, index, self._session.group, turn.output_len)
        prompt = context.prompt(turn)
        if isinstance(prompt, list):
            chain = chain_of(prompt)
            request = replace(request, prompt_len=len(prompt), possible_len=load_env.reuse.longest(chain, len(prompt)))
            load_env.reuse.add(chain)
        answer = await load_env.client.generate(prompt, turn.output_len)
        context.answered(answer)
        if isinstance(prompt, list):
            computed = (prompt + list(answer.token_ids))[:-1]  # nobody computed the last token's KV
            load_env.reuse.add(chain_of(computed, chain))
        late_s = 0.0 if due_s is None else max(0.0, answer.sent_s - due_s)
        record = RequestRecord(replace(request, late_s=late_s), answer)
        load_env.on_record(record)
        return record
