"""Outputs are said late, as those of their sequences, once each and with the times at which they arrive."""

from collections.abc import Sequence as Series

import numpy as np

from headstart.core.messages import Accepted, Finished, Message, TokenDelta, Tokens
from headstart.core.request import ChoiceRef, RequestStats
from headstart.core.sequence import Sequence
from headstart.sim.clock import NEVER, VirtualClock
from headstart.sim.deferred_output import DeferredOutput

DELAY_S = 0.5
REF = ChoiceRef("a")


class Desk:
    """One choice that was resumed with two outputs, and what is said of it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.said: list[Message | tuple[int, tuple[int, ...], list[float]]] = []
        self.sequence = Sequence(np.arange(5, dtype=np.int32), np.array([70, 71], dtype=np.int32))
        self.deferred = DeferredOutput(
            self.clock, DELAY_S, lambda recipient, message: self.said.append(message), self._late
        )
        self.deferred.read_from(lambda ref: self.sequence)
        self.deferred.send("gateway", Accepted(REF))
        self.said.clear()

    def _late(self, recipient: str, delta: TokenDelta, arrivals: Series[float]) -> None:
        self.said.append((delta.index, delta.token_ids, list(arrivals)))

    def step(self, token_id: int, logprobs: tuple[float, ...] = ()) -> None:
        self.clock.advance_to(self.clock.now() + 1.0)
        delta = TokenDelta(REF, self.sequence.num_outputs, (token_id,), logprobs)
        self.sequence.append(token_id)
        self.deferred.send("gateway", Tokens((delta,)))


def test_what_arrives_by_then_is_said_once_and_the_rest_later() -> None:
    desk = Desk()
    for token_id in (80, 81, 82):
        desk.step(token_id)
    assert not desk.said
    desk.deferred.flush(2.5)
    desk.deferred.flush(2.5)
    assert desk.said == [(2, (80, 81), [1.5, 2.5])]
    desk.deferred.flush(NEVER)
    assert desk.said[1:] == [(4, (82,), [3.5])]


def test_outputs_of_leaps_and_of_steps_are_of_one_row() -> None:
    desk = Desk()
    desk.step(80)
    desk.sequence.extend(np.array([81, 82], dtype=np.int32))
    desk.deferred.add([REF], [1.25, 1.75])
    desk.step(83)
    desk.deferred.flush(NEVER)
    assert desk.said == [(2, (80, 81, 82, 83), [1.5, 1.75, 2.25, 2.5])]


def test_the_last_word_comes_after_all_outputs_and_ends_it() -> None:
    desk = Desk()
    desk.step(80)
    finished = Finished(REF, "length", 3, RequestStats(), None)
    desk.deferred.send("gateway", finished)
    desk.deferred.flush(NEVER)
    assert desk.said == [(2, (80,), [1.5]), finished]


def test_accepted_twice_it_keeps_its_place() -> None:
    desk = Desk()
    desk.step(80)
    desk.deferred.send("gateway", Accepted(REF))
    desk.deferred.flush(NEVER)
    assert desk.said[1:] == [(2, (80,), [1.5])]


def test_tokens_with_logprobs_are_sent_as_they_come() -> None:
    desk = Desk()
    desk.step(80, logprobs=(-0.5,))
    (message,) = desk.said
    assert isinstance(message, Tokens)
    assert message.deltas[0].token_ids == (80,)
    desk.deferred.flush(NEVER)
    assert len(desk.said) == 1
