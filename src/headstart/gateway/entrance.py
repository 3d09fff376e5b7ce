"""Everything that reaches a dispatcher: clients on one side, workers and time on the other."""

from typing import Protocol

from headstart.core.errors import ErrorCode
from headstart.core.messages import Message
from headstart.core.request import Request
from headstart.gateway.choice import Sink
from headstart.gateway.flush import FlushDone


class Entrance(Protocol):
    """What `Dispatcher` does, and whatever stands in front of one."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: str, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None: ...

    def stop(self, request_id: str, choice_index: int) -> None: ...

    def flush(self, done: FlushDone) -> None: ...

    def handle(self, sender: str, message: Message) -> None: ...

    def advance(self) -> float | None: ...
