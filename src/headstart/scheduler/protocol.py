"""How a worker's loop drives its scheduler. The loop, the simulator and the tests use nothing else.

One pass of the loop:

    for sender, message in inbox:        scheduler.handle(sender, message)
    for event in transport.poll():       scheduler.on_transfer(event)
    while (output := executor.poll()):   scheduler.update(output)
    wakeup = scheduler.advance()
    while fewer than executor.max_steps_in_flight steps are in flight and (batch := scheduler.schedule()):
        executor.launch(batch)

A scheduler talks to other processes only through the `Send` it was built with. Recipients and senders are names: a
gateway's, or `str(WorkerRef)` of a worker.
"""

from typing import Protocol

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, BatchOutput
from headstart.core.messages import Message, WorkerLoad
from headstart.core.request import Request
from headstart.transfer.contract import TransferEvent


class Drafter(Protocol):
    """Guesses how a text goes on. What it guesses changes how many tokens a step yields, and never which."""

    def propose(self, request: Request, tokens: Int32Array, max_tokens: int) -> Int32Array:
        """At most `max_tokens` tokens that may follow `tokens`, the request's prompt and outputs; empty without a guess."""
        ...


class Scheduler(Protocol):
    def handle(self, sender: str, message: Message) -> None:
        """Take a message. Unexpected, late and duplicate ones are counted and ignored."""
        ...

    def on_transfer(self, event: TransferEvent) -> None: ...

    def update(self, output: BatchOutput) -> None:
        """Apply the oldest step in flight, which has ended, to the entries and epochs that launched it."""
        ...

    def advance(self) -> float | None:
        """Work that time drives: deadlines, repeats, admission. Returns when to come back at the latest, or None."""
        ...

    def schedule(self) -> Batch | None:
        """The next step, or None if there is nothing to add to those in flight. Called only while there are fewer of them
        than the executor takes; the caller launches what it gets, in this order."""
        ...

    def load(self) -> WorkerLoad:
        """Queue lengths, page states and monotonic counters, cheap enough for every heartbeat."""
        ...
