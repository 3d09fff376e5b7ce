"""What a page of KV consists of, in plain integers."""

import numpy as np
import pytest
from msgspec import msgpack, structs

from headstart.core.identity import PROTOCOL_VERSION, KVSpec, first_mismatch
from headstart.core.kv_layout import KVLayout, PageGroup, Part

LAYOUT = KVLayout.full(page_size=16, num_layers=3, kv_heads=4, head_dim=8, dtype="bfloat16")
SPEC = KVSpec(PROTOCOL_VERSION, "model", "rope", LAYOUT)


def test_bytes_and_strides_are_those_of_a_contiguous_array() -> None:
    pool = np.empty(LAYOUT.pool_shape(5), np.uint16)
    assert pool.shape == (5, 4, 3, 2, 16, 8)
    assert LAYOUT.page_bytes == pool[0].nbytes
    assert LAYOUT.token_bytes == pool[0].nbytes // 16
    assert LAYOUT.strides() == tuple(stride // pool.itemsize for stride in pool.strides)


def test_fp8_takes_half_the_bytes_of_bfloat16() -> None:
    assert 2 * KVLayout.full(16, 3, 4, 8, "fp8_e4m3").page_bytes == LAYOUT.page_bytes


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 2), (3, 1), (0, 4)])
def test_a_range_of_heads_is_one_run_of_a_page(first: int, count: int) -> None:
    page = np.arange(LAYOUT.page_bytes // 2, dtype=np.uint16).reshape(LAYOUT.page_shape)
    offset, num_bytes = LAYOUT.head_range(first, count)
    run = np.frombuffer(page.tobytes()[offset : offset + num_bytes], np.uint16)
    assert np.array_equal(run, page[first : first + count].ravel())


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (3, 2), (4, 1)])
def test_heads_that_a_page_does_not_have_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="of 4"):
        LAYOUT.head_range(first, count)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (KVLayout.full(4, 3, 4, 8, "bfloat16"), "page_size differs: 16 here, 4 there"),
        (KVLayout.full(16, 3, 4, 8, "fp8_e4m3"), "kv_dtype differs: 'bfloat16' here, 'fp8_e4m3' there"),
        (KVLayout.full(16, 2, 4, 8, "bfloat16"), "num_layers differs: 3 here, 2 there"),
        (KVLayout.full(16, 3, 2, 8, "bfloat16"), "num_kv_heads differs: 4 here, 2 there"),
        (KVLayout.full(16, 3, 4, 64, "bfloat16"), "head_dim differs: 8 here, 64 there"),
        (KVLayout(16, (*LAYOUT.groups, *LAYOUT.groups)), "num_groups differs: 1 here, 2 there"),
        (KVLayout(16, (structs.replace(LAYOUT.groups[0], span="window 128"),)), "span differs: 'full' here"),
    ],
)
def test_a_mismatch_names_what_differs_and_both_values(other: KVLayout, words: str) -> None:
    mismatch = first_mismatch(SPEC, structs.replace(SPEC, layout=other))
    assert mismatch is not None
    assert mismatch.startswith(words)
    assert LAYOUT.fingerprint != other.fingerprint


def test_equal_specs_match_after_travelling() -> None:
    there = msgpack.decode(msgpack.encode(SPEC), type=KVSpec)
    assert first_mismatch(SPEC, there) is None
    assert there.layout.fingerprint == LAYOUT.fingerprint
    assert first_mismatch(SPEC, structs.replace(there, rope="other")) == "rope differs: 'rope' here, 'other' there"


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (*LAYOUT.groups, *LAYOUT.groups),
        (structs.replace(LAYOUT.groups[0], span="window 128"),),
        (PageGroup(3, (Part("latent", 1, 576, "bfloat16"),)),),
        (PageGroup(3, (Part("k", 4, 192, "bfloat16"), Part("v", 4, 128, "bfloat16"))),),
    ],
)
def test_what_no_pool_can_store_yet_is_refused(groups: tuple[PageGroup, ...]) -> None:
    with pytest.raises(ValueError, match="not built"):
        KVLayout(16, groups).pool_shape(1)
