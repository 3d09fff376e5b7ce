"""The cyclic collector while a cluster runs: a simulation makes many objects and hardly any cycles, so there is nothing
to look for all the time. A cluster as a whole is one big cycle, and is collected before the next one runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NUM_YOUNG = 100_000
"""New objects, less those that are gone, between two looks at them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """For a process that simulates and does nothing else meanwhile."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(NUM_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
