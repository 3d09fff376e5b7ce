"""Which decode row has which slot of the device's buffers, and what of its page table has to be uploaded.

Rows of a step fill slots [0, rows) without holes. A row keeps its slot as long as it can: a page table is recognised by
the identity of its array, which the scheduler replaces at every change, and a grown one by what it grew from. So a step
without changes uploads no tables, and one in which a row gets a page uploads that page.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array


class TableUpdate(NamedTuple):
    """Pages [first, len(pages)) of a slot's table are new on the device."""

    slot: int
    first: int
    pages: Int32Array


class DecodeSlots:
    """Slots of the rows that the last step had."""

    def __init__(self) -> None:
        self.tables: list[Int32Array] = []  # by slot; holding an array keeps its id its own
        self._slot_of: dict[int, int] = {}  # id of the array -> slot

    def assign(self, tables: Sequence[Int32Array]) -> tuple[list[int], list[TableUpdate]]:
        """The slot of each row of a step, given the rows' page tables, and what the device has to be told."""
        get = self._slot_of.get
        slots = [get(id(table), -1) for table in tables]
        num_rows = len(tables)
        if num_rows == len(self.tables) and -1 not in slots and len(set(slots)) == num_rows:
            return slots, []
        return slots, self._reassign(tables, slots)

    def _reassign(self, tables: Sequence[Int32Array], slots: list[int]) -> list[TableUpdate]:
        """Fill in `slots` where it is -1, taken or past the end."""
        num_rows, taken = len(tables), set[int]()
        for row, slot in enumerate(slots):
            if slot in taken or slot >= num_rows:
                slots[row] = -1
            elif slot >= 0:
                taken.add(slot)
        free = [slot for slot in range(num_rows) if slot not in taken]
        grown = {_tail(self.tables[slot]): slot for slot in free if slot < len(self.tables)}
        for row, slot in enumerate(slots):
            if slot < 0 and (former := grown.pop(_tail(tables[row][:-1]), None)) is not None:
                slots[row] = former
                taken.add(former)
        left = iter([slot for slot in free if slot not in taken])
        updates = []
        held = self.tables + [_NOTHING] * (num_rows - len(self.tables))
        for row, table in enumerate(tables):
            slot = slots[row] = slots[row] if slots[row] >= 0 else next(left)
            if held[slot] is not table:
                updates.append(TableUpdate(slot, _num_kept(held[slot], table), table))
                held[slot] = table
        self.tables = held[:num_rows]
        self._slot_of = {id(table): slot for slot, table in enumerate(self.tables)}
        return updates


def flatten(updates: Sequence[TableUpdate], width: int) -> tuple[NDArray[np.int64], Int32Array]:
    """Places in a flat table of `width` pages a slot, and the pages that go there."""
    places = [np.arange(slot * width + first, slot * width + len(pages)) for slot, first, pages in updates]
    return np.concatenate(places), np.concatenate([pages[first:] for _, first, pages in updates])


_NOTHING: Int32Array = np.empty(0, np.int32)


def _tail(table: Int32Array) -> tuple[int, int]:
    """What tells a table from others: its last page is written by one sequence alone."""
    return (len(table), int(table[-1])) if len(table) else (0, -1)


def _num_kept(held: Int32Array, table: Int32Array) -> int:
    """Leading pages of `table` that the slot holds already: all of the former table's, or none."""
    num_held = len(held)
    return num_held if num_held <= len(table) and np.array_equal(held, table[:num_held]) else 0
