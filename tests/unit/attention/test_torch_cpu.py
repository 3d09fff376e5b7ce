"""CPU attention against a float64 reference that reads every row's pages one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from headstart.attention.row import AttentionRow
from headstart.attention.torch_cpu import CpuAttention
from headstart.core.arrays import EMPTY, int32_array
from headstart.core.layout import pages_for

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16
SCALE = 0.25
TOLERANCE = 2e-5


@dataclass
class Setting:
    """A pool full of NaN, of which rows own what they were given."""

    page_size: int
    num_heads: int = 6
    num_tokens: int = 24_000
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        num_pages = self.num_tokens // self.page_size
        self.pool = torch.full((num_pages, KV_HEADS, LAYERS, 2, self.page_size, HEAD_DIM), torch.nan)
        self._free = self.rng.permutation(num_pages).tolist()

    def pages(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(pages_for(num_tokens, self.page_size))]

    def fill(self, pages: Sequence[int], start: int, end: int) -> None:
        positions = np.arange(start, end)
        at = np.array(pages)[positions // self.page_size], positions % self.page_size
        drawn = torch.randn(len(positions), LAYERS, 2, KV_HEADS, HEAD_DIM)
        self.pool.permute(0, 4, 2, 3, 1, 5)[torch.from_numpy(at[0]), torch.from_numpy(at[1])] = drawn

    def row(self, start: int, num_new: int, after: AttentionRow | None = None, shared: int = 0) -> AttentionRow:
        """`shared` leading tokens (whole pages) are those of `after`."""
        common = after.pages[: shared // self.page_size].tolist() if after is not None else []
        pages = common + self.pages(start + num_new - len(common) * self.page_size)
        self.fill(pages, len(common) * self.page_size, start)
        own = self.rng.integers(0, 1000, start)
        if after is not None and after.tokens is not None:
            own[:shared] = after.tokens[:shared]
        return AttentionRow(int32_array(pages), start, num_new, int32_array(own))

    def inputs(self, rows: Sequence[AttentionRow]) -> list[torch.Tensor]:
        num_tokens = sum(row.num_new for row in rows)
        return [torch.randn(num_tokens, heads, HEAD_DIM) for heads in (self.num_heads, KV_HEADS, KV_HEADS)]

    def expected(self, layer: int, rows: Sequence[AttentionRow], query: torch.Tensor) -> torch.Tensor:
        out, token = [], 0
        for row in rows:
            kv = self.pool[torch.tensor(row.pages), :, layer].double()
            keys, values = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)
            end = row.start + row.num_new
            q = query[token : token + row.num_new].double().view(row.num_new, KV_HEADS, -1, HEAD_DIM)
            scores = torch.einsum("thgd,hkd->thgk", q, keys[:, :end]) * SCALE
            hidden = torch.arange(end) > torch.arange(row.start, end)[:, None]
            weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), -1)
            out.append(torch.einsum("thgk,hkd->thgd", weights, values[:, :end]).reshape(-1, self.num_heads, HEAD_DIM))
            token += row.num_new
        return torch.cat(out)

    def check(self, attention: CpuAttention, rows: Sequence[AttentionRow]) -> None:
        step = attention.begin(rows)
        for layer in range(LAYERS):
            query, key, value = self.inputs(rows)
            ours = step.attend(layer, query, key, value, SCALE)
            torch.testing.assert_close(ours.double(), self.expected(layer, rows, query), atol=TOLERANCE, rtol=0)


@pytest.fixture(params=[1, 16, 64], ids=lambda size: f"page{size}")
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


@pytest.fixture(params=[True, False], ids=["grouped", "ungrouped"])
def attention(setting: Setting, request: pytest.FixtureRequest) -> CpuAttention:
    return CpuAttention(setting.pool, grouped=request.param, copy_bytes=1 << 30)


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 17, 63, 64, 65, 255, 511, 512, 700, 1100])
def test_a_decode_row_of_any_length(setting: Setting, attention: CpuAttention, start: int) -> None:
    setting.check(attention, [setting.row(start, 1)])


@pytest.mark.parametrize(("start", "num_new"), [(0, 2), (0, 130), (5, 2), (64, 64), (300, 33)])
def test_a_chunk_with_and_without_a_prefix(setting: Setting, attention: CpuAttention, start: int, num_new: int) -> None:
    setting.check(attention, [setting.row(start, num_new)])


def test_rows_of_all_kinds_in_one_batch(setting: Setting, attention: CpuAttention) -> None:
    base = setting.row(640, 1)
    sharing = [setting.row(640 + 7 * i, 1 + 20 * (i % 2), base, shared=512) for i in range(5)]
    rows = [setting.row(3, 1), base, *sharing, setting.row(0, 40), setting.row(900, 1), setting.row(64, 64)]
    for _ in range(2):
        setting.check(attention, rows)


def test_a_tree_three_deep(setting: Setting, attention: CpuAttention) -> None:
    root = setting.row(1000, 1)
    middle = [setting.row(1000, 1, root, shared=320) for _ in range(2)]
    leaves = [setting.row(1000 + i, 1, middle[i % 2], shared=640) for i in range(4)]
    setting.check(attention, [*leaves, root, *middle])


@pytest.mark.parametrize("num_heads", [2, 4, 10, 14])
def test_groups_of_query_heads(num_heads: int) -> None:
    setting = Setting(16, num_heads=num_heads)
    base = setting.row(400, 1)
    rows = [base, setting.row(420, 1, base, shared=384), setting.row(420, 30, base, shared=384)]
    setting.check(CpuAttention(setting.pool), rows)


def test_a_row_that_is_a_strict_prefix_of_another(setting: Setting, attention: CpuAttention) -> None:
    base = setting.row(700, 1)
    setting.check(attention, [base, setting.row(448, 1, base, shared=448)])


def test_a_constant_value_comes_out_exactly(setting: Setting, attention: CpuAttention) -> None:
    base = setting.row(600, 1)
    rows = [base, setting.row(610, 1, base, shared=576)]
    for row in rows:
        for position in range(row.start):
            setting.pool[row.pages[position // setting.page_size], :, :, 1, position % setting.page_size] = 2.5
    query, key, value = setting.inputs(rows)
    out = attention.begin(rows).attend(0, query * 1e4, key, torch.full_like(value, 2.5), SCALE)
    torch.testing.assert_close(out, torch.full_like(out, 2.5))


def test_a_copy_serves_later_steps_without_the_pages() -> None:
    setting = Setting(16)
    attention = CpuAttention(setting.pool, copy_bytes=1 << 30)
    rows = [base := setting.row(600, 1), setting.row(600, 1, base, shared=576)]
    query, key, value = setting.inputs(rows)
    first = attention.begin(rows).attend(0, query, key, value, SCALE)
    setting.pool[torch.tensor(base.pages[:36])] = torch.nan
    assert torch.equal(attention.begin(rows).attend(0, query, key, value, SCALE), first)


def test_pages_that_hold_other_tokens_now_are_read_afresh() -> None:
    setting = Setting(16)
    attention = CpuAttention(setting.pool, copy_bytes=1 << 30)
    base = setting.row(600, 1)
    setting.check(attention, [base, setting.row(600, 1, base, shared=576)])
    setting.fill(base.pages.tolist(), 0, 600)
    reused = AttentionRow(base.pages, 600, 1, int32_array(setting.rng.integers(1000, 2000, 600)))
    other = setting.row(600, 1, reused, shared=576)
    setting.fill(base.pages.tolist(), 0, 576)
    setting.check(attention, [reused, other])


def test_a_long_row_grows_over_its_copies() -> None:
    setting = Setting(16)
    attention = CpuAttention(setting.pool, copy_bytes=1 << 30)
    whole = setting.row(1100, 1)
    for start in range(700, 1030, 61):
        setting.check(attention, [AttentionRow(whole.pages, start, 1, whole.tokens[:start])])
        setting.fill(whole.pages.tolist(), start, start + 61)


@pytest.mark.parametrize("budget_tokens", [0, 600, 1300])
def test_a_budget_for_copies_changes_nothing_but_speed(budget_tokens: int) -> None:
    setting = Setting(16)
    token_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    attention = CpuAttention(setting.pool, copy_bytes=budget_tokens * token_bytes)
    rows = [setting.row(600 + i, 1) for i in range(4)]
    for _ in range(2):
        setting.check(attention, rows)
        setting.check(attention, rows[2:])


def test_a_row_of_unknown_tokens_is_never_copied() -> None:
    setting = Setting(16)
    attention = CpuAttention(setting.pool, copy_bytes=1 << 30)
    known = setting.row(800, 1)
    unknown = AttentionRow(known.pages, 800, 1)
    for _ in range(2):
        setting.fill(known.pages.tolist(), 0, 800)
        setting.check(attention, [unknown])


def test_an_empty_context_is_no_context() -> None:
    setting = Setting(16)
    first = AttentionRow(int32_array(setting.pages(1)), 0, 1, EMPTY)
    setting.check(CpuAttention(setting.pool, copy_bytes=1 << 30), [first])
