"""The Triton kernels at small shapes in Triton's interpreter: what they compute, not how fast.

Runs in a process of its own, TRITON_INTERPRET=1 being read when Triton is imported:
`tests/unit/attention/test_triton_interpret.py` starts it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from headstart.attention.chunk_attention import ChunkRow, DenseRules, prefix_groups
from headstart.attention.triton_extend import PieceSizes, cut
from tests.gpu.paged import NO_SHARING, Spec, Tree, assert_close, lay_out, run_chunks

FP8 = torch.float8_e4m3fn
HALF = Spec(kv_heads=1, group=2, head_dim=16, page=16, dtype=torch.float16, device="cpu", block=16)
EIGHT_BIT = Spec(kv_heads=2, group=5, head_dim=32, page=16, dtype=FP8, device="cpu", block=16)
WIDE_EIGHT_BIT = replace(EIGHT_BIT, tile_rows=64)
TREE = Tree([(-1, 2), (0, 1)], [(0, 20), (1, 1), (1, 17)])
CHUNK = {"min_chunk": 32, "max_chunk": 32, "exact_chunk": 32}


@triton.jit
def count_kernel(out_ptr, n_ptr):
    for i in range(tl.load(n_ptr)):
        tl.store(out_ptr + i, i)


def interpreter_runs() -> bool:
    """Triton 3.6's does not with numpy 2.4: it cannot loop up to a number that was loaded."""
    out = torch.zeros(2, dtype=torch.int32)
    try:
        count_kernel[(1,)](out, torch.tensor([2], dtype=torch.int32))
    except Exception:
        return False
    return out.tolist() == [0, 1]


pytestmark = pytest.mark.skipif(not interpreter_runs(), reason="this Triton's interpreter does not run with this numpy")


@pytest.mark.parametrize("spec", [HALF, EIGHT_BIT, WIDE_EIGHT_BIT], ids=["fp16", "fp8", "wide fp8"])
def test_grouped_decode_matches_the_reference(spec):
    batch = lay_out(spec, TREE)
    out = batch.run(padding=1, **CHUNK)
    assert_close(batch, out[:-1])
    assert (out[-1] == 0).all()


def test_plain_decode_matches_the_reference():
    batch = lay_out(HALF, TREE)
    assert_close(batch, batch.run_ungrouped(chunk=32))


def test_deterministic_grouped_rows_equal_ungrouped_rows_bit_for_bit():
    batch = lay_out(HALF, TREE)
    grouped = batch.run(deterministic=True, **CHUNK)
    assert torch.equal(grouped, batch.run(deterministic=True, **CHUNK, min_share=NO_SHARING))


def test_a_chunk_and_a_decode_row_on_one_prefix():
    batch = lay_out(HALF, Tree([(-1, 2)], [(0, 20), (0, 1)]), q_lens=[11, 1])
    assert_close(batch, batch.run(**CHUNK))


@pytest.mark.parametrize("spec", [HALF, replace(EIGHT_BIT, group=2)], ids=["fp16", "fp8"])
def test_chunks_with_their_prefixes_and_own_keys_gathered_and_not(spec):
    page = spec.page
    tree = Tree([(-1, 4), (-1, 1)], [(0, 20), (1, 5), (0, 9), (-1, 3), (-1, 25)])
    batch = lay_out(spec, tree, q_lens=[20, 5, 4, 3, 25])
    sizes = PieceSizes(keys=(3 * page, page), queries=(16, 8), own_step=24)
    for rules in (
        DenseRules(9, 4 * page, own_new=20, sizes=sizes),
        DenseRules(1, page, own_new=1, sizes=sizes),
        DenseRules(1, page, own_new=99, sizes=sizes),
        DenseRules(1, page, own_new=99, sizes=replace(sizes, keys=(3 * page,))),
        DenseRules(99, 99, own_new=20, sizes=sizes),
        DenseRules(99, 99, own_new=99, sizes=sizes),
    ):
        assert_close(batch, run_chunks(batch, rules))


def test_cutting_into_few_sizes():
    assert list(cut(4500, (2048, 512))) == [(2048, 2048), (2048, 2048), (512, 404)]
    assert list(cut(10_240, (8192, 2048))) == [(8192, 8192), (2048, 2048)]
    assert list(cut(0, (8,))) == []


def test_rows_join_the_group_whose_prefix_is_mostly_theirs():
    pages = np.arange(100, dtype=np.int32)
    other = np.concatenate((pages[:5], pages[50:90]))
    rows = [
        ChunkRow(pages, 16 * 40, 3),
        ChunkRow(pages[:30], 16 * 25 + 7, 9),  # 25 of 40 pages in common
        ChunkRow(other, 16 * 40, 4),  # 5 of 40
        ChunkRow(pages, 16 * 4, 4),  # 4 of 25
    ]
    groups = [(group.rows, group.num_pages) for group in prefix_groups(rows, 16)]
    assert groups == [([0, 1], 25), ([2], 40), ([3], 4)]
