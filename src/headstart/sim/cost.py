"""What steps of devices and writes over links cost, in virtual seconds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch


class StepShape(NamedTuple):
    """What a step's time may depend on."""

    num_rows: int  # rows that sample
    num_new: int  # tokens computed, over all rows
    context_tokens: int  # KV positions read, each row counted
    unique_tokens: int  # the same, pages that rows share counted once
    pair_tokens: int  # query-key pairs

    def after(self, num_steps: int) -> "StepShape":
        """The shape `num_steps` later, where every row decodes and none comes or goes."""
        grown = num_steps * self.num_rows
        return StepShape(
            self.num_rows,
            self.num_new,
            self.context_tokens + grown,
            self.unique_tokens + grown,
            self.pair_tokens + grown,
        )


StepCost = Callable[[StepShape], float]
"""Seconds a step takes, asked when it is launched. Where steps are taken in jumps it is asked ahead, and must be pure."""
UpcomingStepTimes = Callable[[StepShape], Iterator[float]]
"""Seconds of a step, then of each step after it for as long as every row decodes and none comes or goes. Without end."""


SLOWEST_S = 60.0
"""Of a link's latency and of its time for a byte: what is longer is a mistake."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A write of n bytes keeps either end busy for n * byte_s, after what was posted there before, and lands latency_s
    after both; its notice and its completion take latency_s more. Seconds. Raises ValueError for what no link takes."""

    latency_s: float
    byte_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s <= SLOWEST_S and 0 <= self.byte_s <= SLOWEST_S):
            raise ValueError(f"a link's latency_s and byte_s must be from 0 to {SLOWEST_S:g} s")

    def busy_time(self, num_bytes: int) -> float:
        """Seconds that a write keeps either end busy."""
        return num_bytes * self.byte_s

    def idle_time(self, num_bytes: int) -> float:
        """Seconds from a write's post until its target has its notice, where both ends are idle."""
        return self.busy_time(num_bytes) + 2 * self.latency_s


def times_of(cost: StepCost) -> UpcomingStepTimes:
    """A cost may have a method `times`, a quicker way to the times of steps in a row than to ask for each."""
    foreseen: UpcomingStepTimes | None = getattr(cost, "times", None)
    return partial(_asked_for_each, cost) if foreseen is None else foreseen


def _asked_for_each(cost: StepCost, shape: StepShape) -> Iterator[float]:
    for num_steps in count():
        yield cost(shape.after(num_steps))


def linear_cost(base_s: float = 0.01, per_token_s: float = 0.0005) -> StepCost:
    return lambda shape: base_s + per_token_s * shape.num_new


def shape_of(batch: Batch, page_size: int) -> StepShape:
    """The shape of a batch. Pages that two rows have are full and read: a partial page, and one that is reserved for
    tokens to come, is only ever one row's own."""
    num_rows = num_new = context = pairs = 0
    for row in batch.rows:
        start, num_tokens = row.start, row.num_new
        stop = start + num_tokens
        num_rows += row.sample is not None
        num_new += num_tokens
        context += stop
        pairs += num_tokens * (start + stop + 1) // 2
    num_shared = _num_repeats(np.concatenate([row.pages for row in batch.rows])) if len(batch.rows) > 1 else 0
    return StepShape(num_rows, num_new, context, context - num_shared * page_size, pairs)


def _num_repeats(pages: Int32Array) -> int:
    return len(pages) - int(np.count_nonzero(np.bincount(pages)))
