"""Clients that read text: token k says one letter, and stop strings end an answer at the gateway, as for real clients."""

from collections.abc import Callable, Iterable
from functools import partial

from headstart.core.messages import Failed, Finished, TokenDelta
from headstart.core.request import Request
from headstart.gateway.stream import ChoiceOutput, ChoiceStream, Event, Failure, StopRules
from headstart.sim.client import Handle
from headstart.sim.world import World

NUM_LETTERS = 26


def letter(token: int) -> str:
    return chr(ord("a") + token % NUM_LETTERS)


class Letters:
    """Satisfies `text.detokenizer.Detokenizer`."""

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(letter, ids))

    def finish(self) -> str:
        return ""


class Reader:
    """Satisfies `gateway.choice_record.Sink`: the gateway's own stream between dispatcher and client. `handle` sees the same."""

    def __init__(self, handle: Handle, stops: tuple[str, ...], stop_worker: Callable[[], None]) -> None:
        self.handle = handle
        self.answer = ChoiceOutput()
        rules = StopRules(frozenset(handle.request.stop.stop_token_ids), frozenset(), stops)
        self._stream = ChoiceStream(handle.request.ref.choice, Letters(), rules, self._emit, stop_worker)

    def on_tokens(self, delta: TokenDelta) -> None:
        self.handle.on_tokens(delta)
        self._stream.on_tokens(delta)

    def on_finished(self, finished: Finished) -> None:
        self.handle.on_finished(finished)
        self._stream.on_finished(finished)

    def on_failed(self, failed: Failed) -> None:
        self.handle.on_failed(failed)
        self._stream.on_failed(failed)

    def _emit(self, event: Event) -> None:
        if not isinstance(event, Failure):
            self.answer.add(event)

    @property
    def text(self) -> str:
        return "".join(self.answer.text)


def submit_text(world: World, request: Request, stops: tuple[str, ...]) -> Reader:
    """Submit for a client that reads text, which ends at the first of `stops`."""
    handle = Handle(request, world.clock, world.clock.now())
    reader = Reader(handle, stops, partial(world.stop, request.ref))
    world.submit_to(handle, reader)
    return reader


def read(tokens: list[int], stops: tuple[str, ...], stop_ids: tuple[int, ...]) -> tuple[str, int]:
    """The text that `tokens` say up to the first stop string, and how many of them it takes to say it."""
    text = ""
    for taken, token in enumerate(tokens, start=1):
        text += "" if token in stop_ids else letter(token)
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], taken
    return text, len(tokens)
