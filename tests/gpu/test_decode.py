"""Planned decode attention against a float64 reference, over adversarial shapes and trees."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Planner
from headstart.attention.triton_attention import Partials, PlannedAttention, RowTables
from tests.gpu.paged import NO_SHARING, Batch, Spec, Tree, assert_close, lay_out, num_sms, reference, reference_lse

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
TWO_GROUPS = Tree([(-1, 5), (-1, 3)], [(0, 100), (0, 1), (1, 64), (0, 65), (1, 63), (-1, 200)])
TREES = {
    "chain of 32": Tree([(i - 1, 1) for i in range(32)], [(i, 7) for i in range(32)]),
    "star": Tree([(-1, 6)], [(0, 1 + r) for r in range(40)]),
    "comb": Tree([(i - 1, 2) for i in range(8)], [(i, 70) for i in range(8) for _ in range(2)]),
    "binary": Tree([(-1, 2)] + [((i - 1) // 2, 2) for i in range(1, 15)], [(i, 30) for i in range(7, 15)]),
    "all on one prompt": Tree([(-1, 9)], [(0, 1)] * 24),
    "nothing shared": Tree([], [(-1, 1 + 97 * r) for r in range(9)]),
    "a strict prefix of another": Tree([(-1, 4), (0, 4)], [(0, 1), (1, 1), (0, 64)]),
}


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 64])
def test_any_shape_of_heads_and_pages(dtype, group, head_dim, page):
    spec = Spec(group=group, head_dim=head_dim, page=page, dtype=dtype, block=64 if head_dim < 256 else 32)
    batch = lay_out(spec, TWO_GROUPS)
    expected = reference(batch)
    assert_close(batch, batch.run(), expected)
    assert_close(batch, batch.run_ungrouped(), expected)


@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 64])
def test_wide_fp8_tiles_for_any_shape_of_heads_and_pages(group, head_dim, page):
    block = 64 if head_dim < 256 else 32
    batch = lay_out(Spec(group=group, head_dim=head_dim, page=page, dtype=FP8, tile_rows=64, block=block), TWO_GROUPS)
    assert_close(batch, batch.run())


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_any_tile(dtype, rows):
    batch = lay_out(Spec(dtype=dtype, tile_rows=rows, warps=8 if rows == 128 else 4), TREES["star"])
    assert_close(batch, batch.run())


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [16, 64])
def test_log_sum_exps(dtype, rows):
    batch = lay_out(Spec(dtype=dtype, tile_rows=rows), TWO_GROUPS)
    lse = torch.full((batch.num_tokens, batch.spec.heads.num_q_heads), float("nan"), device="cuda")
    batch.run(lse=lse)
    natural = lse.double() * np.log(2)
    assert float((natural - reference_lse(batch)).abs().max()) <= 1e-3


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 16), (FP8, 16), (FP8, 64)], ids=["bf16", "fp8", "wide fp8"])
def test_any_tree(tree, dtype, rows):
    batch = lay_out(Spec(dtype=dtype, page=16, tile_rows=rows), tree)
    assert_close(batch, batch.run())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 129])
def test_any_group_size(size):
    batch = lay_out(Spec(group=4), Tree([(-1, 3)], [(0, 1 + r % 70) for r in range(size)]))
    assert_close(batch, batch.run())


@pytest.mark.parametrize(("dtype", "rows"), [(BF16, 16), (FP8, 64)], ids=["bf16", "wide fp8"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_any_length_around_pages_and_chunks(page, kv_len, dtype, rows):
    batch = lay_out(Spec(page=page, dtype=dtype, tile_rows=rows), Tree([], [(-1, kv_len), (-1, 1)]))
    assert_close(batch, batch.run())
    assert_close(batch, batch.run_ungrouped())


def test_padding_rows_come_out_as_zeros():
    out = lay_out(Spec(), TWO_GROUPS).run(padding=3)
    assert torch.isfinite(out).all()
    assert (out[-3:] == 0).all()


def test_an_empty_batch_writes_zeros_to_all_of_its_padding():
    batch = lay_out(Spec(), Tree([], []))
    assert (batch.run(padding=4) == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_a_repeated_run_is_bitwise_the_same(dtype):
    batch = lay_out(Spec(dtype=dtype), TWO_GROUPS)
    assert torch.equal(batch.run(), batch.run())


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_permuting_batch_slots_permutes_outputs_bitwise(dtype):
    batch = lay_out(Spec(dtype=dtype), TWO_GROUPS)
    order = [3, 0, 5, 1, 4, 2]
    assert torch.equal(batch.permuted(order).run(), batch.run()[order])


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("group", [2, 5, 8])
@pytest.mark.parametrize("tree", ["star", "comb", "binary", "chain of 32"])
def test_deterministic_grouped_rows_equal_ungrouped_rows_bit_for_bit(dtype, rows, group, tree):
    batch = lay_out(Spec(dtype=dtype, tile_rows=rows, group=group), TREES[tree])
    grouped = batch.run(deterministic=True)
    assert torch.equal(grouped, batch.run(deterministic=True, min_share=NO_SHARING))
    assert_close(batch, grouped)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_a_row_alone_equals_the_row_in_company_bit_for_bit(dtype):
    batch = lay_out(Spec(dtype=dtype), TREES["star"])
    together = batch.run(deterministic=True)
    alone = batch.permuted([17]).run(deterministic=True)
    assert torch.equal(alone[0], together[17])


@pytest.mark.parametrize("rows", [16, 64])
def test_queries_of_any_size_over_fp8_keys(rows):
    batch = lay_out(Spec(dtype=FP8, tile_rows=rows), TWO_GROUPS)
    sizes = torch.logspace(-30, 0, batch.q[..., 0].numel(), device="cuda").view(batch.q.shape[:2])
    batch.q *= sizes[..., None].to(batch.q.dtype)
    batch.q[0, 0] = 0
    batch.q[1, :, ::7] *= 30  # one large element sets the scale of its row
    assert_close(batch, batch.run())


def with_scores(batch: Batch, change) -> Batch:
    """The batch with its keys edited in place, where they are not poison."""
    keys = batch.pool[:, :, 1, 0]
    change(keys, ~torch.isnan(keys.float()))
    return batch


def test_huge_scores():
    def scale(keys, valid):
        keys[valid] = keys[valid] * 300

    batch = with_scores(lay_out(Spec(), TWO_GROUPS), scale)
    assert torch.isfinite(batch.run()).all()
    exact = reference(batch)
    assert float((batch.run().double() - exact).norm() / exact.norm()) < 2e-2  # bf16 scores of +-1e4: winners may tie


def test_equal_scores_average_the_values():
    def flatten(keys, valid):
        keys[valid] = 1.0

    batch = with_scores(lay_out(Spec(), TWO_GROUPS), flatten)
    assert_close(batch, batch.run())


@pytest.mark.parametrize("shared", [True, False], ids=["shared part", "private part"])
def test_one_key_that_takes_all_weight(shared):
    batch = lay_out(Spec(group=1), Tree([(-1, 3)], [(0, 70)] * 5))
    keys = batch.pool[:, :, 1, 0]
    for row, table in enumerate(batch.tables):
        page = int(table[1 if shared else 3])
        if row == 0 or not shared:
            keys[page, :, 10] = 40 * batch.q[0].to(keys.dtype) / batch.q[0].float().norm()
    batch.q[:] = batch.q[0]
    out = batch.run()
    assert_close(batch, out)
    value = batch.pool[int(batch.tables[0][1 if shared else 3]), :, 1, 1, 10]
    torch.testing.assert_close(out[0].float(), value.float(), rtol=2e-2, atol=2e-2)


def test_constant_values_come_out_unchanged():
    batch = lay_out(Spec(), TWO_GROUPS)
    values = batch.pool[:, :, 1, 1]
    values[~torch.isnan(values)] = 0.75
    assert (batch.run() == 0.75).all()


def test_a_page_past_2_31_elements_is_addressed_with_64_bits():
    spec = Spec(kv_heads=8, head_dim=128, dtype=FP8)
    batch = lay_out(spec, Tree([], [(-1, 100)]))
    far = 40_000  # x 2 layers x 2 x 8 heads x 64 x 128 bytes = 10.5e9
    pool = torch.full((far + 8, *batch.pool.shape[1:]), 0x7F, dtype=torch.uint8, device="cuda").view(FP8)
    table = np.array([far + 5, far + 1], np.int32)
    for new, old in zip(table.tolist(), batch.tables[0].tolist(), strict=True):
        pool[new].view(torch.uint8).copy_(batch.pool[old].view(torch.uint8))
    moved = Batch(spec, pool, batch.scales, [table], batch.starts, batch.q_lens, batch.q)
    assert torch.equal(moved.run(), batch.run())
    assert torch.equal(moved.run_ungrouped(), batch.run_ungrouped())


def test_one_tensor_per_layer_and_a_view_of_the_pool_give_the_same_bits():
    batch = lay_out(Spec(), TWO_GROUPS)
    alone = Batch(
        batch.spec,
        torch.stack([batch.pool[:, :, 1], batch.pool[:, :, 1]], dim=2).contiguous(),
        batch.scales, batch.tables, batch.starts, batch.q_lens, batch.q,
    )  # fmt: skip
    assert torch.equal(alone.run(), batch.run())


def test_a_captured_graph_follows_1000_changing_plans():
    spec = Spec(group=2, head_dim=64, page=16)
    batch = lay_out(spec, Tree([(-1, 6), (0, 4), (-1, 5)], [(i % 3, 20 + 13 * i) for i in range(12)]))
    planner = Planner(spec.tiling(min_chunk=32, max_chunk=32, min_share=16))
    device_plan = DevicePlan(12, 512, "cuda")
    partials = Partials.empty(spec.heads, 512, "cuda")
    attention = PlannedAttention(spec.heads, spec.tile, partials, num_sms("cuda"), causal=False)
    rows = RowTables(torch.zeros_like(batch.rows.pages), torch.zeros_like(batch.rows.kv_lens))
    rows.pages.fill_(1 << 30)
    q, out = torch.zeros_like(batch.q), torch.empty_like(batch.q)
    attention(q, batch.kv, rows, device_plan, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, batch.kv, rows, device_plan, out)
    rng = np.random.default_rng(0)
    kept = 0
    results = []
    members = list(range(12))
    lens = (batch.starts + 1).copy()
    for step in range(1000):
        if step % 3 == 0:
            members = rng.permutation(12)[: rng.integers(1, 13)].tolist()
            lens = np.array([rng.integers(1, n + 1) for n in batch.starts + 1])
        else:  # the same rows, one token longer where their KV reaches
            lens = np.minimum(lens + 1, batch.starts + 1)
        kv_lens = lens[members]
        plan = planner.plan([batch.tables[m] for m in members], kv_lens)
        kept += bool(results) and plan is results[-1][2]
        device_plan.upload(plan)
        rows.pages[: len(members)] = batch.rows.pages[members]
        rows.kv_lens[: len(members)] = torch.from_numpy(kv_lens.astype(np.int32)).cuda()
        q[: len(members)] = batch.q[members]
        out.fill_(float("nan"))
        graph.replay()
        results.append((members, kv_lens, plan, out.clone()))
    torch.cuda.synchronize()
    assert kept > 300
    for members, kv_lens, _, got in results[::7]:
        part = Batch(
            spec, batch.pool, batch.scales, [batch.tables[m] for m in members], kv_lens - 1,
            np.ones(len(members), np.int64), batch.q[members],
        )  # fmt: skip
        assert_close(part, got[: len(members)])
        assert (got[len(members) :] == 0).all()
