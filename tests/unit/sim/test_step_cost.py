"""A step's shape counts what its time may depend on."""

from collections.abc import Iterator
from itertools import islice

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.core.request import SamplingParams
from headstart.sim.cost import StepShape, linear_cost, shape_of, times_of

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
    assert shape_of(Batch(1, (row(3, 1, (5, 2)), row(3, 1, (6, 3)))), page_size=4).unique_tokens == 8


def test_a_chunk_pairs_each_query_with_every_key_before_it() -> None:
    shape = shape_of(Batch(1, (row(4, 3, (0, 1), samples=False),)), page_size=4)
    assert shape == StepShape(0, 3, 7, 7, 5 + 6 + 7)


def test_rows_that_decode_read_one_token_more_each_step() -> None:
    one_later = shape_of(Batch(1, (row(10, 1, (5, 2, 7)), row(6, 1, (5, 3)))), page_size=4)
    assert shape_of(Batch(1, (row(9, 1, (5, 2, 7)), row(5, 1, (5, 3)))), page_size=4).after(1) == one_later


def test_the_times_of_steps_in_a_row_are_those_of_their_shapes() -> None:
    def cost(shape: StepShape) -> float:
        return shape.num_new + shape.unique_tokens / 1000

    assert list(islice(times_of(cost)(StepShape(2, 2, 50, 40, 50)), 3)) == [2.040, 2.042, 2.044]
    assert list(islice(times_of(linear_cost(1.0, 0.5))(StepShape(0, 4, 4, 4, 10)), 2)) == [3.0, 3.0]


class Foreseeing:
    def __call__(self, shape: StepShape) -> float:
        return 1.0

    def times(self, shape: StepShape) -> Iterator[float]:
        return iter((1.0, 2.0))


def test_a_cost_that_has_a_quicker_way_is_asked_for_it() -> None:
    assert list(times_of(Foreseeing())(StepShape(1, 1, 1, 1, 1))) == [1.0, 2.0]
