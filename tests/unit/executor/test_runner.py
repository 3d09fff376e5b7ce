"""Launch, poll and close; the pool; settings."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headstart.attention.row import AttentionRow
from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Row, SampleSpec
from headstart.core.errors import InvariantError, WorkerError
from headstart.core.kv_layout import KVLayout
from headstart.executor.build import ExecutorConfig, choose_dtype, make_executor, make_kv_spec
from headstart.executor.pool import KVPool
from headstart.executor.runner import StepRunner, TorchExecutor
from headstart.model.attention_hook import StepAttention
from headstart.model.source import WeightSource
from tests.support.executors import GREEDY, write_small_model


@pytest.fixture
def config(tmp_path: Path) -> ExecutorConfig:
    return ExecutorConfig(WeightSource(write_small_model(tmp_path, "llama"), "dummy"), 16, num_pages=32)


@pytest.fixture
def executor(config: ExecutorConfig) -> Iterator[TorchExecutor]:
    executor = make_executor(config)
    yield executor
    executor.close()


def row(row_id: int = 0) -> Row:
    return Row(row_id, int32_array([5]), 0, int32_array([3]), SampleSpec(GREEDY, 0, 0, int32_array([5]), 1))


def finish(executor: TorchExecutor) -> BatchOutput:
    while (output := executor.poll()) is None:
        time.sleep(0.001)
    return output


class BrokenAttention:
    def begin(self, rows: Sequence[AttentionRow]) -> StepAttention:
        raise RuntimeError("the device is gone")


def test_an_output_is_handed_out_once(executor: TorchExecutor) -> None:
    assert executor.poll() is None
    executor.launch(Batch(1, (row(8),)))
    output = finish(executor)
    assert (output.step_id, [one.row_id for one in output.sampled]) == (1, [8])
    assert output.elapsed_s > 0
    assert executor.poll() is None


def test_one_step_is_in_flight_at_most(executor: TorchExecutor) -> None:
    executor.launch(Batch(1, (row(),)))
    with pytest.raises(InvariantError):
        executor.launch(Batch(2, (row(),)))
    assert finish(executor).step_id == 1


def test_an_empty_batch_and_rows_without_sampling_are_steps_too(executor: TorchExecutor) -> None:
    executor.launch(Batch(1, ()))
    assert finish(executor).sampled == ()
    executor.launch(Batch(2, (Row(0, int32_array([1, 2, 3]), 0, int32_array([0])),)))
    assert finish(executor).sampled == ()


def test_a_failed_step_is_a_worker_error_for_good(executor: TorchExecutor) -> None:
    runner = StepRunner(executor.model, executor.pool, BrokenAttention())
    broken = TorchExecutor(runner, num_threads=1)
    broken.start()
    broken.launch(Batch(1, (row(),)))
    with pytest.raises(WorkerError, match="the device is gone") as raised:
        finish(broken)
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(WorkerError):
        broken.poll()
    broken.close()


def test_close_waits_for_the_step_and_may_be_repeated(executor: TorchExecutor) -> None:
    executor.launch(Batch(1, (row(),)))
    executor.close()
    executor.close()
    assert finish(executor).step_id == 1
    with pytest.raises(InvariantError):
        executor.launch(Batch(2, (row(),)))


def test_warming_up_leaves_the_executor_idle(executor: TorchExecutor) -> None:
    executor.warm_up(40)
    executor.launch(Batch(1, (row(),)))
    assert finish(executor).step_id == 1


def test_a_page_is_one_block_of_the_region() -> None:
    pool = KVPool.allocate(KVLayout.full(4, 3, 2, 8, "float32"), 6, "cpu")
    region = pool.region
    assert region.address == pool.data.data_ptr()
    assert region.page_bytes == 3 * 2 * 2 * 4 * 8 * 4
    for page in range(6):
        assert pool.data[page].is_contiguous()
        assert pool.data[page].data_ptr() == region.address + page * region.page_bytes


def test_a_large_pool_is_reserved_at_once() -> None:
    started = time.process_time()  # a page that is touched costs its process time
    pool = KVPool.allocate(KVLayout.full(16, 30, 3, 64, "float32"), 5_000, "cpu")
    assert pool.region.num_pages == 5_000
    assert time.process_time() - started < 1.0


def test_auto_is_a_rule_that_two_workers_of_a_machine_agree_on() -> None:
    assert choose_dtype("auto", "cpu") == choose_dtype("auto", "cpu")
    assert choose_dtype("auto", "cuda") == "bfloat16"
    with pytest.raises(WorkerError, match="float7"):
        choose_dtype("float7", "cpu")


def test_the_kv_spec_names_what_peers_must_share(config: ExecutorConfig, executor: TorchExecutor) -> None:
    spec = make_kv_spec(config)
    assert spec.layout == executor.pool.layout == KVLayout.full(16, 4, 2, 16, str(spec.layout.dtype))
    assert spec.layout.page_bytes == executor.pool.region.page_bytes
