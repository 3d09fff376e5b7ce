"""Chunks of prompts over a cached prefix: the paged kernel, and gathering with a dense kernel."""

import pytest
import torch

pytest.importorskip("triton")

from headstart.attention.chunk_attention import DenseRules
from headstart.attention.triton_extend import PieceSizes
from tests.gpu.paged import Spec, Tree, assert_close, lay_out, run_chunks

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 64])
def test_chunks_over_a_shared_prefix(dtype, group, head_dim, page):
    block = 64 if head_dim < 256 else 32
    spec = Spec(group=group, head_dim=head_dim, page=page, dtype=dtype, tile_rows=64, block=block)
    batch = lay_out(spec, Tree([(-1, 5)], [(0, 130), (0, 1), (0, 70), (-1, 33)]), q_lens=[100, 1, 70, 33])
    assert_close(batch, batch.run())


@pytest.mark.parametrize("q_len", [2, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("cached", [0, 1, 64, 129])
def test_any_chunk_over_any_cached_length(q_len, cached):
    spec = Spec(tile_rows=128, warps=8)
    batch = lay_out(spec, Tree([], [(-1, cached + q_len)]), q_lens=[q_len])
    assert_close(batch, batch.run())
    assert_close(batch, batch.run(max_chunk=1 << 20))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gathering_prefixes_that_rows_share_and_own_keys(dtype, group, head_dim):
    spec = Spec(group=group, head_dim=head_dim, dtype=dtype)
    tree = Tree([(-1, 9), (-1, 6)], [(0, 200), (1, 80), (0, 90), (0, 64), (-1, 33)])
    batch = lay_out(spec, tree, q_lens=[200, 80, 80, 30, 33])
    sizes = PieceSizes(keys=(4 * spec.page, spec.page), queries=(128, 64), own_step=64)
    for own_new in (30, 100, 1000):
        assert_close(batch, run_chunks(batch, DenseRules(1, 1, own_new, sizes)))
        assert_close(batch, run_chunks(batch, DenseRules(10_000, 1, own_new, sizes)))


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_long_chunks_by_the_measured_rules(dtype):
    tree = Tree([(-1, 70)], [(0, 1500), (0, 100), (-1, 1100), (-1, 400)])
    batch = lay_out(Spec(dtype=dtype), tree, q_lens=[1500, 90, 1100, 400])
    assert_close(batch, run_chunks(batch))
