"""When the tokens that a worker has produced reach its gateways, which were not bothered with them yet.

They are sent when that can make a difference: before the last word on their choice, before the gateway looks at what it
has received, and before the worker's end. What they change at a gateway until then is looked at by nobody. Which tokens
they are is read from their choice's sequence, and only then.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from headstart.core.errors import InvariantError
from headstart.core.messages import Accepted, Failed, Finished, Message, TokenDelta, Tokens
from headstart.core.request import ChoiceRef
from headstart.core.sequence import Sequence
from headstart.sim.clock import VirtualClock

SendLate = Callable[[str, TokenDelta, Series[float]], None]
"""(recipient, tokens, arrivals): of one choice, each with its time."""
Find = Callable[[ChoiceRef], Sequence]
"""The tokens of a choice that was accepted just now."""


@dataclass(slots=True)
class Outputs:
    """Of one open choice, from output `first` on: when each arrives at `recipient`."""

    recipient: str
    sequence: Sequence
    first: int
    arrivals: list[float] = field(default_factory=list)


class DeferredOutput:
    """Stands before a worker's way to its gateways, on which every message takes `delay_s`."""

    def __init__(
        self, clock: VirtualClock, delay_s: float, send: Callable[[str, Message], None], send_late: SendLate
    ) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self._send = send
        self._send_late = send_late
        self._find: Find | None = None
        self._outputs: dict[ChoiceRef, Outputs] = {}  # of every open choice, from Accepted to its last word

    def read_from(self, find: Find) -> None:
        """To be called before anything is sent."""
        self._find = find

    def send(self, recipient: str, message: Message) -> None:
        """Satisfies `scheduler.protocol.Send`. Tokens with logprobs are sent as they come."""
        if isinstance(message, Tokens):
            self._take(recipient, message)
            return
        if isinstance(message, Accepted):
            self._open(recipient, message.ref)
        elif isinstance(message, (Finished, Failed)):
            outputs = self._outputs.pop(message.ref, None)
            if outputs is not None:
                self._flush(message.ref, outputs, len(outputs.arrivals))
        self._send(recipient, message)

    def _open(self, recipient: str, ref: ChoiceRef) -> None:
        """A repeated Submit is answered with Accepted once more."""
        assert self._find is not None
        if ref not in self._outputs:
            sequence = self._find(ref)
            self._outputs[ref] = Outputs(recipient, sequence, sequence.num_outputs)

    def _take(self, recipient: str, message: Tokens) -> None:
        self.add((delta.ref for delta in message.deltas if not delta.logprobs), (self._clock.now(),))
        worded = tuple(delta for delta in message.deltas if delta.logprobs)
        if worded:
            self._send(recipient, Tokens(worded))

    def add(self, refs: Iterable[ChoiceRef], sent_at: Series[float]) -> None:
        """Each of these choices has an output more for each of these times."""
        arrivals = [time_s + self._delay_s for time_s in sent_at]
        for ref in refs:
            self._outputs[ref].arrivals += arrivals

    def flush(self, arriving_by: float) -> None:
        """Send what arrives by then. The sequences must have all outputs that were added."""
        for ref, outputs in self._outputs.items():
            self._flush(ref, outputs, bisect_right(outputs.arrivals, arriving_by))

    def _flush(self, ref: ChoiceRef, outputs: Outputs, count: int) -> None:
        """The first `count` of them."""
        if not count:
            return
        first, arrivals = outputs.first, outputs.arrivals
        if first + count > outputs.sequence.num_outputs:
            raise InvariantError(f"{ref} is about to send outputs that it does not have yet")
        outputs.first, outputs.arrivals = first + count, arrivals[count:]
        delta = TokenDelta(ref, first, outputs.sequence.outputs(first, first + count))
        self._send_late(outputs.recipient, delta, arrivals[:count])
