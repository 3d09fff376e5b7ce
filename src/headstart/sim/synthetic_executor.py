"""A device that computes nothing: steps take their time, and what comes out is read off a tape.

idle ──launch──► running until `finish_at` ──poll──► idle, or running the step that was launched meanwhile
                    └──skip──► running a later step
"""

from array import array
from collections.abc import Iterator

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, BatchOutput, Row, Sampled, SampleSpec
from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.request import Request
from headstart.sim.cost import StepCost, shape_of, times_of
from headstart.sim.executor import sampled_of
from headstart.sim.steps_in_flight import StepsInFlight

TAPE_LEN = 1 << 16
_MASK = (1 << 64) - 1
_DETOUR = 7919


class TokenTape:
    """Output `i` of choice `j` under a seed, as a pure function of (seed, j, i): where on one long tape it is read."""

    def __init__(self, vocab_size: int) -> None:
        ids = np.random.default_rng(vocab_size).integers(vocab_size, size=TAPE_LEN, dtype=np.int32)
        self._ids = np.concatenate((ids, ids))
        self._each_id = array("i", ids.tobytes())  # one is read off faster here than there

    def read(self, request: Request, first: int, count: int) -> Int32Array:
        """Outputs [first, first + count) where no id is banned. Satisfies `sim.fast_forward.DrawTokens`."""
        start = self._place(request.sampling.seed, request.ref.choice, first)
        if count > TAPE_LEN:
            return np.resize(self._ids[start : start + TAPE_LEN], count)
        return self._ids[start : start + count]

    def sample(self, spec: SampleSpec, index: int) -> int:
        place = self._place(spec.params.seed, spec.choice, index)
        while (token := self._each_id[place]) in spec.banned_ids:
            place = (place + _DETOUR) % TAPE_LEN
        return token

    @staticmethod
    def _place(seed: int, choice: int, index: int) -> int:
        mixed = ((seed ^ choice * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) & _MASK
        return ((mixed >> 32) + index) % TAPE_LEN


class SyntheticExecutor:
    """Satisfies `core.batch.Executor`."""

    def __init__(self, tape: TokenTape, cost: StepCost, page_size: int, clock: Clock, max_steps: int = 1) -> None:
        self.tape = tape
        self.times: Iterator[float] = iter(())  # of the steps after the launched one, told as they are asked for
        self.num_steps = 0
        self._times_of = times_of(cost)
        self._page_size = page_size
        self._clock = clock
        self._steps: StepsInFlight[Batch] = StepsInFlight(clock, max_steps)
        self._num_skipped = 0

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
        self._check_pending(batch)
        self._num_skipped = 0
        self.times = self._times_of(shape_of(batch, self._page_size))
        self._steps.start(batch, next(self.times))
        self.num_steps += 1

    def _check_pending(self, batch: Batch) -> None:
        awaited = {row.pending.step_id for row in batch.rows if row.pending is not None}
        if not awaited <= {step.step_id for step in self._steps.works()}:
            raise InvariantError("a row waits for a token of a step that is not in flight")

    def skip(self, num_steps: int, launched_at: float, finish_at: float) -> None:
        """Be in the step that comes `num_steps` after the one in flight, if every row decodes in all of them."""
        step = self._steps.oldest
        if step is None or len(self._steps) > 1:
            raise InvariantError("steps are skipped where one is in flight")
        self._num_skipped += num_steps
        self.num_steps += num_steps
        step.started_at, step.finish_at = launched_at, finish_at

    @property
    def started_at(self) -> float:
        """When the oldest step in flight started; 0 without one."""
        step = self._steps.oldest
        return 0.0 if step is None else step.started_at

    @property
    def step_s(self) -> float:
        """How long the oldest step in flight takes."""
        step = self._steps.oldest
        return 0.0 if step is None else step.finish_at - step.started_at

    def poll(self) -> BatchOutput | None:
        ended = self._steps.take_ended()
        if ended is None:
            return None
        batch = ended.work
        sampled = [self._sample(row, spec) for row in batch.rows if (spec := row.sample) is not None]
        return BatchOutput(batch.step_id, tuple(sampled), self._clock.now() - ended.started_at)

    def close(self) -> None:
        self._steps.clear()

    def _sample(self, row: Row, spec: SampleSpec) -> Sampled:
        """Drafts are accepted for as long as they are what the tape says."""
        first = spec.output_index + self._num_skipped
        drawn = [self.tape.sample(spec, first)]
        for draft in row.tokens[len(row.tokens) - row.num_drafts :].tolist():
            if draft != drawn[-1]:
                break
            drawn.append(self.tape.sample(spec, first + len(drawn)))
        return sampled_of(row.row_id, drawn, spec)
