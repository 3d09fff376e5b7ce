"""Tokens that a worker has produced and its gateways were not bothered with, each with the time at which it arrives.

They are sent when that can make a difference: before the last word on their choice, before the gateway looks at what it
has heard, and before the worker's end. What they change at a gateway until then is looked at by nobody.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headstart.core.messages import Failed, Finished, Message, TokenDelta, Tokens
from headstart.core.request import ChoiceRef
from headstart.sim.clock import VirtualClock

SendLate = Callable[[str, Tokens, Sequence[float]], None]
"""(recipient, tokens, arrivals): of one choice, each with its time."""


@dataclass(slots=True)
class Outputs:
    """Of one choice, from output `first` on, and when each arrives."""

    first: int
    token_ids: list[int]
    arrivals: list[float]


class Unsaid:
    """Stands before a worker's way to its gateways, on which every message takes `delay_s`."""

    def __init__(
        self, clock: VirtualClock, delay_s: float, send: Callable[[str, Message], None], send_late: SendLate
    ) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._send = send
        self._send_late = send_late
        self._outputs: dict[tuple[str, ChoiceRef], Outputs] = {}

    def send(self, recipient: str, message: Message) -> None:
        """Satisfies `scheduler.contract.Send`. Tokens with logprobs are sent as they come."""
        if isinstance(message, Tokens):
            plain = [delta for delta in message.deltas if not delta.logprobs]
            self.add(recipient, plain, (self._clock.now(),))
            if len(plain) < len(message.deltas):
                self._send(recipient, Tokens(tuple(delta for delta in message.deltas if delta.logprobs)))
            return
        if isinstance(message, Finished | Failed):
            outputs = self._outputs.pop((recipient, message.ref), None)
            if outputs is not None:
                self._say(recipient, message.ref, outputs)
        self._send(recipient, message)

    def add(self, recipient: str, deltas: Iterable[TokenDelta], sent_at: Sequence[float]) -> None:
        """Each delta has as many tokens as there are times."""
        arrivals = [time_s + self._delay_s for time_s in sent_at]
        for delta in deltas:
            key = recipient, delta.ref
            outputs = self._outputs.get(key)
            if outputs is None:
                self._outputs[key] = Outputs(delta.index, list(delta.token_ids), list(arrivals))
            else:
                outputs.token_ids += delta.token_ids
                outputs.arrivals += arrivals

    def say(self, arriving_by: float) -> None:
        """Send what arrives by then."""
        waiting, self._outputs = self._outputs, {}
        for (recipient, ref), outputs in waiting.items():
            count = bisect_right(outputs.arrivals, arriving_by)
            if count < len(outputs.arrivals):
                rest = Outputs(outputs.first + count, outputs.token_ids[count:], outputs.arrivals[count:])
                self._outputs[recipient, ref] = rest
            if count:
                said = Outputs(outputs.first, outputs.token_ids[:count], outputs.arrivals[:count])
                self._say(recipient, ref, said)

    def _say(self, recipient: str, ref: ChoiceRef, outputs: Outputs) -> None:
        delta = TokenDelta(ref, outputs.first, tuple(outputs.token_ids))
        self._send_late(recipient, Tokens((delta,)), outputs.arrivals)
