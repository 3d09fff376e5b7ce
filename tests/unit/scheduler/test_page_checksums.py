"""What a page checksum depends on, and what it does not."""

import random

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.scheduler.checksums import CHECKSUM_BYTES, page_checksums
from headstart.transfer.digest import HostDigests

PAGE_SIZE, PAGE_BYTES, NUM_PAGES = 4, 96, 8
TOKENS = int32_array(range(100, 130))


def a_pool(salt: int) -> np.ndarray:
    return np.random.default_rng(salt).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)


def checksums_of(pool: np.ndarray, *pages: int, start: int = 8, tokens: np.ndarray = TOKENS) -> list[bytes]:
    checksums = page_checksums(HostDigests(pool).digest(int32_array(pages)), tokens, start, PAGE_SIZE)
    assert len(checksums) == CHECKSUM_BYTES * len(pages)
    return [checksums[at : at + CHECKSUM_BYTES] for at in range(0, len(checksums), CHECKSUM_BYTES)]


def test_the_same_kv_in_other_pages_of_another_pool_has_the_same_checksums():
    ours, theirs = a_pool(1), a_pool(2)
    theirs[[6, 0, 3]] = ours[[1, 2, 5]]
    assert checksums_of(ours, 1, 2, 5) == checksums_of(theirs, 6, 0, 3)


def test_a_chunk_has_checksums_as_its_pages_are_one_by_one():
    pool = a_pool(1)
    assert checksums_of(pool, 1, 2, start=8) == checksums_of(pool, 1, start=8) + checksums_of(pool, 2, start=12)


def test_any_bit_that_flips_changes_its_pages_checksum_and_no_other():
    pool, rng = a_pool(1), random.Random(3)
    before = checksums_of(pool, 1, 2, 5)
    for _ in range(200):
        byte, bit = rng.randrange(PAGE_BYTES), rng.randrange(8)
        pool[2, byte] ^= 1 << bit
        after = checksums_of(pool, 1, 2, 5)
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
        pool[2, byte] ^= 1 << bit
    assert checksums_of(pool, 1, 2, 5) == before


def test_a_page_at_another_position_has_another_checksum_even_where_the_tokens_are_alike():
    pool, alike = a_pool(1), int32_array([7] * 30)
    pool[2] = pool[1]
    assert len(set(checksums_of(pool, 1, 2, 1, tokens=alike))) == 3


@pytest.mark.parametrize("position", [8, 11])
def test_a_page_of_other_tokens_has_another_checksum(position: int):
    pool, other = a_pool(1), TOKENS.copy()
    other[position] += 1
    assert checksums_of(pool, 1, 2) != checksums_of(pool, 1, 2, tokens=other)
    assert checksums_of(pool, 1, 2)[1] == checksums_of(pool, 1, 2, tokens=other)[1]


def test_a_last_page_that_is_not_full_has_checksums_too():
    assert checksums_of(a_pool(1), 1, start=28) != checksums_of(a_pool(1), 1, start=28, tokens=TOKENS[:29])
