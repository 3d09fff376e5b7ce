"""A step's shape counts what its time may depend on."""

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.core.request import SamplingParams
from headstart.sim.cost import StepShape, shape_of

GREEDY = SamplingParams(temperature=0.0)


def row(start: int, num_new: int, pages: tuple[int, ...], samples: bool = True) -> Row:
    tokens = int32_array(range(num_new))
    spec = SampleSpec(GREEDY, 0, 0, int32_array(range(start + num_new)), 1) if samples else None
    return Row(0, tokens, start, int32_array(pages), spec)


def test_a_decode_row_reads_its_context_and_its_own_token() -> None:
    assert shape_of(Batch(1, (row(9, 1, (5, 2, 7)),)), page_size=4) == StepShape(1, 1, 10, 10, 10)


def test_pages_that_rows_share_are_unique_once() -> None:
    batch = Batch(1, (row(9, 1, (5, 2, 7)), row(10, 1, (5, 2, 8)), row(5, 1, (5, 3))))
    shape = shape_of(batch, page_size=4)
    assert shape.context_tokens == 10 + 11 + 6
    assert shape.unique_tokens == shape.context_tokens - 3 * 4


def test_pages_allocated_ahead_are_not_read() -> None:
    assert shape_of(Batch(1, (row(3, 1, (5, 2)), row(3, 1, (6, 2)))), page_size=4).unique_tokens == 8


def test_a_chunk_pairs_each_query_with_every_key_before_it() -> None:
    shape = shape_of(Batch(1, (row(4, 3, (0, 1), samples=False),)), page_size=4)
    assert shape == StepShape(0, 3, 7, 7, 5 + 6 + 7)


def test_rows_that_decode_read_one_token_more_each_step() -> None:
    one_later = shape_of(Batch(1, (row(10, 1, (5, 2, 7)), row(6, 1, (5, 3)))), page_size=4)
    assert shape_of(Batch(1, (row(9, 1, (5, 2, 7)), row(5, 1, (5, 3)))), page_size=4).after(1) == one_later
