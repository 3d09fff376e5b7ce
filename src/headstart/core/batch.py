"""Where scheduler and executor meet: one step's rows, and what came of them.

A row is a run of consecutive tokens of one sequence. Decode rows have one token, chunk rows many; both kinds share a
batch. KV of row tokens is written to `pages` before attention reads it, so page `p` of a row holds positions
`[p * page_size, (p + 1) * page_size)`. Rows whose page tables start with the same page ids share that prefix: the
attention plan reads it once.
"""

from typing import Protocol

from msgspec import Struct

from headstart.core.arrays import Int32Array
from headstart.core.request import SamplingParams


class SampleSpec(Struct, frozen=True, eq=False):
    """How to draw a token from a row's last position."""

    params: SamplingParams
    choice: int
    output_index: int  # i of the pure function (seed, choice, i)
    context: Int32Array  # [prompt_len + output_index]: every token before the one to draw
    prompt_len: int  # the client's prompt, for penalties that count outputs only
    banned_ids: tuple[int, ...] = ()  # masked out: stop ids while min_new_tokens is not reached
    num_top_logprobs: int | None = None


class Row(Struct, frozen=True, eq=False):
    """`tokens` [num_new] of one sequence at positions [start, start + num_new)."""

    row_id: int  # chosen by the scheduler; comes back in Sampled
    tokens: Int32Array
    start: int
    pages: Int32Array  # [>= ceil((start + num_new) / page_size)]
    sample: SampleSpec | None = None  # None: fill KV only
    namespace: bytes = b""  # of the sequence's KV: rows of different namespaces never read the same page


class Batch(Struct, frozen=True, eq=False):
    step_id: int
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


class Sampled(Struct, frozen=True, eq=False):
    row_id: int
    token_id: int
    logprob: float | None = None  # natural log; only where logprobs were asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None  # this row alone failed (for example NaN logits); token_id is meaningless


class BatchOutput(Struct, frozen=True, eq=False):
    """Every KV write of step `step_id` is complete and visible to transfers when this is handed out."""

    step_id: int
    sampled: tuple[Sampled, ...] = ()
    elapsed_s: float = 0.0


class Executor(Protocol):
    """Runs batches on a device. One step is in flight at most; calls never block on it."""

    def launch(self, batch: Batch) -> None:
        """Start a step. The caller keeps every page of it allocated until `poll` hands out its output."""
        ...

    def poll(self) -> BatchOutput | None:
        """The finished step's output, once; None while it runs. Raises WorkerError if the device failed."""
        ...

    def close(self) -> None: ...
