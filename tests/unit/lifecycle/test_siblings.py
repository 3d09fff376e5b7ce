"""Case I5: the choices of one request share a prompt, and no transfer of one of them is another's undoing."""

import pytest

from headstart.core.request import ChoiceRef, SamplingParams
from headstart.transfer.loopback import Fault, inject_nth
from tests.support.clusters import assert_right, make_cluster, prompt, settle, submit

NUM_CHOICES = 4
WRITES = 7
"""Four chunks of the shared prompt and one tail for each sibling: whichever of them is hit."""


@pytest.mark.parametrize("fault", [Fault(fails=True), Fault(refused=True), Fault(num_notices=0)], ids=str)
@pytest.mark.parametrize("nth", range(WRITES))
@pytest.mark.behaviour("I5")
def test_four_choices_come_whole_whichever_of_their_transfers_fails(nth: int, fault: Fault) -> None:
    cluster = make_cluster()
    cluster.inject_write_faults(inject_nth({nth: fault}))
    sampling = SamplingParams(temperature=1.0, seed=9)
    siblings = [submit(cluster, prompt(58), 5, ref=ChoiceRef("n", j), sampling=sampling) for j in range(NUM_CHOICES)]
    settle(cluster)
    assert_right(*siblings)
    assert cluster.load("prefill-0")["calls"] >= NUM_CHOICES
    assert len({tuple(sibling.tokens) for sibling in siblings}) > 1
