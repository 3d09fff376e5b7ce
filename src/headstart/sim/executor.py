"""A device that computes watermarks, takes virtual time, and checks every page it reads.

    idle ──launch──► running until `finish_at` ──poll──► idle

While a step runs, the positions it writes hold a poison: whoever reads or overwrites them meanwhile is found out, here
or by the next reader. What a row reads is checked at launch and again at the end.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.core.batch import Batch, BatchOutput, Row, Sampled
from headstart.core.clock import Clock
from headstart.core.layout import pages_for
from headstart.sim.cost import StepCost, shape_of
from headstart.sim.watermarks import Context, ContextBook, Marks, next_token


@dataclass(frozen=True, slots=True)
class Model:
    """What a worker computes with. All workers of a world share the book."""

    book: ContextBook
    vocab_size: int
    page_size: int
    cost: StepCost


@dataclass(frozen=True, slots=True)
class _Work:
    """A row, the context it reads and the one it makes, and where its watermarks go."""

    row: Row
    before: Context | None
    after: Context
    slots: NDArray[np.int64]


class FakeExecutor:
    """Satisfies `core.batch.Executor`. `pool` [num_pages, page_size] is the worker's memory."""

    def __init__(self, model: Model, pool: Marks, clock: Clock) -> None:
        self._model = model
        self._pool = pool
        self._clock = clock
        self._batch: Batch | None = None
        self._work: list[_Work] = []
        self._launched_at = 0.0
        self.finish_at: float | None = None
        self.num_steps = 0

    @property
    def max_steps_in_flight(self) -> int:
        return 1

    def launch(self, batch: Batch) -> None:
        assert self._batch is None, "a step is in flight"
        self._batch, self._launched_at = batch, self._clock.now()
        self.finish_at = self._launched_at + self._model.cost(shape_of(batch, self._model.page_size))
        self.num_steps += 1
        self._work = []
        for row in batch.rows:
            before = self._read(row)
            after = self._model.book.extend(before, row.namespace, row.tokens)
            self._work.append(_Work(row, before, after, self._slots(row)))
        slots = np.concatenate([work.slots for work in self._work])
        assert len(np.unique(slots)) == len(slots), "two rows of a step write the same position"
        self._flat[slots] = self._poison
        for work in self._work:
            assert work.before is None or self._holds(work.row, work.before), "a row reads what the same step writes"

    def poll(self) -> BatchOutput | None:
        if self._batch is None or self.finish_at is None or self._clock.now() < self.finish_at:
            return None
        for work in self._work:
            assert work.before is None or self._holds(work.row, work.before), "a page changed while a step read it"
            assert (self._flat[work.slots] == self._poison).all(), "a page was written while a step wrote it"
        for work in self._work:
            self._flat[work.slots] = work.after.marks[work.row.start :]
        sampled = tuple(self._sample(work) for work in self._work if work.row.sample is not None)
        output = BatchOutput(self._batch.step_id, sampled, self._clock.now() - self._launched_at)
        self._batch, self.finish_at = None, None
        return output

    def close(self) -> None:
        self._batch, self.finish_at = None, None

    @property
    def _flat(self) -> Marks:
        return self._pool.reshape(-1)

    @property
    def _poison(self) -> int:
        """Never a watermark: those are digests of 64 bits, this is a small number."""
        return self.num_steps

    def _read(self, row: Row) -> Context | None:
        """The context in the pages before `row.start`, which must be one that somebody computed, from its beginning."""
        assert len(row.tokens) > 0, "a row without tokens"
        assert len(row.pages) >= pages_for(row.start + len(row.tokens), self._model.page_size), "a row lacks pages"
        if row.start == 0:
            return None
        last = row.start - 1
        mark = int(self._pool[row.pages[last // self._model.page_size], last % self._model.page_size])
        context = self._model.book.find(mark)
        assert context is not None, f"position {last} of a row holds no KV"
        assert self._holds(row, context), f"a page before position {row.start} holds another sequence's KV"
        return context

    def _holds(self, row: Row, context: Context) -> bool:
        num_pages = pages_for(row.start, self._model.page_size)
        held = self._pool[row.pages[:num_pages]].reshape(-1)[: row.start]
        return np.array_equal(held, context.marks)

    def _slots(self, row: Row) -> NDArray[np.int64]:
        positions = np.arange(row.start, row.start + len(row.tokens))
        page_size = self._model.page_size
        slots: NDArray[np.int64] = row.pages[positions // page_size].astype(np.int64) * page_size
        return slots + positions % page_size

    def _sample(self, work: _Work) -> Sampled:
        spec = work.row.sample
        assert spec is not None
        context = spec.context.astype("<i4", copy=False).tobytes()
        assert context == work.after.tokens, "a row's KV is not that of the context it samples for"
        token = next_token(work.after.last, spec, self._model.vocab_size)
        if spec.num_top_logprobs is None:
            return Sampled(work.row.row_id, (token,))
        top = tuple((token + k, -1.0) for k in range(spec.num_top_logprobs))
        return Sampled(work.row.row_id, (token,), (-0.5,), (top,) if top else ())
