"""Control sockets of a cluster: ordered per pair, delayed, and faulty on request.

A message to a name that nobody has is dropped, as by a router whose peer is gone. A faulted message may overtake
others or be overtaken.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headstart.core.messages import Message, TokenDelta, Tokens
from headstart.sim.clock import Agenda, VirtualClock

Deliver = Callable[[str, Message], None]
"""(sender, message)."""


@dataclass(frozen=True, slots=True)
class MessageFault:
    num_copies: int = 1  # 0: lost, 2: duplicated
    delay_s: float = 0.0  # added to each copy's own way


NO_FAULT = MessageFault()
MessageFaultInjector = Callable[[str, str, Message], MessageFault]
"""(sender, recipient, message)."""


@dataclass(slots=True, eq=False)
class LateTokens:
    """Tokens of one choice on their way, and when each arrives."""

    sender: str
    recipient: str
    delta: TokenDelta
    arrivals: Sequence[float]

    def take(self, count: int) -> "LateTokens":
        """Split off the first `count`."""
        ref, first, token_ids = self.delta.ref, self.delta.index, self.delta.token_ids
        taken = TokenDelta(ref, first, token_ids[:count])
        arrivals, self.arrivals = self.arrivals[:count], self.arrivals[count:]
        self.delta = TokenDelta(ref, first + count, token_ids[count:])
        return LateTokens(self.sender, self.recipient, taken, arrivals)


class ControlNetwork:
    def __init__(self, rng: random.Random, clock: VirtualClock, agenda: Agenda, delay_s: tuple[float, float]) -> None:
        self.injector: MessageFaultInjector | None = None  # without one every message is fine
        self.num_sent = 0
        self._rng = rng
        self._clock = clock
        self._agenda = agenda
        self._delay_s = delay_s
        self._endpoints: dict[str, Deliver] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._late: list[LateTokens] = []  # whose last token is on its way

    def attach(self, name: str, deliver: Deliver) -> None:
        self._endpoints[name] = deliver

    def detach(self, name: str) -> None:
        self._endpoints.pop(name, None)

    def send(self, sender: str, recipient: str, message: Message) -> None:
        self.num_sent += 1
        fault = NO_FAULT if self.injector is None else self.injector(sender, recipient, message)
        if fault is NO_FAULT:
            self._agenda.add(self._draw_arrival(sender, recipient), partial(self._deliver, sender, recipient, message))
            return
        for _ in range(fault.num_copies):
            arrival = self._clock.now() + self._draw_delay() + fault.delay_s
            self._agenda.add(arrival, partial(self._deliver, sender, recipient, message))

    def _draw_arrival(self, sender: str, recipient: str) -> float:
        """Not before the last one on the same way. With one delay for all that holds by itself, but for what a client says
        while `as_of` sets the clock back for it: that may overtake words on others' choices."""
        low, high = self._delay_s
        if low == high:
            return self._clock.now() + low
        way = sender, recipient
        arrival = max(self._clock.now() + self._draw_delay(), self._last_arrival.get(way, 0.0))
        self._last_arrival[way] = arrival
        return arrival

    def _draw_delay(self) -> float:
        low, high = self._delay_s
        return low if low == high else self._rng.uniform(low, high)

    def send_late(self, sender: str, recipient: str, delta: TokenDelta, arrivals: Sequence[float]) -> None:
        """Tokens that arrive at these times; no fault befalls them. They are handed out together with the last one, or before
        this returns if that has arrived: until then see `hand_out_arrived`."""
        self.num_sent += 1
        late = LateTokens(sender, recipient, delta, arrivals)
        if arrivals[-1] <= self._clock.now():
            self._hand_out(late)
        else:
            self._late.append(late)
            self._agenda.add(arrivals[-1], partial(self._arrived, late))

    def hand_out_arrived(self) -> None:
        """Hand out what has arrived by now, but for the last tokens, which come by themselves."""
        now = self._clock.now()
        for late in self._late:
            if num_arrived := bisect_right(late.arrivals, now, 0, len(late.arrivals) - 1):
                self._hand_out(late.take(num_arrived))

    def _arrived(self, late: LateTokens) -> None:
        self._late.remove(late)
        self._hand_out(late)

    def _hand_out(self, late: LateTokens) -> None:
        tokens = Tokens((late.delta,))
        self._clock.as_of(late.arrivals, partial(self._deliver, late.sender, late.recipient, tokens))

    def _deliver(self, sender: str, recipient: str, message: Message) -> None:
        if (deliver := self._endpoints.get(recipient)) is not None:
            deliver(sender, message)
