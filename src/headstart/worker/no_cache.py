"""`--disable-radix-cache`: every request is served as one that may neither match nor leave anything in a cache."""

from dataclasses import dataclass

from msgspec import structs

from headstart.core.batch import Batch, BatchOutput
from headstart.core.messages import Message, Submit, WorkerLoad
from headstart.scheduler.protocol import Scheduler
from headstart.transfer.contract import TransferEvent


@dataclass(frozen=True, slots=True)
class UncachedScheduler:
    """A decode scheduler whose requests are all uncacheable. Its prefill calls are then uncacheable too."""

    inner: Scheduler

    def handle(self, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            message = structs.replace(message, request=structs.replace(message.request, cacheable=False))
        self.inner.handle(sender, message)

    def on_transfer(self, event: TransferEvent) -> None:
        self.inner.on_transfer(event)

    def update(self, output: BatchOutput) -> None:
        self.inner.update(output)

    def advance(self) -> float | None:
        return self.inner.advance()

    def schedule(self) -> Batch | None:
        return self.inner.schedule()

    def load(self) -> WorkerLoad:
        return self.inner.load()
