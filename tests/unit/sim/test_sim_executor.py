"""The fake device notices what a real one would silently compute wrong."""

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.core.request import SamplingParams
from headstart.sim.clock import VirtualClock
from headstart.sim.cost import linear_cost
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.kv_fingerprints import ContextBook, Draw, oracle

PROMPT = int32_array(range(10))
PAGES = int32_array((5, 2, 7))
GREEDY = SamplingParams(temperature=0.0)


class Device:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pool = np.zeros((8, 4), dtype=np.uint64)
        self.executor = FakeExecutor(Model(ContextBook(), 97, 4, linear_cost(0.01, 0.0)), self.pool, self.clock)

    def step(self, *rows: Row) -> list[int]:
        self.executor.launch(Batch(1, rows))
        self.clock.advance_to(self.clock.now() + 0.01)
        output = self.executor.poll()
        assert output is not None
        return [sampled.token_ids[0] for sampled in output.sampled]


def row(start: int, end: int, pages: tuple[int, ...] | None = None, namespace: bytes = b"") -> Row:
    return Row(0, PROMPT[start:end], start, PAGES if pages is None else int32_array(pages), namespace=namespace)


def last_row(pages: tuple[int, ...] | None = None, context: tuple[int, ...] | None = None) -> Row:
    spec = SampleSpec(GREEDY, 0, 0, PROMPT if context is None else int32_array(context), 10)
    return Row(0, PROMPT[9:], 9, PAGES if pages is None else int32_array(pages), spec)


def test_a_prompt_in_chunks_samples_what_the_oracle_says() -> None:
    device = Device()
    device.step(row(0, 3))
    device.step(row(3, 9))
    assert device.step(last_row()) == oracle(PROMPT, 1, 97)


def test_a_prefix_of_another_sequence_is_read_right_wherever_it_ends() -> None:
    device = Device()
    device.step(row(0, 10))
    device.step(row(4, 9, pages=(5, 0, 1)))
    assert device.step(last_row(pages=(5, 0, 1))) == oracle(PROMPT, 1, 97)


def test_a_page_never_written_is_noticed() -> None:
    device = Device()
    device.step(row(0, 4))
    with pytest.raises(AssertionError, match="holds no KV"):
        device.step(row(8, 10))


def test_pages_in_the_wrong_order_are_noticed() -> None:
    device = Device()
    device.step(row(0, 9))
    with pytest.raises(AssertionError, match="another sequence"):
        device.step(last_row(pages=(2, 5, 7)))


def test_another_tenants_page_is_noticed() -> None:
    device = Device()
    device.step(row(0, 8))
    device.step(row(0, 8, pages=(0, 1), namespace=b"other"))
    device.step(row(8, 9))
    with pytest.raises(AssertionError, match="another sequence"):
        device.step(last_row(pages=(0, 2, 7)))


def test_kv_of_another_context_than_the_one_sampled_for_is_noticed() -> None:
    device = Device()
    device.step(row(0, 9))
    with pytest.raises(AssertionError, match="not that of the context"):
        device.step(last_row(context=(*range(9), 50)))


def test_a_write_into_a_page_that_a_step_reads_is_noticed() -> None:
    device = Device()
    device.step(row(0, 9))
    device.executor.launch(Batch(2, (last_row(),)))
    device.pool[2, 1] = 77
    device.clock.advance_to(1.0)
    with pytest.raises(AssertionError, match="changed while a step read it"):
        device.executor.poll()


def test_a_write_into_a_page_that_a_step_writes_is_noticed() -> None:
    device = Device()
    device.executor.launch(Batch(1, (row(0, 4),)))
    device.pool[5, 1] = 77
    device.clock.advance_to(1.0)
    with pytest.raises(AssertionError, match="written while a step wrote it"):
        device.executor.poll()


def test_reading_what_a_step_still_writes_is_noticed() -> None:
    device = Device()
    with pytest.raises(AssertionError, match="holds no KV"):
        device.step(row(0, 4), row(4, 8))


def test_two_rows_may_not_write_one_position() -> None:
    device = Device()
    with pytest.raises(AssertionError, match="same position"):
        device.step(row(0, 4), row(0, 4))


def test_a_step_takes_its_time() -> None:
    device = Device()
    device.executor.launch(Batch(1, (row(0, 4),)))
    assert device.executor.poll() is None
    device.clock.advance_to(device.executor.finish_at or 0.0)
    output = device.executor.poll()
    assert output is not None
    assert output.elapsed_s == pytest.approx(0.01)


def test_sampled_outputs_depend_on_seed_choice_and_index_and_on_nothing_else() -> None:
    def draw(seed: int, choice: int) -> list[int]:
        return oracle(PROMPT, 8, 97, draw=Draw(SamplingParams(seed=seed), choice))

    assert draw(1, 0) == draw(1, 0)
    assert len({tuple(draw(seed, choice)) for seed in range(3) for choice in range(3)}) == 9


def test_banned_ids_are_not_drawn_and_stop_ids_end() -> None:
    first = oracle(PROMPT, 1, 97)
    assert oracle(PROMPT, 5, 97, draw=Draw(stop_ids=tuple(first))) == first
    at_least = oracle(PROMPT, 5, 97, draw=Draw(stop_ids=tuple(first), min_new_tokens=3))
    assert len(at_least) >= 4 or at_least[-1] in first
    assert first[0] not in at_least[:3]
