"""Decode rows keep their slots, and only what changed of their page tables is uploaded."""

import random

import numpy as np

from headstart.core.arrays import Int32Array, int32_array
from headstart.executor.cuda.slots import DecodeSlots, flatten

WIDTH = 40


class Device:
    """The table buffer as the device would hold it."""

    def __init__(self) -> None:
        self.slots = DecodeSlots()
        self.table = np.full((16, WIDTH), -1, np.int32)
        self.num_uploaded = 0

    def step(self, tables: list[Int32Array]) -> list[int]:
        slots, updates = self.slots.assign(tables)
        if updates:
            places, pages = flatten(updates, WIDTH)
            self.table.reshape(-1)[places] = pages
            self.num_uploaded += len(pages)
        assert sorted(slots) == list(range(len(tables)))
        for slot, table in zip(slots, tables, strict=True):
            assert np.array_equal(self.table[slot, : len(table)], table)
            assert self.slots.tables[slot] is table
        return slots


def fresh(first: int, num_pages: int) -> Int32Array:
    return int32_array(range(first, first + num_pages))


def test_a_step_with_the_same_rows_uploads_nothing() -> None:
    device, tables = Device(), [fresh(100 * i, 5) for i in range(6)]
    before = device.step(tables)
    device.num_uploaded = 0
    assert device.step(tables) == before
    assert device.num_uploaded == 0


def test_rows_that_grow_in_one_step_keep_their_slots_and_upload_a_page_each() -> None:
    device, tables = Device(), [fresh(100 * i, 5) for i in range(6)]
    before = device.step(tables)
    device.num_uploaded = 0
    tables = [int32_array([*table, 900 + i]) if i in (1, 2, 5) else table for i, table in enumerate(tables)]
    assert device.step(tables) == before
    assert device.num_uploaded == 3


def test_a_row_that_leaves_moves_no_more_than_one_other() -> None:
    device, tables = Device(), [fresh(100 * i, 5) for i in range(6)]
    before = device.step(tables)
    device.num_uploaded = 0
    left = tables[:2] + tables[3:]
    after = device.step(left)
    assert sum(a != b for a, b in zip(after, before[:2] + before[3:], strict=True)) == 1
    assert device.num_uploaded == 5


def test_a_table_whose_shared_pages_were_replaced_is_uploaded_whole() -> None:
    device, tables = Device(), [fresh(0, 5), fresh(100, 5)]
    device.step(tables)
    device.num_uploaded = 0
    device.step([int32_array([50, 1, 2, 3, 4, 7]), tables[1]])
    assert device.num_uploaded == 6


def test_rows_with_one_table_between_them_have_two_slots() -> None:
    device, table = Device(), fresh(0, 5)
    device.step([table, table])
    device.step([table, table, fresh(10, 2)])
    device.step([table])


def test_any_sequence_of_changes_leaves_the_device_with_the_rows_tables() -> None:
    rng, device, tables, next_page = random.Random(0), Device(), [], 0
    for _ in range(500):
        for row in range(len(tables) - 1, -1, -1):
            if rng.random() < 0.1:
                del tables[row]
            elif rng.random() < 0.2 and len(tables[row]) < WIDTH:
                tables[row] = int32_array([*tables[row], next_page])
                next_page += 1
        while len(tables) < 12 and rng.random() < 0.5:
            shared = tables[0][: rng.randrange(3)] if tables else []
            tables.append(int32_array([*shared, next_page, next_page + 1]))
            next_page += 2
        if rng.random() < 0.1:
            rng.shuffle(tables)
        device.step(tables)
