"""A client's view of one choice, and the one thing every request is owed: exactly one end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, TokenDelta
from headstart.core.request import Request
from headstart.sim.clock import VirtualClock


@dataclass(slots=True, eq=False)
class Handle:
    """Satisfies `gateway.choice_record.Sink`."""

    request: Request
    clock: VirtualClock
    submitted_at: float
    on_end: Callable[[], None] = lambda: None
    tokens: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    finished: Finished | None = None
    failed: Failed | None = None
    token_times: list[float] = field(default_factory=list)
    ended_at: float | None = None

    def on_tokens(self, delta: TokenDelta) -> None:
        assert not self.is_done, "tokens after the end"
        assert delta.index == len(self.tokens), f"tokens at {delta.index}, {len(self.tokens)} expected"
        self.tokens += delta.token_ids
        self.token_times += self.clock.arrivals(len(delta.token_ids))
        self.deltas.append(delta)

    def on_finished(self, finished: Finished) -> None:
        self.finished = finished
        self._end()

    def on_failed(self, failed: Failed) -> None:
        self.failed = failed
        self._end()

    def _end(self) -> None:
        assert not self.is_done, "a second terminal event"
        self.ended_at = self.clock.now()
        self.on_end()

    @property
    def is_done(self) -> bool:
        return self.ended_at is not None

    @property
    def error(self) -> ErrorCode | None:
        return self.failed.code if self.failed else None

    @property
    def first_token_at(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at
