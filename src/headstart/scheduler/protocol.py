"""How a worker's loop drives its scheduler. The loop, the simulator and the tests use nothing else.

One pass of the loop:

    for sender, message in inbox:        scheduler.handle(sender, message)
    for event in transport.poll():       scheduler.on_transfer(event)
    if (output := executor.poll()):      scheduler.update(output)
    wakeup = scheduler.advance()
    if no step is in flight and (batch := scheduler.schedule()):   executor.launch(batch)

A scheduler talks to other processes only through the `Send` it was built with. Recipients and senders are names: a
gateway's, or `str(WorkerRef)` of a worker.
"""

from collections.abc import Callable
from typing import Protocol

from headstart.core.batch import Batch, BatchOutput
from headstart.core.messages import Message, WorkerLoad
from headstart.transfer.contract import TransferEvent

Send = Callable[[str, Message], None]
"""(recipient, message); never blocks, never raises for a peer that is gone."""


class Scheduler(Protocol):
    def handle(self, sender: str, message: Message) -> None:
        """Take a message. Unexpected, late and duplicate ones are counted and ignored."""
        ...

    def on_transfer(self, event: TransferEvent) -> None: ...

    def update(self, output: BatchOutput) -> None:
        """Apply the finished step to the entries and epochs that launched it."""
        ...

    def advance(self) -> float | None:
        """Work that time drives: deadlines, repeats, admission. Returns when to come back at the latest, or None."""
        ...

    def schedule(self) -> Batch | None:
        """The next step, or None. Called only while no step is in flight; the caller launches what it gets."""
        ...

    def load(self) -> WorkerLoad:
        """Queue lengths, page states and monotonic counters, cheap enough for every heartbeat."""
        ...
