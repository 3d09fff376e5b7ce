"""What is known about each request after it was sent."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """What the server says about a request. None: it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    decode_prefix_len: int | None = None
    bytes_moved: int | None = None
    stage_s: dict[str, float] | None = None
    """Seconds that the request spent in each stage on its decode worker, up to the first token."""


NO_REPORTED_USAGE = ReportedUsage()


@dataclass(frozen=True, slots=True)
class Arrival:
    """`num_tokens` tokens came in one read from the network at `at_s`."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """`error`: why the answer is not complete; empty if it is."""

    sent_s: float
    arrivals: tuple[Arrival, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    usage: ReportedUsage = NO_REPORTED_USAGE
    error: str = ""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as it was sent. Lengths in tokens; `prompt_len` and `possible_len` are None for a text prompt."""

    session: str
    turn: int
    group: int
    output_len: int
    prompt_len: int | None = None
    possible_len: int | None = None
    """Longest prefix that an earlier request's prompt and answer began with: what a cache could have reused."""
    late_s: float = 0.0
    """Open loop: how long after its due time the request was sent."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    request: SentRequest
    answer: Answer

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the server counts them, else as they were seen to arrive."""
        reported = self.answer.usage.completion_tokens
        return self.num_arrived if reported is None else reported

    @property
    def num_arrived(self) -> int:
        return sum(arrival.num_tokens for arrival in self.answer.arrivals)

    @property
    def prompt_len(self) -> int:
        reported = self.answer.usage.prompt_tokens
        return reported if reported is not None else (self.request.prompt_len or 0)

    @property
    def is_complete(self) -> bool:
        return not self.answer.error and bool(self.answer.arrivals)

    @property
    def ttft_s(self) -> float:
        return self.answer.arrivals[0].at_s - self.answer.sent_s

    @property
    def latency_s(self) -> float:
        return self.answer.arrivals[-1].at_s - self.answer.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token without the first. None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """One value per token after the first arrival; tokens that came together share the gap before them equally."""
        arrivals = self.answer.arrivals
        values: list[float] = []
        for earlier, later in pairwise(arrivals):
            values += [(later.at_s - earlier.at_s) / later.num_tokens] * later.num_tokens
        return values
