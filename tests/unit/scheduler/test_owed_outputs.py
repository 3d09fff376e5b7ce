"""Outputs of steps that were taken in leaps are there for whoever looks: nobody can tell them from those of passes."""

from collections.abc import Callable

import numpy as np
import pytest
from decode_rig import Rig

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, Row
from headstart.core.request import ChoiceRef, Request

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


def leapt(rig: Blank) -> None:
    """In two leaps."""
    scheduler = rig.scheduler
    free = scheduler.num_free_steps(scheduler.num_row_steps(draw))
    assert free >= STEPS
    for num_steps in (3, STEPS - 3):
        scheduler.leap(num_steps, draw, rig.now, rig.now)
    batch = rig._launched
    assert batch is not None
    rig._launched = Batch(batch.step_id + STEPS, batch.rows)


def cancels(rig: Blank) -> object:
    rig.cancel(ChoiceRef("a"))
    return [(type(message).__name__, message.ref, message.stats) for _, message in rig.mail[-1:]]


def admits(rig: Blank) -> object:
    rig.submit("c", range(200, 216), max_new=10)
    rig.advance()
    return dict(rig.scheduler.states())


def says_all(rig: Blank) -> object:
    rig.scheduler.settle()
    sequences = [rig.scheduler.sequence(ref) for ref in rig.scheduler.launched_refs()]
    return [(sequence.num_outputs, sequence.outputs(0, sequence.num_outputs)) for sequence in sequences]


def loads(rig: Blank) -> object:
    load = rig.scheduler.load()
    return [getattr(load, name) for name in load.__struct_fields__]


@pytest.mark.parametrize("look", [cancels, admits, says_all, loads])
@pytest.mark.parametrize("num_pages", range(18, 24))
def test_a_look_after_a_leap_sees_what_it_would_after_the_steps(look: Callable[[Blank], object], num_pages: int):
    one, other = world(num_pages), world(num_pages)
    stepped(one)
    leapt(other)
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
