"""Steps that fast-forward applies leave the scheduler as the same steps in passes do."""

from collections.abc import Callable

import numpy as np
import pytest

from headstart.core.arrays import Int32Array
from headstart.core.batch import Row
from headstart.core.request import ChoiceRef, Request
from headstart.sim.fast_forward import FreeSteps
from tests.support.decode_rig import Rig

STEPS = 7


def draw(request: Request, first: int, count: int) -> Int32Array:
    """What `count_up` says after the prompt."""
    return ((int(request.prompt[-1]) + 1 + first + np.arange(count)) % 1000).astype(np.int32)


class Blank(Rig):
    """Its device computes no KV: rows read nothing."""

    def _compute(self, row: Row) -> None:
        pass


def world(num_pages: int = 64) -> Blank:
    rig = Blank(num_pages=num_pages, page_size=4, local_prefill_tokens=100, num_reserved_decode_tokens=8)
    rig.submit("a", range(5), max_new=60)
    rig.submit("b", range(100, 111), max_new=60)
    rig.step()
    rig.advance()
    rig.launch()
    return rig


def stepped(rig: Blank) -> None:
    for _ in range(STEPS):
        rig.land()
        rig.advance()
        rig.launch()


def fast_forwarded(rig: Blank) -> None:
    """In two parts."""
    steps = FreeSteps(rig.scheduler.queues, draw)
    steps.read_rows()
    assert steps.count() >= STEPS
    for num_steps in (3, STEPS - 3):
        steps.apply(num_steps, rig.now)


def cancels(rig: Blank) -> object:
    rig.cancel(ChoiceRef("a"))
    return [(type(message).__name__, message.ref, message.stats) for _, message in rig.mail[-1:]]


def admits(rig: Blank) -> object:
    rig.submit("c", range(200, 216), max_new=10)
    rig.advance()
    return dict(rig.scheduler.states())


def says_all(rig: Blank) -> object:
    sequences = [rig.scheduler.sequence(ChoiceRef(name)) for name in ("a", "b")]
    return [(sequence.num_outputs, sequence.outputs(0, sequence.num_outputs)) for sequence in sequences]


def loads(rig: Blank) -> object:
    load = rig.scheduler.load()
    return [getattr(load, name) for name in load.__struct_fields__]


@pytest.mark.parametrize("look", [cancels, admits, says_all, loads])
@pytest.mark.parametrize("num_pages", range(18, 24))
def test_fast_forwarded_steps_leave_what_passes_would(look: Callable[[Blank], object], num_pages: int):
    one, other = world(num_pages), world(num_pages)
    stepped(one)
    fast_forwarded(other)
    assert look(one) == look(other)
    assert next_rows(one) == next_rows(other)
    assert loads(one) == loads(other)


def next_rows(rig: Blank) -> object:
    """The step after the one in flight, whose rows say one and the same token."""
    rig.model = lambda row: 500
    rig.land()
    rig.advance()
    batch = rig.launch()
    assert batch is not None
    return [
        (row.tokens.tolist(), row.start, row.pages.tolist(), row.sample.context.tolist())
        for row in batch.rows
        if row.sample is not None
    ]
