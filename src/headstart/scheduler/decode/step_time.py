"""How long steps take, learned from those that ended; how many prompt tokens a step may compute beside decode rows, and
how many rows may decode.

A step of decode rows alone takes a time that changes slowly: its running mean. Prompt tokens beside them add

    tokens * per_token_s + pairs * per_pair_s           pairs: (query, key) pairs that their attention reads

whose two coefficients are fitted by recursive least squares with forgetting. A chunk is cut so that the step stays within
`--itl-slo-ms`, or within `max_step_stretch` times a step of decode rows alone. If decode steps alone are longer than the
objective, fewer rows decode: additive increase, multiplicative decrease over windows of steps (arXiv 2503.05248).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from headstart.scheduler.limits import DecodeLimits

FORGETTING = 0.98
MEAN_WEIGHT = 0.1
"""Of the newest step in the mean of decode steps."""
MIN_CHUNK = 128
"""Prompt tokens that a step computes whatever the objective: prompts never starve."""
WINDOW = 64
"""Steps after which the number of rows is looked at again."""
SLACK = 0.85
"""Share of the objective below which one row more is let in."""
SHRINK = 0.9


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its time depends on it."""

    num_decode_rows: int
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0

    @classmethod
    def of(cls, num_decode_rows: int, chunks: Iterable[tuple[int, int]]) -> "StepWork":
        """`chunks`: (position of the first token, tokens) of each row that computes prompt tokens."""
        tokens, pairs = 0, 0.0
        for start, count in chunks:
            tokens += count
            pairs += count * (start + count / 2)
        return cls(num_decode_rows, tokens, pairs)


def _loose() -> NDArray[np.float64]:
    """The covariance of coefficients of which nothing is known, features in thousands and millions."""
    return np.eye(2) * 1e3


@dataclass(slots=True)
class StepTimes:
    """Means and coefficients, in seconds."""

    decode_s: float = 0.0  # 0: no step of decode rows alone has ended
    num_chunks: int = 0
    _coefficients: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    _covariance: NDArray[np.float64] = field(default_factory=_loose)

    def observe(self, shape: StepWork, elapsed_s: float) -> None:
        """A step of this shape took `elapsed_s`."""
        if not (isfinite(elapsed_s) and elapsed_s > 0):
            return
        if not shape.num_prompt_tokens:
            self.decode_s += (MEAN_WEIGHT if self.decode_s else 1.0) * (elapsed_s - self.decode_s)
            return
        extra_s = max(0.0, elapsed_s - (self.decode_s if shape.num_decode_rows else 0.0))
        features = np.array([shape.num_prompt_tokens * 1e-3, shape.num_pairs * 1e-6])
        gain = self._covariance @ features / (FORGETTING + features @ self._covariance @ features)
        self._coefficients = np.maximum(self._coefficients + gain * (extra_s - features @ self._coefficients), 0.0)
        self._covariance = (self._covariance - np.outer(gain, features @ self._covariance)) / FORGETTING
        self.num_chunks += 1

    def tokens_within(self, room_s: float, start: int) -> float:
        """Prompt tokens from position `start` on that take `room_s`: n per_token + n (start + n / 2) per_pair."""
        per_token, per_pair = self._coefficients[0] * 1e-3, self._coefficients[1] * 1e-6
        linear = per_token + start * per_pair
        if room_s <= 0 or linear <= 0:
            return 0.0 if room_s <= 0 else inf
        return float(
            (sqrt(linear * linear + 2 * per_pair * room_s) - linear) / per_pair if per_pair else room_s / linear
        )


class ItlControl:
    """Bounds on the next step. `limits.itl_slo_s` is the objective; None: only `limits.max_step_stretch` holds."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._times = StepTimes()
        self._window: list[float] = []
        self.max_rows = limits.max_running_requests

    def observe(self, shape: StepWork, elapsed_s: float) -> None:
        """A step has ended."""
        self._times.observe(shape, elapsed_s)
        if self._limits.itl_slo_s is None or not shape.num_decode_rows:
            return
        self._window.append(elapsed_s)
        if len(self._window) >= WINDOW:
            p95 = sorted(self._window)[int(0.95 * len(self._window))]
            self._window.clear()
            self._adapt(p95, shape.num_decode_rows)

    def chunk_tokens(self, num_decode_rows: int, start: int) -> int:
        """Prompt tokens that the next step may compute from position `start` on, beside so many decode rows."""
        most = self._limits.chunked_prefill_size
        if not num_decode_rows or not self._times.decode_s:
            return most
        objective_s = self._limits.itl_slo_s
        if objective_s is None:
            objective_s = self._limits.max_step_stretch * self._times.decode_s
        if not isfinite(objective_s):
            return most
        if not self._times.num_chunks:
            return min(most, MIN_CHUNK)  # the first chunk tells what chunks cost
        return int(
            max(min(MIN_CHUNK, most), min(most, self._times.tokens_within(objective_s - self._times.decode_s, start)))
        )

    def _adapt(self, p95_s: float, num_rows: int) -> None:
        objective_s = self._limits.itl_slo_s
        assert objective_s is not None
        if self._times.decode_s > objective_s or (p95_s > objective_s and num_rows >= self.max_rows):
            self.max_rows = max(1, int(SHRINK * min(self.max_rows, num_rows)))
        elif p95_s < SLACK * objective_s:
            self.max_rows = min(self.max_rows + 1, self._limits.max_running_requests)
