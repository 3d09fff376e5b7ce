"""Server-sent events out of network chunks."""

from collections.abc import Iterator

DONE = b"[DONE]"


class EventParser:
    """Feed it bytes as they arrive; it yields the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()
