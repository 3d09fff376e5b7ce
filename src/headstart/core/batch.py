"""Where scheduler and executor meet: one step's rows, and what came of them.

A row is a run of consecutive tokens of one sequence. Decode rows have one token, chunk rows many; both kinds share a
batch. KV of row tokens is written to `pages` before attention reads it, so page `p` of a row holds positions
`[p * page_size, (p + 1) * page_size)`. Rows whose page tables start with the same page ids share that prefix: the
attention plan reads it once.

Several steps may be in flight. They run in the order of their launch, so the input of a decode row may be a token that
an earlier one has yet to draw (`PendingToken`). A row may end in drafts: guessed tokens, which the executor accepts as
far as it draws the same ones.
"""

from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.layout import PoolRegion
from headstart.core.request import SamplingParams


class SampleSpec(Struct, frozen=True, eq=False):
    """How to draw from a row's last positions: output `output_index + j` at the j-th drawn position."""

    params: SamplingParams
    choice: int
    output_index: int  # i of the pure function (seed, choice, i, token)
    context: Int32Array  # [prompt_len + output_index] every token before the first one to draw; [one less] if pending
    prompt_len: int  # the client's prompt, for penalties that count outputs only
    banned_ids: tuple[int, ...] = ()  # masked out: stop ids while min_new_tokens is not reached
    num_top_logprobs: int | None = None


class PendingToken(Struct, frozen=True):
    """The one token that row `row_id` of step `step_id`, which is still in flight, draws."""

    step_id: int
    row_id: int


class Row(Struct, frozen=True, eq=False):
    """`num_new` tokens of one sequence at positions [start, start + num_new)."""

    row_id: int  # chosen by the scheduler; comes back in Sampled
    tokens: Int32Array  # [num_new]; empty if the row's one token is pending
    start: int
    pages: Int32Array  # [>= ceil((start + num_new) / page_size)]
    sample: SampleSpec | None = None  # None: fill KV only
    namespace: bytes = b""  # of the sequence's KV: rows of different namespaces never read the same page
    pending: PendingToken | None = None
    num_drafts: int = 0  # of the last `tokens`: guesses. The row samples at the token before them and at each of them

    @property
    def num_new(self) -> int:
        return len(self.tokens) if self.pending is None else 1


class Batch(Struct, frozen=True, eq=False):
    step_id: int
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)


class Sampled(Struct, frozen=True, eq=False):
    """What a row drew: the drafts that were accepted and one token more, so 1 to `num_drafts` + 1 of them.

    Token j is drawn from the logits behind token j - 1, exactly as without drafts. Only KV of accepted tokens counts.
    """

    row_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # [tokens] natural log; empty unless logprobs were asked for
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # [tokens] (token id, logprob), best first
    error: str | None = None  # this row alone failed (for example NaN logits); it has no tokens


class BatchOutput(Struct, frozen=True, eq=False):
    """Every KV write of step `step_id` is complete and visible to transfers when this is handed out."""

    step_id: int
    sampled: tuple[Sampled, ...] = ()
    elapsed_s: float = 0.0


class Executor(Protocol):
    """Runs batches on a device, in the order of their launch. Calls never block on the device."""

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be launched and not yet polled: 1, or 2 where the next step is made while one runs."""
        ...

    def launch(self, batch: Batch) -> None:
        """Start a step. The caller keeps every page of it allocated until `poll` hands out its output."""
        ...

    def poll(self) -> BatchOutput | None:
        """The output of the oldest step in flight, once it has ended; else None. Raises WorkerError if the device
        failed."""
        ...

    def close(self) -> None: ...


class DeviceExecutor(Executor, Protocol):
    """What a worker is put together from: an executor with a KV pool on a device."""

    @property
    def region(self) -> PoolRegion:
        """Where the pool lies: what transfers read and write."""
        ...

    def host_pages(self) -> NDArray[np.uint8] | None:
        """The pool's own memory, [num_pages, page_bytes]; None if the host cannot address it."""
        ...

    def warm_up(self) -> None:
        """Bring code, buffers and weights into memory, in pages 0.. before any is in use. Raises WorkerError."""
        ...
