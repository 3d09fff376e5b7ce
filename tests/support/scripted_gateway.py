"""An app over a real dispatcher whose decode worker is a script: the double stands at the message border.

Each submitted choice is answered by the world's `script`, a list of steps. Nothing runs by wall-clock time but the
dispatcher's own limits; `release` lets held choices go on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Flush,
    Flushed,
    Heartbeat,
    Join,
    Message,
    Rejected,
    Submit,
    TokenDelta,
    Tokens,
    WorkerLoad,
    WorkerRef,
)
from headstart.core.request import Request, RequestStats
from headstart.gateway.api.app import create_app
from headstart.gateway.api.auth import KeyRing
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.model import ModelBounds, ServedModel
from headstart.gateway.state import GatewayState, HttpLimits, OpenGenerations, Telemetry
from headstart.gateway.token_memory import TokenMemory
from headstart.observe.metrics import GatewayMetrics, WorkerCollector, WorkerSample
from headstart.text.chat_template import ChatTemplate
from tests.support.dispatchers import SPEC
from tests.support.small_tokenizers import CHATML, END, byte_level
from tests.support.steady import run_steadily

MODEL = "small"
CONTEXT = 512
STATS = RequestStats(cached_tokens=16, decode_prefix_len=16, bytes_moved=4096, miss_reason="diverged")


@dataclass
class Script:
    """How the worker answers one choice."""

    token_ids: list[int] = field(default_factory=list)
    ends_with_eos: bool = True
    reject: ErrorCode | None = None
    fail_after: int | None = None  # tokens, then Failed
    hold_after: int | None = None  # tokens, then nothing until cancelled
    pace_s: float = 0.0  # between tokens; 0: as fast as the loop turns


class LoopClock:
    """The time of the loop that everything here runs in."""

    def now(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:  # a world that is made before its loop
            return time.monotonic()


def saying(text: str, **kwargs) -> Script:
    return Script(byte_level().encode(text, add_special_tokens=False), **kwargs)


class ScriptedWorld:
    def __init__(
        self,
        keys: tuple[str, ...] | KeyRing = (),
        limits: HttpLimits | None = None,
        with_worker: bool = True,
        dispatch: DispatchLimits | None = None,
    ) -> None:
        self.script: Script | Callable[[Request], Script] = saying("Hello world.")
        self.requests: list[Request] = []
        self.cancelled: list[Cancel] = []
        self.flushes = 0
        self.loop_age_s = 0.0  # that the worker beats with
        self.worker = WorkerRef("decode-0", 1)
        clock = LoopClock()
        self.dispatcher = Dispatcher(clock, self._receive, Random(0), dispatch or DispatchLimits())
        tokenizer = byte_level()
        template = ChatTemplate(CHATML, tokenizer.named_special_tokens, lambda: None)
        registry = CollectorRegistry()
        self.memory = TokenMemory(tokenizer)
        self.state = GatewayState(
            model=ServedModel(MODEL, ModelBounds(380, CONTEXT, (END,)), tokenizer, template),
            dispatcher=self.dispatcher,
            calls=self.dispatcher,
            memory=self.memory,
            keys=keys if isinstance(keys, KeyRing) else KeyRing(keys),
            telemetry=Telemetry(GatewayMetrics(registry), registry, clock),
            generations=OpenGenerations(),
            rng=Random(1),
            limits=limits or HttpLimits(),
        )
        registry.register(WorkerCollector(self._samples))
        self.app: FastAPI = create_app(self.state)
        if with_worker:
            self.dispatcher.handle(str(self.worker), Join(self.worker, "decode", SPEC, "", CONTEXT))

    @asynccontextmanager
    async def client(self, **kwargs) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        driving = asyncio.create_task(self._drive())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", **kwargs) as client:
            yield client
        driving.cancel()

    async def _drive(self) -> None:
        while True:
            self.dispatcher.handle(
                f"hb:{self.worker}", Heartbeat(self.worker, self.loop_age_s, WorkerLoad(free_pages=9))
            )
            self.dispatcher.advance()
            await asyncio.sleep(0.02)

    def _samples(self) -> list[WorkerSample]:
        records = self.dispatcher.registry.all()
        return [WorkerSample(record.ref.name, record.join.role, record.state.value, record.load) for record in records]

    def say_finished(self, request: Request) -> None:
        """End a choice that its script holds after one token."""
        self._say(Finished(request.ref, "length", 1, STATS))

    def _say(self, message: Message) -> None:
        self.dispatcher.handle(str(self.worker), message)

    def _receive(self, recipient: str, message: Message) -> None:
        match message:
            case Submit():
                self.requests.append(message.request)
                asyncio.get_running_loop().call_soon(self._play, message.request)
            case Cancel():
                self.cancelled.append(message)
                failed = Failed(message.ref, message.reason, "cancelled as asked", STATS)
                asyncio.get_running_loop().call_soon(self._say, failed)
            case Flush(flush_id):
                self.flushes += 1
                asyncio.get_running_loop().call_soon(self._say, Flushed(flush_id, True, 7))

    def _play(self, request: Request) -> None:
        script = self.script if isinstance(self.script, Script) else self.script(request)
        if script.reject is not None:
            self._say(Rejected(request.ref, script.reject, "rejected: a reason"))
            return
        self._say(Accepted(request.ref))
        token_ids = [*script.token_ids, *([END] if script.ends_with_eos and END in request.stop.stop_token_ids else [])]
        token_ids = token_ids[: request.stop.max_new_tokens]
        self._step(request, script, token_ids, 0)

    def _step(self, request: Request, script: Script, token_ids: list[int], index: int) -> None:
        if any(cancel.ref == request.ref for cancel in self.cancelled):
            return
        if script.fail_after == index:
            failed = Failed(request.ref, ErrorCode.INTERNAL, "secret: /etc/passwd line 3")
            asyncio.get_running_loop().call_later(0.05, self._say, failed)  # after what came before has been sent
            return
        if script.hold_after == index:
            return
        if index == len(token_ids):
            stopped = bool(token_ids) and token_ids[-1] in request.stop.stop_token_ids
            reason, stop_id = ("stop", token_ids[-1]) if stopped else ("length", None)
            self._say(Finished(request.ref, reason, index, STATS, stop_id))
            return
        logprobs, top = (), ()
        if request.num_top_logprobs is not None:
            logprobs = (-0.5,)
            top = (tuple((token_ids[index] + i, -0.5 - i) for i in range(request.num_top_logprobs)),)
        self._say(Tokens((TokenDelta(request.ref, index, (token_ids[index],), logprobs, top),)))
        asyncio.get_running_loop().call_later(script.pace_s, self._step, request, script, token_ids, index + 1)


def chat_body(content: str = "Hi", **kwargs) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **kwargs}


def completion_body(prompt="Hi", **kwargs) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 64, **kwargs}


def run(coroutine):
    return run_steadily(coroutine)
