"""A device that computes watermarks, takes virtual time, and checks every page it reads.

    idle ──launch──► running until `finish_at` ──poll──► idle, or running the step that was launched meanwhile

Everything that a step will write and draw is known when it is launched, and the pool shows none of it before its end:
until then the positions that it writes hold a poison of its own. Whoever reads or overwrites them meanwhile is found out,
here or by the next reader. Only a later step in flight may read them, and sees what they will hold. What a row reads is
checked when it is launched and again when its step ends.
"""

from dataclasses import dataclass

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.batch import Batch, BatchOutput, Row, Sampled, SampleSpec
from headstart.core.clock import Clock
from headstart.core.layout import pages_for
from headstart.sim.cost import StepCost, shape_of
from headstart.sim.steps_in_flight import StepsInFlight
from headstart.sim.watermarks import Context, ContextBook, Marks, next_token

Slots = NDArray[np.int64]
"""Positions of a pool, counted over its pages."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a worker computes with. All workers of a world share the book."""

    book: ContextBook
    vocab_size: int
    page_size: int
    cost: StepCost


@dataclass(frozen=True, slots=True, eq=False)
class _RowWork:
    """A row, the context it reads and the one it makes, and where that one's new watermarks go."""

    row: Row
    before: Context | None
    after: Context
    slots: Slots
    sampled: Sampled | None


@dataclass(frozen=True, slots=True, eq=False)
class _StepWork:
    """What a step writes, in the order of `slots`, and the poison that stands there until its end."""

    step_id: int
    rows: list[_RowWork]
    slots: Slots  # sorted
    marks: Marks
    poison: int  # never a watermark: those are digests of 64 bits, this is a small number

    def drawn(self, row_id: int) -> int:
        """The one token that a row draws."""
        (sampled,) = [work.sampled for work in self.rows if work.row.row_id == row_id]
        assert sampled is not None, "a row waits for a token that nobody draws"
        assert len(sampled.token_ids) == 1, "a row waits for one of several tokens"
        return sampled.token_ids[0]


class FakeExecutor:
    """Satisfies `core.batch.Executor`. `pool` [num_pages, page_size] is the worker's memory."""

    def __init__(self, model: Model, pool: Marks, clock: Clock, max_steps: int = 1) -> None:
        self._model = model
        self._pool = pool
        self._clock = clock
        self._steps: StepsInFlight[_StepWork] = StepsInFlight(clock, max_steps)
        self.num_steps = 0

    @property
    def max_steps_in_flight(self) -> int:
        return self._steps.max_steps

    @property
    def finish_at(self) -> float | None:
        return self._steps.finish_at

    @finish_at.setter
    def finish_at(self, at: float | None) -> None:
        self._steps.finish_at = at

    def launch(self, batch: Batch) -> None:
        self._steps.check_room()
        self.num_steps += 1
        rows = [self._row_work(row) for row in batch.rows]
        slots = np.concatenate([work.slots for work in rows])
        marks = np.concatenate([work.after.marks[work.row.start :] for work in rows])
        assert len(np.unique(slots)) == len(slots), "two rows of a step write the same position"
        for earlier in self._steps.works():
            assert not np.isin(slots, earlier.slots).any(), "two steps in flight write the same position"
        self._flat[slots] = self.num_steps
        for work in rows:
            assert self._holds(work, self._steps.works()), "a row reads what the same step writes"
        order = np.argsort(slots)
        step = _StepWork(batch.step_id, rows, slots[order], marks[order], self.num_steps)
        self._steps.start(step, self._model.cost(shape_of(batch, self._model.page_size)))

    def poll(self) -> BatchOutput | None:
        ended = self._steps.take_ended()
        if ended is None:
            return None
        step = ended.work
        for work in step.rows:
            assert self._holds(work, []), "a page changed while a step read it"
        assert (self._flat[step.slots] == step.poison).all(), "a page was written while a step wrote it"
        self._flat[step.slots] = step.marks
        sampled = tuple(work.sampled for work in step.rows if work.sampled is not None)
        return BatchOutput(step.step_id, sampled, self._clock.now() - ended.started_at)

    def close(self) -> None:
        self._steps.clear()

    @property
    def _flat(self) -> Marks:
        return self._pool.reshape(-1)

    def _row_work(self, row: Row) -> _RowWork:
        assert len(row.pages) >= pages_for(row.start + row.num_new, self._model.page_size), "a row lacks pages"
        before = self._read(row)
        tokens = self._tokens(row)
        after = self._model.book.extend(before, row.namespace, tokens)
        slots = self._slots(row, row.start, row.start + row.num_new)
        return _RowWork(row, before, after, slots, None if row.sample is None else self._sample(row, tokens, after))

    def _tokens(self, row: Row) -> Int32Array:
        """What the row computes, its pending token included."""
        if row.pending is None:
            assert len(row.tokens) > 0, "a row without tokens"
            return row.tokens
        assert len(row.tokens) == 0, "a row has tokens and waits for one"
        assert row.num_drafts == 0, "a row guesses what follows a token that it waits for"
        found = [step for step in self._steps.works() if step.step_id == row.pending.step_id]
        assert found, "a row waits for a token of a step that is not in flight"
        return int32_array((found[0].drawn(row.pending.row_id),))

    def _read(self, row: Row) -> Context | None:
        """The context in the pages before `row.start`, which must be one that somebody computed, from its beginning."""
        if row.start == 0:
            return None
        held = self._held(row, self._steps.works())
        context = self._model.book.find(int(held[-1]))
        assert context is not None, f"position {row.start - 1} of a row holds no KV"
        assert np.array_equal(held, context.marks), f"a page before position {row.start} holds another sequence's KV"
        return context

    def _held(self, row: Row, earlier: list[_StepWork]) -> Marks:
        """Watermarks before `row.start`, as they are when these steps in flight have ended."""
        slots = self._slots(row, 0, row.start)
        held = self._flat[slots]
        for step in earlier:
            written = held == step.poison
            if written.any():
                held[written] = step.marks[np.searchsorted(step.slots, slots[written])]
        return held

    def _holds(self, work: _RowWork, earlier: list[_StepWork]) -> bool:
        """Whether the pages still hold what the row read."""
        return work.before is None or np.array_equal(self._held(work.row, earlier), work.before.marks)

    def _slots(self, row: Row, start: int, stop: int) -> Slots:
        page_size = self._model.page_size
        num_pages = pages_for(stop, page_size)
        slots: Slots = row.pages[:num_pages, None].astype(np.int64) * page_size + np.arange(page_size)
        return slots.reshape(-1)[start:stop]

    def _sample(self, row: Row, tokens: Int32Array, after: Context) -> Sampled:
        """Draw behind the last token that is no draft, and behind each draft for as long as drafts are what was drawn."""
        spec, num_known = row.sample, len(after.marks) - row.num_drafts
        assert spec is not None
        assert row.num_drafts < len(tokens), "a row of nothing but drafts"
        context = np.frombuffer(after.tokens, dtype="<i4")
        asked = spec.context if row.pending is None else np.concatenate((spec.context, tokens))
        assert np.array_equal(asked, context[:num_known]), "a row's KV is not that of the context it samples for"
        drawn: list[int] = []
        for length in range(num_known, len(context) + 1):
            spec = structs.replace(spec, context=context[:length], output_index=spec.output_index + bool(drawn))
            drawn.append(next_token(int(after.marks[length - 1]), spec, self._model.vocab_size))
            if length == len(context) or drawn[-1] != context[length]:
                break
        return sampled_of(row.row_id, drawn, spec)


def sampled_of(row_id: int, token_ids: list[int], spec: SampleSpec) -> Sampled:
    """With logprobs, if they are asked for, that are easily told from real ones."""
    if spec.num_top_logprobs is None:
        return Sampled(row_id, tuple(token_ids))
    tops = tuple(tuple((token + k, -1.0) for k in range(spec.num_top_logprobs)) for token in token_ids)
    return Sampled(row_id, tuple(token_ids), (-0.5,) * len(token_ids), tops if spec.num_top_logprobs else ())
