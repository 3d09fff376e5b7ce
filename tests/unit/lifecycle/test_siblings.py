"""Case I5: the choices of one request share a prompt, and no transfer of one of them is another's undoing."""

import pytest
from worlds import assert_right, make_world, prompt, settle, submit

from headstart.core.request import ChoiceRef, SamplingParams
from headstart.transfer.loopback import Fate, judge_nth

NUM_CHOICES = 4
WRITES = 7
"""Four chunks of the shared prompt and one tail for each sibling: whichever of them is hit."""


@pytest.mark.parametrize("fate", [Fate(fails=True), Fate(refused=True), Fate(num_notices=0)], ids=str)
@pytest.mark.parametrize("nth", range(WRITES))
def test_case_I5_four_choices_come_whole_whichever_of_their_transfers_fails(nth: int, fate: Fate) -> None:
    world = make_world()
    world.judge_writes(judge_nth({nth: fate}))
    sampling = SamplingParams(temperature=1.0, seed=9)
    siblings = [submit(world, prompt(58), 5, ref=ChoiceRef("n", j), sampling=sampling) for j in range(NUM_CHOICES)]
    settle(world)
    assert_right(*siblings)
    assert world.load("prefill-0")["calls"] >= NUM_CHOICES
    assert len({tuple(sibling.tokens) for sibling in siblings}) > 1
