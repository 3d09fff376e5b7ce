"""How many prompt tokens a step may compute beside decode rows, and how many rows may decode.

A step with decode rows should take no longer than `--itl-slo-ms`, or than `max_step_stretch` times a step of the same rows
alone. What is left of that beside the rows is the room of its prompt tokens. A prompt token costs one unit, and as much
again for each `PAIRS_PER_TOKEN` keys that it attends to. The units of a step follow what steps took: in proportion to room
over time used, which holds for costs that have a fixed part too. Steps of rows alone are timed as they come, and now and
then no prompt token is computed so that one comes.

If decode rows alone take longer than the objective, fewer of them run: additive increase, multiplicative decrease over
windows of steps (arXiv 2503.05248).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt

from headstart.scheduler.limits import DecodeLimits

MEAN_WEIGHT = 0.3
"""Of the newest step in the running mean of steps of decode rows alone, and in the units of a step."""
PAIRS_PER_TOKEN = 16_000
"""Keys at which attention costs as much as the rest of a token, in models of one to eight billion parameters."""
FIRST_UNITS = 512.0
AIM = 0.92
"""Share of the objective that steps aim at, so that most of them stay below it."""
MIN_CHUNK = 128
"""Prompt tokens that a step computes whatever the objective: prompts never starve."""
STEPS_BETWEEN_PROBES = 16
"""Steps with prompt tokens after which one goes without, to see what the rows alone take."""
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
    units: float = 0.0  # of its prompt tokens

    @classmethod
    def of(cls, num_decode_rows: int, chunks: Iterable[tuple[int, int]]) -> "StepWork":
        """`chunks`: (position of the first token, tokens) of each row that computes prompt tokens."""
        tokens, units = 0, 0.0
        for start, count in chunks:
            tokens += count
            units += count * (1 + (start + count / 2) / PAIRS_PER_TOKEN)
        return cls(num_decode_rows, tokens, units)


def tokens_of(units: float, start: int) -> float:
    """Prompt tokens from position `start` on that cost so many units: n (1 + (start + n / 2) / PAIRS_PER_TOKEN)."""
    linear = 1 + start / PAIRS_PER_TOKEN
    return PAIRS_PER_TOKEN * (sqrt(linear * linear + 2 * units / PAIRS_PER_TOKEN) - linear)


class ItlControl:
    """Bounds on the next step. `limits.itl_slo_s` is the objective; None: only `limits.max_step_stretch` holds."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._decode_s = 0.0  # of a step of decode rows alone; 0: none has ended
        self._units = FIRST_UNITS
        self._num_since_probe = 0
        self._window: list[float] = []
        self.max_rows = limits.max_running_requests

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        """A step has ended."""
        if not (isfinite(elapsed_s) and elapsed_s > 0) or not work.num_decode_rows:
            return
        if work.num_prompt_tokens:
            self._num_since_probe += 1
            self._adapt_units(work, elapsed_s)
        else:
            self._num_since_probe = 0
            self._decode_s += (MEAN_WEIGHT if self._decode_s else 1.0) * (elapsed_s - self._decode_s)
        if self._limits.itl_slo_s is not None:
            self._window.append(elapsed_s)
            if len(self._window) >= WINDOW:
                self._adapt_rows(self._limits.itl_slo_s, work.num_decode_rows)

    def chunk_tokens(self, num_decode_rows: int, start: int) -> int:
        """Prompt tokens that the next step may compute from position `start` on, beside so many decode rows."""
        most = self._limits.chunked_prefill_size
        if not num_decode_rows or not isfinite(self._objective_s()):
            return most
        if self._num_since_probe >= STEPS_BETWEEN_PROBES:
            self._num_since_probe = 0
            return 0
        return min(most, max(MIN_CHUNK, int(tokens_of(self._units, start))))

    def _objective_s(self) -> float:
        objective_s = self._limits.itl_slo_s
        return self._limits.max_step_stretch * self._decode_s if objective_s is None else objective_s

    def _adapt_units(self, work: StepWork, elapsed_s: float) -> None:
        """Towards the units that would have filled the room. A step that was given fewer tells only if it took longer."""
        if not self._decode_s:
            return
        room_s, used_s = AIM * self._objective_s() - self._decode_s, elapsed_s - self._decode_s
        fitting = 2.0 if used_s <= 0 else min(2.0, max(0.5, room_s / used_s))
        if fitting < 1 or work.units >= 0.5 * self._units:
            wanted = max(float(MIN_CHUNK), fitting * work.units)
            self._units += MEAN_WEIGHT * (wanted - self._units)

    def _adapt_rows(self, objective_s: float, num_rows: int) -> None:
        p95_s = sorted(self._window)[int(0.95 * len(self._window))]
        self._window.clear()
        if self._decode_s > objective_s or (p95_s > objective_s and num_rows >= self.max_rows):
            self.max_rows = max(1, int(SHRINK * min(self.max_rows, num_rows)))
        elif p95_s < SLACK * objective_s:
            self.max_rows = min(self.max_rows + 1, self._limits.max_running_requests)
