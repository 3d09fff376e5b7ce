"""A device that computes nothing: steps take their time, and what comes out is read off a tape.

idle ──launch──► running until `finish_at` ──poll──► idle
                    └──skip──► running a later step
"""

from array import array
from collections.abc import Iterator

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, BatchOutput, Sampled, SampleSpec
from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.request import Request
from headstart.sim.cost import StepCost, shape_of, times_of

TAPE_LEN = 1 << 16
_MASK = (1 << 64) - 1
_DETOUR = 7919


class Tape:
    """Output `i` of choice `j` under a seed, as a pure function of (seed, j, i): where on one long tape it is read."""

    def __init__(self, vocab_size: int) -> None:
        ids = np.random.default_rng(vocab_size).integers(vocab_size, size=TAPE_LEN, dtype=np.int32)
        self._ids = np.concatenate((ids, ids))
        self._each_id = array("i", ids.tobytes())  # one is read off faster here than there

    def read(self, request: Request, first: int, count: int) -> Int32Array:
        """Outputs [first, first + count) where no id is banned. Satisfies `sim.fast_forward.Draw`."""
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


class BlankExecutor:
    """Satisfies `core.batch.Executor`."""

    def __init__(self, tape: Tape, cost: StepCost, page_size: int, clock: Clock) -> None:
        self.tape = tape
        self.finish_at: float | None = None
        self.times: Iterator[float] = iter(())  # of the steps after the launched one, told as they are asked for
        self.num_steps = 0
        self._times_of = times_of(cost)
        self._page_size = page_size
        self._clock = clock
        self._batch: Batch | None = None
        self._num_skipped = 0
        self._launched_at = 0.0

    @property
    def max_steps_in_flight(self) -> int:
        return 1

    def launch(self, batch: Batch) -> None:
        if self._batch is not None:
            raise InvariantError("a step is in flight")
        self._batch, self._num_skipped = batch, 0
        self.times = self._times_of(shape_of(batch, self._page_size))
        self._launched_at = self._clock.now()
        self.finish_at = self._launched_at + next(self.times)
        self.num_steps += 1

    def skip(self, num_steps: int, launched_at: float, finish_at: float) -> None:
        """Be in the step that comes `num_steps` after the one in flight, where every row decodes in all of them."""
        self._num_skipped += num_steps
        self.num_steps += num_steps
        self._launched_at, self.finish_at = launched_at, finish_at

    @property
    def step_s(self) -> float:
        """How long the step in flight takes."""
        return 0.0 if self.finish_at is None else self.finish_at - self._launched_at

    def poll(self) -> BatchOutput | None:
        batch = self._batch
        if batch is None or self.finish_at is None or (now := self._clock.now()) < self.finish_at:
            return None
        self._batch, self.finish_at = None, None
        sampled = [self._sample(row.row_id, spec) for row in batch.rows if (spec := row.sample) is not None]
        return BatchOutput(batch.step_id, tuple(sampled), now - self._launched_at)

    def close(self) -> None:
        self._batch, self.finish_at = None, None

    def _sample(self, row_id: int, spec: SampleSpec) -> Sampled:
        token = self.tape.sample(spec, spec.output_index + self._num_skipped)
        if spec.num_top_logprobs is None:
            return Sampled(row_id, (token,))
        top = tuple((token + k, -1.0) for k in range(spec.num_top_logprobs))
        return Sampled(row_id, (token,), (-0.5,), (top,) if top else ())
