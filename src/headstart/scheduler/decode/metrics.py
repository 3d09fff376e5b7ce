"""What serving one choice cost so far, and the stats made of it."""

from dataclasses import dataclass, field

from headstart.core.request import RequestStats


@dataclass(slots=True, eq=False)
class RequestMetrics:
    """What serving a choice cost so far."""

    accepted_at: float
    marks: dict[str, float] = field(default_factory=dict)  # first time: admitted, ready, first_token
    decode_prefix_len: int = 0
    prefill_prefix_len: int = 0
    num_computed: int = 0  # tokens before the last one whose KV was computed for this choice, by anyone
    pages_moved: int = 0
    miss_reason: str = ""
    num_retractions: int = 0
    num_mismatches: int = 0  # notices whose pages did not hold what was sent

    def add_computed(self, num_tokens: int) -> None:
        """What is computed again after the first token, for a retraction, is no cost of the prompt."""
        if "first_token" not in self.marks:
            self.num_computed += num_tokens

    def mark(self, event: str, now: float) -> None:
        self.marks.setdefault(event, now)

    def stats(self, prompt_len: int, page_bytes: int, now: float) -> RequestStats:
        admitted = self.marks.get("admitted", now)
        ready = self.marks.get("ready", now)
        first = self.marks.get("first_token", now)
        cached = prompt_len - 1 - self.num_computed if "admitted" in self.marks else 0
        return RequestStats(
            cached_tokens=max(0, cached),
            decode_prefix_len=self.decode_prefix_len,
            prefill_prefix_len=self.prefill_prefix_len,
            bytes_moved=self.pages_moved * page_bytes,
            miss_reason=self.miss_reason,
            num_retractions=self.num_retractions,
            stage_s={
                "queue": admitted - self.accepted_at,
                "prefill": max(0.0, ready - admitted),
                "first_step": max(0.0, first - ready),
            },
        )
