"""A Router inside an asyncio loop.

ZeroMQ's descriptor is edge-triggered and sending may swallow its edge, so the watch looks again after every send and
for as long as frames are pending, giving the loop a turn between batches.
"""

import asyncio
from collections.abc import Callable

from headstart.core.messages import Message
from headstart.wire.sockets import Router

OnMessage = Callable[[str, Message], None]


class RouterWatch:
    """Hands every (sender, message) to `on_message` in the loop's thread, from `start` until `stop`."""

    def __init__(self, router: Router, loop: asyncio.AbstractEventLoop, on_message: OnMessage) -> None:
        self._router = router
        self._loop = loop
        self._on_message = on_message
        self._running = False
        self._look_is_due = False

    def start(self) -> None:
        self._running = True
        self._loop.add_reader(self._router.fileno(), self._look)
        self._look_soon()

    def send(self, recipient: str, message: Message) -> bool:
        sent = self._router.send(recipient, message)
        self._look_soon()
        return sent

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._loop.remove_reader(self._router.fileno())

    def _look_soon(self) -> None:
        if self._running and not self._look_is_due:
            self._look_is_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_is_due = False
        if not self._running:
            return
        for sender, message in self._router.drain():
            self._on_message(sender, message)
        if self._router.pending:
            self._look_soon()
