"""Two steps in flight on a simulated device, and rows that end in drafts: outputs and checks are those of one step and
one token at a time."""

import numpy as np
import pytest

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.batch import Batch, BatchOutput, PendingToken, Row, SampleSpec
from headstart.core.errors import InvariantError
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.sim.clock import VirtualClock
from headstart.sim.cost import linear_cost
from headstart.sim.drafter import SimDrafter
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.kv_fingerprints import ContextBook, Draw, oracle
from headstart.sim.synthetic_executor import SyntheticExecutor, TokenTape

PROMPT = int32_array(range(10))
PAGES = int32_array((5, 2, 7, 0))
GREEDY = SamplingParams(temperature=0.0)
STEP_S = 0.01


class Device:
    """Computes one sequence, whose prompt but for the last token is in its pages."""

    def __init__(self, max_steps: int = 2, sampling: SamplingParams = GREEDY) -> None:
        self.clock = VirtualClock()
        self.pool = np.zeros((8, 4), dtype=np.uint64)
        model = Model(ContextBook(), 97, 4, linear_cost(STEP_S, 0.0))
        self.executor = FakeExecutor(model, self.pool, self.clock, max_steps)
        self.sampling = sampling
        self.num_launched = 0
        self.launch(Row(0, PROMPT[:9], 0, PAGES))
        self.land()

    def launch(self, *rows: Row) -> int:
        self.num_launched += 1
        self.executor.launch(Batch(self.num_launched, rows))
        return self.num_launched

    def land(self) -> BatchOutput:
        assert self.executor.finish_at is not None
        self.clock.advance_to(self.executor.finish_at)
        output = self.executor.poll()
        assert output is not None
        return output

    def row(self, outputs: list[int], drafts: Int32Array | None = None) -> Row:
        """The next row of the sequence with these outputs."""
        context = int32_array([*PROMPT.tolist(), *outputs])
        tokens = context[-1:] if drafts is None else np.concatenate((context[-1:], drafts))
        num_drafts = 0 if drafts is None else len(drafts)
        return Row(0, tokens, len(context) - 1, PAGES, self.spec(context, len(outputs)), num_drafts=num_drafts)

    def pending(self, step_id: int, outputs: list[int]) -> Row:
        """The row after that of `step_id`, which draws the output after `outputs`."""
        context = int32_array([*PROMPT.tolist(), *outputs])
        spec = self.spec(context, len(outputs) + 1)
        return Row(0, int32_array(()), len(context), PAGES, spec, pending=PendingToken(step_id, 0))

    def spec(self, context: Int32Array, output_index: int) -> SampleSpec:
        return SampleSpec(self.sampling, 0, output_index, context, len(PROMPT))


def test_rows_that_wait_for_each_others_tokens_draw_what_the_oracle_says() -> None:
    device, outputs, expected = Device(), [], oracle(PROMPT, 5, 97)
    step_id = device.launch(device.row([]))
    for _ in range(4):
        step_id = device.launch(device.pending(step_id, outputs))
        outputs += device.land().sampled[0].token_ids
    assert [*outputs, *device.land().sampled[0].token_ids] == expected


def test_a_step_starts_when_the_one_before_it_ends() -> None:
    device = Device()
    began = device.clock.now()
    step_id = device.launch(device.row([]))
    device.launch(device.pending(step_id, []))
    device.clock.advance_to(began + 3 * STEP_S)
    first, second = device.executor.poll(), device.executor.poll()
    assert first is not None
    assert second is not None
    assert (first.step_id, second.step_id) == (step_id, step_id + 1)
    assert second.elapsed_s == pytest.approx(2 * STEP_S)
    assert device.executor.poll() is None


def test_no_more_steps_are_taken_than_may_be_in_flight() -> None:
    for max_steps in (1, 2):
        device = Device(max_steps)
        for first in range(max_steps):
            device.launch(Row(0, PROMPT[:4], 0, int32_array((first,)), namespace=b"other"))
        with pytest.raises(InvariantError, match="in flight"):
            device.launch(Row(0, PROMPT[:4], 0, int32_array((6,)), namespace=b"other"))


def test_a_write_into_what_the_second_step_reads_is_noticed_whenever_it_comes() -> None:
    for num_landed in (0, 1):
        device = Device()
        step_id = device.launch(device.row([]))
        device.launch(device.pending(step_id, []))
        if num_landed:
            device.land()
        device.pool[2, 1] = 77
        with pytest.raises(AssertionError, match="changed while a step read it"):
            device.land()


def test_a_write_into_what_the_second_step_writes_is_noticed() -> None:
    device = Device()
    step_id = device.launch(device.row([]))
    device.launch(device.pending(step_id, []))
    device.pool[7, 2] = 77
    device.land()
    with pytest.raises(AssertionError, match="written while a step wrote it"):
        device.land()


def test_two_steps_may_not_write_one_position() -> None:
    device = Device()
    device.launch(device.row([]))
    with pytest.raises(AssertionError, match="two steps in flight"):
        device.launch(device.row([]))


def test_the_second_step_may_not_write_what_the_first_reads() -> None:
    device = Device()
    device.launch(device.row([]))
    device.launch(Row(0, PROMPT[:4], 0, PAGES))
    with pytest.raises(AssertionError, match="changed while a step read it"):
        device.land()


def test_a_token_of_a_step_that_has_ended_is_not_waited_for() -> None:
    device = Device()
    step_id = device.launch(device.row([]))
    device.land()
    with pytest.raises(AssertionError, match="not in flight"):
        device.launch(device.pending(step_id, []))


def test_one_token_of_several_is_not_waited_for() -> None:
    device, expected = Device(), oracle(PROMPT, 1, 97)
    step_id = device.launch(device.row([], int32_array(expected)))
    with pytest.raises(AssertionError, match="one of several"):
        device.launch(device.pending(step_id, []))


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(seed=4), SamplingParams(seed=4, frequency_penalty=1.0)], ids=repr
)
def test_drafts_are_accepted_as_far_as_they_are_what_is_drawn(num_right: int, sampling: SamplingParams) -> None:
    device, expected = Device(sampling=sampling), oracle(PROMPT, 6, 97, draw=Draw(sampling))
    drafts = [token if index < num_right else (token + 1) % 97 for index, token in enumerate(expected[:3])]
    device.launch(device.row([], int32_array(drafts)))
    accepted = list(device.land().sampled[0].token_ids)
    assert accepted == expected[: num_right + 1]
    device.launch(device.row(accepted))
    assert device.land().sampled[0].token_ids == (expected[num_right + 1],)


def test_kv_of_rejected_drafts_is_nobodys() -> None:
    device, expected = Device(), oracle(PROMPT, 2, 97)
    wrong = (expected[0] + 1) % 97
    device.launch(device.row([], int32_array((wrong, 5))))
    device.land()
    with pytest.raises(AssertionError, match=r"another sequence|not that of the context"):
        device.launch(device.row(expected))


def request(seed: int = 0) -> Request:
    return Request(ChoiceRef("r"), PROMPT, GREEDY, StopCriteria(64), b"", 1.0)


def test_the_drafter_is_right_and_wrong_by_its_seed() -> None:
    expected = oracle(PROMPT, 16, 97)
    num_right: set[int] = set()
    num_guessed: set[int] = set()
    for seed in range(100):
        drafter = SimDrafter(seed, 97)
        drafts = drafter.propose(request(), PROMPT, 3).tolist()
        assert drafts == drafter.propose(request(), PROMPT, 3).tolist()
        num_guessed.add(len(drafts))
        num_right.add(sum(one == other for one, other in zip(drafts, expected, strict=False)))
    assert num_guessed == num_right == {0, 1, 2, 3}


def test_a_device_without_content_keeps_two_steps_in_flight_and_accepts_what_its_tape_says() -> None:
    clock, tape = VirtualClock(), TokenTape(97)
    executor = SyntheticExecutor(tape, linear_cost(STEP_S, 0.0), 4, clock, 2)
    expected = tape.read(request(), 0, 4).tolist()
    spec = SampleSpec(GREEDY, 0, 0, PROMPT, len(PROMPT))
    tokens = int32_array((9, expected[0], expected[1] + 1))
    executor.launch(Batch(1, (Row(0, tokens, 9, PAGES, spec, num_drafts=2),)))
    spec = SampleSpec(GREEDY, 0, 2, PROMPT, len(PROMPT))
    executor.launch(Batch(2, (Row(0, int32_array(()), 10, PAGES, spec, pending=PendingToken(1, 0)),)))
    with pytest.raises(InvariantError, match="2 in flight"):
        executor.launch(Batch(3, (Row(0, tokens, 9, PAGES, spec),)))
    clock.advance_to(2 * STEP_S)
    outputs = [executor.poll(), executor.poll()]
    drawn = [output.sampled[0].token_ids for output in outputs if output is not None]
    assert drawn == [tuple(expected[:2]), (expected[2],)]


def test_a_device_without_content_knows_which_steps_are_in_flight() -> None:
    executor = SyntheticExecutor(TokenTape(97), linear_cost(STEP_S, 0.0), 4, VirtualClock(), 2)
    spec = SampleSpec(GREEDY, 0, 1, PROMPT, len(PROMPT))
    with pytest.raises(InvariantError, match="not in flight"):
        executor.launch(Batch(2, (Row(0, int32_array(()), 10, PAGES, spec, pending=PendingToken(1, 0)),)))
