"""TorchExecutor: runs steps on a thread of its own, so that the worker's loop stays responsive.

    idle ──launch──► running ──step ends──► done ──poll──► idle
                        └────step raises───► failed ──poll raises WorkerError──► failed (for good)
    every state ──close──► closed

The thread owns the device between launch and the end of the step; the loop's side only exchanges one item with it at
a time. torch releases the interpreter lock while it computes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headstart.attention.torch_cpu import AttentionRow
from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Row, Sampled
from headstart.core.errors import InvariantError, WorkerError
from headstart.core.layout import PoolRegion, pages_for
from headstart.executor.drafts import accepted
from headstart.executor.packing import pack
from headstart.executor.pool import KVPool
from headstart.executor.sampler import sample
from headstart.model.hook import STEP_KEYWORD, StepAttention


class AttentionBackend(Protocol):
    """Plans one step's attention over the pool."""

    def begin(self, rows: Sequence[AttentionRow]) -> StepAttention: ...


@dataclass(frozen=True, slots=True)
class StepRunner:
    """One step from batch to output, on the calling thread."""

    model: PreTrainedModel
    pool: KVPool
    attention: AttentionBackend

    def run(self, batch: Batch) -> BatchOutput:
        started = time.perf_counter()
        if not batch.rows:
            return BatchOutput(batch.step_id)
        with torch.inference_mode():
            packed = pack(batch, str(self.pool.data.device))
            forward = {
                "input_ids": packed.input_ids,
                "position_ids": packed.position_ids,
                "use_cache": False,
                STEP_KEYWORD: self.attention.begin(packed.rows),
            }
            if packed.tasks:
                logits = self.model(**forward, logits_to_keep=packed.logits_to_keep).logits[0]
                sampled = _per_row(batch, sample(logits, packed.tasks))
            else:
                self.model.base_model(**forward)
                sampled = ()
        return BatchOutput(batch.step_id, sampled, time.perf_counter() - started)


def _per_row(batch: Batch, drawn: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """What each sampled row drew, of which `num_drafts` + 1 positions in a row are one row's."""
    found, first = [], 0
    for row in batch.rows:
        if row.sample is not None:
            found.append(accepted(row, drawn[first : first + row.num_drafts + 1]))
            first += row.num_drafts + 1
    return tuple(found)


class TorchExecutor:
    """See `headstart.core.batch.DeviceExecutor`. `on_done` is called on the executor's thread when a step has ended."""

    def __init__(self, runner: StepRunner, num_threads: int, on_done: Callable[[], None] | None = None) -> None:
        self.pool = runner.pool
        self.model = runner.model
        self._runner = runner
        self._num_threads = num_threads
        self._on_done = on_done or (lambda: None)
        self._inbox: SimpleQueue[Batch | None] = SimpleQueue()
        self._outbox: SimpleQueue[BatchOutput | BaseException] = SimpleQueue()
        self._running = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Once, before the first launch."""
        self._thread = threading.Thread(target=self._serve, name="executor", daemon=True)
        self._thread.start()

    @property
    def max_steps_in_flight(self) -> int:
        return 1

    def launch(self, batch: Batch) -> None:
        if self._running:
            raise InvariantError(f"step {batch.step_id} launched while another is in flight")
        if self._thread is None:
            raise InvariantError("the executor is not started or already closed")
        if any(row.pending is not None for row in batch.rows):
            raise InvariantError(f"step {batch.step_id} waits for a token of a step that has ended")
        self._running = True
        self._inbox.put(batch)

    def poll(self) -> BatchOutput | None:
        if self._failure is not None:
            raise self._failure
        try:
            outcome = self._outbox.get_nowait()
        except Empty:
            return None
        if isinstance(outcome, BatchOutput):
            self._running = False
            return outcome
        self._failure = outcome if isinstance(outcome, InvariantError) else _worker_error(outcome)
        raise self._failure

    def close(self) -> None:
        """Wait for the step in flight, then end the thread. Safe to call again."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    @property
    def region(self) -> PoolRegion:
        return self.pool.region

    def host_pages(self) -> NDArray[np.uint8] | None:
        return self.pool.host_bytes()

    def warm_up(self, num_tokens: int = 32) -> None:
        """Run a prompt and a few decode rows through pages 0.., before any of them is in use. Not concurrently with
        launch; afterwards the first request finds code, buffers and weights in memory."""
        page_size, num_pages = self.pool.layout.page_size, self.pool.num_pages
        num_tokens = min(num_tokens, num_pages * page_size - 1)
        pages = int32_array(np.arange(pages_for(num_tokens + 1, page_size)))
        tokens = int32_array(np.zeros(num_tokens))
        for step_id, row in enumerate((Row(0, tokens, 0, pages), Row(0, tokens[:1], num_tokens, pages))):
            self.launch(Batch(-1 - step_id, (row,)))
            while self.poll() is None:
                time.sleep(0.001)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (batch := self._inbox.get()) is not None:
            try:
                self._outbox.put(self._runner.run(batch))
            except BaseException as error:
                self._outbox.put(error)
            self._on_done()


def _worker_error(error: BaseException) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    wrapped = WorkerError(f"a step failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
