"""CudaExecutor: up to two steps on the card's stream, launched from the worker's loop.

    free ──launch──► on the stream ──its end──► ended ──poll──► free            (each of two steps)
                           └── launch, poll or the device raises ──► failed: every call raises the same WorkerError

The loop's thread makes and launches steps and reads their outputs; it never waits for the device. A thread of its own
waits for the end of the oldest step and reports it, so that the loop can sleep until then.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Row, SampleSpec
from headstart.core.errors import HeadstartError, InvariantError, WorkerError
from headstart.core.layout import PoolRegion, pages_for
from headstart.core.request import SamplingParams
from headstart.executor.cuda.errors import worker_error
from headstart.executor.cuda.marks import Mark
from headstart.executor.cuda.outputs import output_of
from headstart.executor.cuda.steps import LaunchedStep, StepLauncher
from headstart.executor.pool import KVPool

STEPS_IN_FLIGHT = 2
WARM_UP_TOKENS = (96, 1024)
"""Prompt tokens of the chunks that compile what chunks need: a short one, and one whose prefix is gathered."""


class CudaExecutor:
    """See `headstart.core.batch.DeviceExecutor`. `on_done` is called on the watching thread when a step has ended."""

    def __init__(self, pool: KVPool, launcher: StepLauncher, on_done: Callable[[], None] | None = None) -> None:
        self.pool = pool
        self._launcher = launcher
        self._on_done = on_done or (lambda: None)
        self._inflight: deque[LaunchedStep] = deque()
        self._watched: SimpleQueue[Mark | None] = SimpleQueue()
        self._failure: HeadstartError | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start the watching thread. Once, before the first launch."""
        self._watcher = threading.Thread(target=self._watch, name="executor", daemon=True)
        self._watcher.start()

    @property
    def max_steps_in_flight(self) -> int:
        return STEPS_IN_FLIGHT

    @property
    def region(self) -> PoolRegion:
        return self.pool.region

    def host_pages(self) -> NDArray[np.uint8] | None:
        return None

    def launch(self, batch: Batch) -> None:
        self._check()
        if len(self._inflight) >= STEPS_IN_FLIGHT:
            raise InvariantError(f"step {batch.step_id} launched while {STEPS_IN_FLIGHT} are in flight")
        if self._watcher is None:
            raise InvariantError("the executor is not started or already closed")
        try:
            step = self._launcher.launch(batch)
        except Exception as error:
            raise self._failed(error, f"step {batch.step_id} of {batch.num_tokens} tokens") from error
        self._inflight.append(step)
        self._watched.put(step.ended)

    def poll(self) -> BatchOutput | None:
        self._check()
        if not self._inflight:
            return None
        step = self._inflight[0]
        try:
            if not step.ended.query():
                return None
            output = output_of(step, self._launcher.sampler.vocab_size)
        except Exception as error:
            raise self._failed(error, f"step {step.batch.step_id}") from error
        self._inflight.popleft()
        return output

    def close(self) -> None:
        """Wait for the steps in flight, then end the thread. Safe to call again."""
        if self._watcher is not None:
            self._watched.put(None)
            self._watcher.join()
            self._watcher = None

    def warm_up(self) -> None:
        """Compile every kernel and capture every graph, in pages 0.. before any of them is in use. Not concurrently with
        launch. Raises WorkerError."""
        try:
            with torch.inference_mode():
                for size in self._launcher.captures():
                    self._launcher.graphs.capture(size)
            for step_id, batch in enumerate(_warm_up_batches(self.pool, self._launcher.max_pages)):
                self._run(Batch(-1 - step_id, batch))
        except WorkerError:
            raise
        except Exception as error:
            raise self._failed(error, "warming up") from error

    def _run(self, batch: Batch) -> None:
        """One step from launch to poll, waiting for the device."""
        self.launch(batch)
        self._inflight[-1].ended.synchronize()
        self.poll()

    def _watch(self) -> None:
        while (ended := self._watched.get()) is not None:
            try:
                ended.synchronize()
            except RuntimeError as error:  # the loop meets it again when it polls; this thread must not die of it
                self._failure = self._failure or worker_error(error, "a step")
            self._on_done()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception, what: str) -> HeadstartError:
        self._failure = error if isinstance(error, HeadstartError) else worker_error(error, what)
        return self._failure


def _warm_up_batches(pool: KVPool, max_pages: int) -> list[tuple[Row, ...]]:
    """Chunks without and with a cached prefix, alone and beside a decode row, drawn from in both ways."""
    page_size, room = pool.layout.page_size, pool.num_pages * pool.layout.page_size
    batches = []
    for num_tokens in WARM_UP_TOKENS:
        if 2 * num_tokens + page_size > room or pages_for(2 * num_tokens, page_size) > max_pages:
            break
        pages = int32_array(np.arange(pages_for(2 * num_tokens, page_size)))
        other = int32_array([len(pages)])
        tokens = int32_array(np.zeros(num_tokens))
        beside = Row(1, tokens[:1], 0, other, _spec(SamplingParams(temperature=0.0), tokens[:1]))
        batches.append((Row(0, tokens, 0, pages), beside))
        batches.append((Row(0, tokens, num_tokens, pages, _spec(SamplingParams(top_p=0.9), tokens)),))
    return batches


def _spec(params: SamplingParams, context: NDArray[np.int32]) -> SampleSpec:
    return SampleSpec(params, 0, 0, context, len(context))
