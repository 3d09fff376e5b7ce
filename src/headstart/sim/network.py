"""Control sockets of a world: ordered per pair, delayed, and faulty on request.

A message to a name that nobody has is dropped, as by a router whose peer is gone. A faulted message may overtake
others or be overtaken.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headstart.core.messages import Message, Tokens
from headstart.sim.clock import Agenda, VirtualClock

Deliver = Callable[[str, Message], None]
"""(sender, message)."""


@dataclass(frozen=True, slots=True)
class MessageFate:
    num_copies: int = 1  # 0: lost, 2: duplicated
    delay_s: float = 0.0  # added to each copy's own way


FINE = MessageFate()
MessageJudge = Callable[[str, str, Message], MessageFate]
"""(sender, recipient, message)."""


class ControlNetwork:
    def __init__(self, rng: random.Random, clock: VirtualClock, agenda: Agenda, delay_s: tuple[float, float]) -> None:
        self.judge: MessageJudge | None = None  # without one every message is fine
        self.num_sent = 0
        self._rng = rng
        self._clock = clock
        self._agenda = agenda
        self._delay_s = delay_s
        self._endpoints: dict[str, Deliver] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}

    def attach(self, name: str, deliver: Deliver) -> None:
        self._endpoints[name] = deliver

    def detach(self, name: str) -> None:
        self._endpoints.pop(name, None)

    def send(self, sender: str, recipient: str, message: Message) -> None:
        self.num_sent += 1
        fate = FINE if self.judge is None else self.judge(sender, recipient, message)
        if fate is FINE:
            self._agenda.add(self._draw_arrival(sender, recipient), partial(self._deliver, sender, recipient, message))
            return
        for _ in range(fate.num_copies):
            arrival = self._clock.now() + self._draw_delay() + fate.delay_s
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

    def send_late(self, sender: str, recipient: str, tokens: Tokens, arrivals: Sequence[float]) -> None:
        """Tokens that arrive at these times, as one message; nobody judges it. What has arrived by now is delivered
        before this returns."""
        self.num_sent += 1
        if arrivals[-1] <= self._clock.now():
            self._deliver_late(sender, recipient, tokens, arrivals)
        else:
            self._agenda.add(arrivals[-1], partial(self._deliver_late, sender, recipient, tokens, arrivals))

    def _deliver_late(self, sender: str, recipient: str, tokens: Tokens, arrivals: Sequence[float]) -> None:
        self._clock.as_of(arrivals, partial(self._deliver, sender, recipient, tokens))

    def _deliver(self, sender: str, recipient: str, message: Message) -> None:
        if (deliver := self._endpoints.get(recipient)) is not None:
            deliver(sender, message)
