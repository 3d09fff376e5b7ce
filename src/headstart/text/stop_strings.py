"""Ends a text at the first stop string, and holds back what may yet become one.

open ─► matched (a stop string appeared: everything after it is dropped)
  └───► finished (the text ended: what was held back is handed out)
"""


class StopMatcher:
    """`stops` are non-empty. The stop string itself is never part of the text handed out."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can no longer be part of a stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = min(((buffer.find(stop), -len(stop), stop) for stop in self._stops if stop in buffer), default=None)
        if found is not None:
            self._held, self.matched = "", found[2]
            return buffer[: found[0]]
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
