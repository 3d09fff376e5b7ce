"""A device without content: outputs are a function of seed, choice and index, and steps can be skipped."""

import pytest
from msgspec import structs

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.sim.clock import VirtualClock
from headstart.sim.synthetic_executor import TAPE_LEN, SyntheticExecutor, TokenTape

REQUEST = Request(ChoiceRef("r", 1), int32_array((1,)), SamplingParams(seed=11), StopCriteria(8), b"", 1.0)


def spec(index: int, banned: tuple[int, ...] = ()) -> SampleSpec:
    return SampleSpec(REQUEST.sampling, 1, index, int32_array((1,)), 1, banned)


def test_one_by_one_and_together_the_same_tokens_are_read() -> None:
    tape = TokenTape(1000)
    assert tape.read(REQUEST, 3, 5).tolist() == [tape.sample(spec(index), index) for index in range(3, 8)]


def test_outputs_depend_on_seed_and_choice() -> None:
    tape = TokenTape(1000)
    others = (
        structs.replace(REQUEST, sampling=SamplingParams(seed=12)),
        structs.replace(REQUEST, ref=ChoiceRef("r", 2)),
    )
    mine = tape.read(REQUEST, 0, 20).tolist()
    assert all(tape.read(other, 0, 20).tolist() != mine for other in others)


def test_the_tape_begins_again_at_its_end() -> None:
    tape = TokenTape(1000)
    long = tape.read(REQUEST, 0, TAPE_LEN + 2).tolist()
    assert len(long) == TAPE_LEN + 2
    assert long[:2] == long[-2:] == [tape.sample(spec(i), i) for i in (TAPE_LEN, TAPE_LEN + 1)]


def test_a_banned_id_is_not_drawn() -> None:
    tape = TokenTape(50)
    first = tape.sample(spec(0), 0)
    assert tape.sample(spec(0, banned=(first,)), 0) != first


def test_a_skipped_step_takes_its_time_and_its_token() -> None:
    clock = VirtualClock()
    executor = SyntheticExecutor(TokenTape(1000), lambda shape: 0.1 * shape.context_tokens, 4, clock)
    executor.launch(Batch(7, (Row(0, int32_array((1,)), 3, int32_array((0, 1)), spec(2)),)))
    assert executor.finish_at == pytest.approx(0.4)
    assert [next(executor.times) for _ in range(3)] == pytest.approx([0.5, 0.6, 0.7])
    executor.skip(2, launched_at=0.9, finish_at=1.5)
    assert executor.poll() is None
    clock.advance_to(1.5)
    output = executor.poll()
    assert output is not None
    assert (output.step_id, output.elapsed_s) == (7, pytest.approx(0.6))
    assert [sampled.token_ids[0] for sampled in output.sampled] == TokenTape(1000).read(REQUEST, 4, 1).tolist()
