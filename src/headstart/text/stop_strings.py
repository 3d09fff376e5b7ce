"""Ends a text at the first stop string, and holds back what may yet become one.

open ─► matched (a stop string is complete: everything after it is dropped)
  └───► finished (the text ended: what was held back is handed out)

The text is read character by character, so nothing depends on how it is cut into pieces: the stop string that is
complete first ends it, and of those that end with the same character the longest. Reading is linear (Aho and Corasick,
"Efficient string matching", 1975): a state is the longest end of the text that begins a stop string.
"""

from collections import deque


class StopStrings:
    """The compiled form of some non-empty stop strings, shared by all choices of a request. Immutable once built."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.starts = frozenset(string[0] for string in strings)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        self._shorter = [0]  # state of the longest proper end of a state that begins a stop string too
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character; 0 is the first."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._shorter[state]
        return self._next[state][char]

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may yet become a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str | None:
        """The longest stop string that is complete in this state."""
        return self._found[state]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
                self._shorter.append(0)
            state = self._next[state][char]
        self._found[state] = string

    def _link(self) -> None:
        """Set the shorter state of each state, breadth first: those of a state's parents are known by then."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._shorter[child] = self.step(self._shorter[state], char)
                queue.append(child)
            if self._found[state] is None:
                self._found[state] = self._found[self._shorter[state]]


class StopMatcher:
    """Reads one text. The stop string itself is part of what is handed out only with `include`."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can no longer be part of a stop string."""
        if self.matched is not None:
            return ""
        stops, state = self._stops, self._state
        if state == 0 and stops.starts.isdisjoint(text):
            return text
        for num_read, char in enumerate(text, start=1):
            state = stops.step(state, char)
            if state and (found := stops.found(state)) is not None:
                return self._end(self._held + text[:num_read], found)
        text = self._held + text
        self._state = state
        num_sure = len(text) - stops.depth(state)
        self._held = text[num_sure:]
        return text[:num_sure]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, found: str) -> str:
        self._held, self.matched = "", found
        return text if self._include else text[: -len(found)]
