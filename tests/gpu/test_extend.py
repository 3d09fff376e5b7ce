"""Chunks of prompts over a cached prefix: the paged kernel, and gathering with a dense kernel."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import build_plan
from headstart.attention.triton_attention import Partials, PlannedAttention, RowTables
from headstart.attention.triton_extend import GatheredExtend
from tests.gpu.paged import Batch, Spec, Tree, assert_close, lay_out, num_sms

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


def gathered(batch: Batch, prefix_pages: int) -> torch.Tensor:
    """The same rows, their common prefix gathered."""
    spec = batch.spec
    prefix = prefix_pages * spec.page
    tables = [table[prefix_pages:] for table in batch.tables]
    plan = build_plan(tables, batch.starts - prefix, batch.q_lens, spec.tiling(max_chunk=1 << 20))
    device_plan = DevicePlan(batch.num_tokens, len(plan.items), "cuda")
    device_plan.upload(plan)
    partials = Partials.empty(spec.heads, plan.num_slots, "cuda")
    paged = PlannedAttention(spec.heads, spec.tile, partials, num_sms("cuda"), causal=True)
    rows = RowTables(batch.rows.pages[:, prefix_pages:], batch.rows.kv_lens - prefix)
    pages = torch.from_numpy(np.ascontiguousarray(batch.tables[0][:prefix_pages])).cuda()
    out = torch.full_like(batch.q, float("nan"))
    return GatheredExtend(spec.heads, paged)(batch.q, batch.kv, pages, rows, device_plan, out)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gathering_a_prefix_that_rows_share(dtype, group, head_dim):
    spec = Spec(group=group, head_dim=head_dim, dtype=dtype, tile_rows=64, block=64 if head_dim < 256 else 32)
    batch = lay_out(spec, Tree([(-1, 9)], [(0, 200), (0, 90), (0, 64)]), q_lens=[150, 90, 30])
    assert_close(batch, gathered(batch, prefix_pages=9))
