"""A plan reads every (query token, key) pair exactly once, whatever the tree of prefixes."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.attention import plan as p
from headstart.attention.plan import Plan, Planner, Tiling, build_plan
from headstart.attention.segments import PrefixOrder, Segments, find_segments


@dataclass
class Rows:
    """Rows of a batch, as the executor hands them over."""

    tables: list[np.ndarray]
    starts: np.ndarray
    q_lens: np.ndarray
    page: int

    @property
    def kv_lens(self) -> np.ndarray:
        return self.starts + self.q_lens


class PageTree:
    """Grows a random radix tree over page ids, and draws rows that end in pages of their own."""

    def __init__(self, draw, page: int) -> None:
        self.draw = draw
        self.page = page
        self.next_id = 0
        self.paths: list[list[int]] = [[]]

    def fresh(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def grow(self) -> None:
        stem = self.paths[self.draw(st.integers(0, len(self.paths) - 1))]
        keep = self.draw(st.integers(0, len(stem)))
        self.paths.append(stem[:keep] + self.fresh(self.draw(st.integers(1, 6))))

    def row(self, max_q_len: int) -> tuple[np.ndarray, int, int]:
        prefix = self.paths[self.draw(st.integers(0, len(self.paths) - 1))]
        start = len(prefix) * self.page + self.draw(st.integers(0, 3 * self.page))
        q_len = self.draw(st.integers(1, max_q_len))
        own = -(-(start + q_len) // self.page) - len(prefix)
        return np.array(prefix + self.fresh(own), np.int32), start, q_len


@st.composite
def rows(draw, max_q_len: int = 1) -> Rows:
    page = draw(st.sampled_from([1, 2, 4]))
    tree = PageTree(draw, page)
    for _ in range(draw(st.integers(0, 8))):
        tree.grow()
    drawn = [tree.row(max_q_len) for _ in range(draw(st.integers(0, 12)))]
    starts = np.array([start for _, start, _ in drawn], np.int64)
    return Rows([table for table, _, _ in drawn], starts, np.array([q for _, _, q in drawn], np.int64), page)


@st.composite
def tilings(draw, page: int) -> Tiling:
    chunk = page * draw(st.sampled_from([1, 2, 8]))
    return Tiling(
        page_size=page,
        q_tile=draw(st.sampled_from([1, 2, 3, 8])),
        min_chunk=chunk,
        max_chunk=chunk * draw(st.sampled_from([1, 4])),
        wave_items=draw(st.sampled_from([1, 10])),
        exact_chunk=chunk,
        min_share=draw(st.sampled_from([0, 1, 5, 20])),
        deterministic=draw(st.booleans()),
    )


def reads(plan: Plan) -> list[tuple[int, int, int, int]]:
    """(query token, slot, first key, last key + 1) of every pair of query token and item."""
    found = []
    for item in plan.items:
        for t in plan.q_list[item[p.Q_OFF] : item[p.Q_OFF] + item[p.N_Q]]:
            end = item[p.TOK0] + item[p.N_TOK]
            if item[p.FLAGS] & p.CAUSAL:
                end = min(end, plan.pos_of[t] + 1)
            found.append((int(t), int(plan.slot_ptr[t] + item[p.ORDINAL]), int(item[p.TOK0]), int(end)))
    return found


def check_plan(plan: Plan, rows: Rows, tiling: Tiling) -> None:
    num_tokens = int(rows.q_lens.sum())
    assert sorted(plan.q_list) == list(range(num_tokens))
    pairs = reads(plan)
    assert sorted(slot for _, slot, _, _ in pairs) == list(range(plan.num_slots)), "slots are a permutation"
    for t in range(num_tokens):
        mine = sorted((slot, lo, hi) for token, slot, lo, hi in pairs if token == t)
        assert [slot for slot, _, _ in mine] == list(range(plan.slot_ptr[t], plan.slot_ptr[t + 1]))
        cursor = 0
        for _, lo, hi in mine:
            if lo > plan.pos_of[t]:
                continue  # a causal chunk past this token: its partial is empty
            assert lo == cursor, "keys are covered once, in slot order"
            cursor = hi
        assert cursor == plan.pos_of[t] + 1
    for item in plan.items:
        assert 1 <= item[p.N_Q] <= tiling.q_tile
        assert 1 <= item[p.N_TOK] <= plan.chunk
        readers = {int(plan.row_of[t]) for t in plan.q_list[item[p.Q_OFF] : item[p.Q_OFF] + item[p.N_Q]]}
        first, end = item[p.TOK0] // rows.page, -(-(item[p.TOK0] + item[p.N_TOK]) // rows.page)
        for row in readers:
            np.testing.assert_array_equal(rows.tables[row][first:end], rows.tables[item[p.SRC_ROW]][first:end])
        if len(readers) > 1:
            assert item[p.TOK0] % rows.page == 0
            assert item[p.N_TOK] % rows.page == 0, "only whole pages are shared"
        if tiling.deterministic:
            assert item[p.TOK0] % plan.chunk == 0
            assert len(readers) == 1 or item[p.N_TOK] == plan.chunk
        if item[p.FLAGS] & p.OPEN:
            assert item[p.TOK0] + item[p.N_TOK] == rows.kv_lens[item[p.SRC_ROW]]
            assert rows.kv_lens[item[p.SRC_ROW]] <= plan.tail_limit[item[p.SRC_ROW]] == item[p.TOK0] + plan.chunk


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_key_is_read_once_for_every_decode_row(data):
    batch = data.draw(rows())
    tiling = data.draw(tilings(batch.page))
    check_plan(build_plan(batch.tables, batch.starts, batch.q_lens, tiling), batch, tiling)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_key_is_read_once_for_every_token_of_a_chunk(data):
    batch = data.draw(rows(max_q_len=9))
    tiling = data.draw(tilings(batch.page))
    check_plan(build_plan(batch.tables, batch.starts, batch.q_lens, tiling), batch, tiling)


def naive_common_tokens(batch: Rows, a: int, b: int) -> int:
    """Tokens that rows a and b share, found page by page."""
    limit = min(batch.starts[a], batch.starts[b]) // batch.page
    n = 0
    while n < limit and batch.tables[a][n] == batch.tables[b][n]:
        n += 1
    return n * batch.page


def shared_reach(segments: Segments, a: int, b: int) -> int:
    """Tokens that one read serves for rows a and b both."""
    rank = np.argsort(segments.order)
    reach = 0
    for lo, hi, tok1 in zip(segments.lo, segments.hi, segments.tok1, strict=True):
        if lo <= rank[a] < hi and lo <= rank[b] < hi:
            reach = max(reach, int(tok1))
    return reach


@settings(max_examples=150, deadline=None)
@given(batch=rows())
def test_all_sharing_is_found_to_any_depth(batch):
    segments = find_segments(batch.tables, batch.starts, batch.page, min_share=1)
    for a in range(len(batch.tables)):
        for b in range(a):
            assert shared_reach(segments, a, b) == naive_common_tokens(batch, a, b)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_deterministic_plan_gives_grouped_and_ungrouped_rows_the_same_partials(data):
    batch = data.draw(rows())
    exact = Tiling(batch.page, q_tile=4, exact_chunk=2 * batch.page, min_share=1, deterministic=True)
    alone = Tiling(batch.page, q_tile=4, exact_chunk=2 * batch.page, min_share=1 << 30, deterministic=True)
    grouped = build_plan(batch.tables, batch.starts, batch.q_lens, exact)
    ungrouped = build_plan(batch.tables, batch.starts, batch.q_lens, alone)
    assert sorted(reads(grouped)) == sorted(reads(ungrouped))


def chain(lens: list[int], page: int = 4) -> Rows:
    """Rows that each extend the one before: row i holds row i - 1's first whole pages."""
    pages = np.arange(1000, dtype=np.int32)
    tables = []
    for i, length in enumerate(lens):
        shared = (lens[i - 1] - 1) // page if i else 0
        own = np.arange(100_000 + 1000 * i, 100_000 + 1000 * i + 1000, dtype=np.int32)
        tables.append(np.concatenate([pages[:shared], own])[: -(-length // page)])
        pages[shared : shared + len(tables[-1]) - shared] = tables[-1][shared:]
    return Rows(tables, np.array(lens) - 1, np.ones(len(lens), np.int64), page)


def test_a_chain_of_32_prefixes_is_read_once_each():
    batch = chain([4 * (i + 1) + 1 for i in range(32)])
    tiling = Tiling(4, q_tile=64, min_chunk=4, max_chunk=4, min_share=1)
    plan = build_plan(batch.tables, batch.starts, batch.q_lens, tiling)
    check_plan(plan, batch, tiling)
    unique = len({(page, 0) for table in batch.tables for page in table})
    assert len(plan.items) == unique


def test_all_rows_on_one_prompt_read_it_once():
    prefix = np.arange(100, dtype=np.int32)
    tables = [np.append(prefix, np.int32(200 + r)) for r in range(129)]
    ones = np.ones(129, np.int64)
    plan = build_plan(tables, ones * 400, ones, Tiling(4, q_tile=200, min_chunk=512))
    assert plan.items[:, p.N_TOK].sum() == 400 + 129


def test_a_short_prefix_is_left_to_each_row():
    tables = [np.array([0, 1, 2 + r], np.int32) for r in range(4)]
    ones = np.ones(4, np.int64)
    plan = build_plan(tables, ones * 8, ones, Tiling(4, q_tile=4, min_chunk=64, min_share=9))
    assert len(plan.segments.lo) == 0
    assert plan.items[:, p.N_TOK].tolist() == [9, 9, 9, 9]


def test_a_page_that_a_row_still_writes_is_not_shared():
    tables = [np.array([0, 1], np.int32), np.array([0, 1], np.int32)]
    ones = np.ones(2, np.int64)
    plan = build_plan(tables, ones * 7, ones, Tiling(4, q_tile=4, min_chunk=64, min_share=1))
    assert plan.segments.tok1.tolist() == [4]


def test_no_rows_make_an_empty_plan():
    none = np.zeros(0, np.int64)
    plan = build_plan([], none, none, Tiling(4, q_tile=4))
    assert (len(plan.items), plan.num_slots, len(plan.q_list)) == (0, 0, 0)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 64), (4, 128), (8, 256), (16, 512), (32, 1024)])
def test_few_short_rows_are_cut_into_one_short_wave(rows, chunk):
    tiling = Tiling(64, q_tile=8, min_chunk=64, wave_items=66, short_wave_items=33, item_cost=200)
    tables = [np.arange(16 * r, 16 * r + 16, dtype=np.int32) for r in range(rows)]
    ones = np.ones(rows, np.int64)
    assert build_plan(tables, ones * 1023, ones, tiling).chunk == chunk


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_chunk_doubles_until_the_slots_fit(deterministic):
    tables = [np.arange(1000 * r, 1000 * r + 251, dtype=np.int32) for r in range(10)]
    ones = np.ones(10, np.int64)
    tiling = Tiling(4, 4, min_chunk=4, max_chunk=4, max_slots=40, deterministic=deterministic, exact_chunk=4)
    plan = build_plan(tables, ones * 1000, ones, tiling)
    assert plan.num_slots <= 40
    check_plan(plan, Rows(tables, ones * 1000, ones, 4), tiling)


def test_bounds_that_no_chunk_can_meet_are_refused():
    tables = [np.array([r], np.int32) for r in range(10)]
    ones = np.ones(10, np.int64)
    with pytest.raises(ValueError, match="bounds of 65536 items and 9 slots"):
        build_plan(tables, ones, ones, Tiling(4, q_tile=4, max_slots=9))


def test_a_plan_is_kept_while_rows_only_grow_and_their_tails_have_room():
    planner = Planner(Tiling(4, q_tile=4, min_chunk=8, max_chunk=8, min_share=1))
    tables = [np.array([0, 10 + r], np.int32) for r in range(3)]
    kv_lens = np.array([7, 7, 7])
    first = planner.plan(tables, kv_lens)
    grown = [np.append(table, np.int32(100 + r)) for r, table in enumerate(tables)]
    assert planner.plan(grown, kv_lens + 5) is first
    assert planner.plan(grown, kv_lens + 6) is not first


@pytest.mark.parametrize(
    ("tables", "kv_lens"),
    [
        ([[0, 1], [0, 2], [0, 3]], [7, 7, 7]),  # a row joined
        ([[0, 1]], [7]),  # a row left
        ([[0, 1], [0, 9]], [7, 7]),  # another sequence in the slot
        ([[0, 1], [0, 2]], [7, 6]),  # another sequence in the slot, which happens to fit
    ],
)
def test_a_change_of_rows_makes_a_new_plan(tables, kv_lens):
    planner = Planner(Tiling(4, q_tile=4, min_chunk=8, max_chunk=8, min_share=1))
    first = planner.plan([np.array([0, 1], np.int32), np.array([0, 2], np.int32)], np.array([7, 7]))
    assert planner.plan([np.array(table, np.int32) for table in tables], np.array(kv_lens)) is not first


def test_500_random_joins_leaves_and_growths_always_leave_a_correct_plan():
    rng = np.random.default_rng(7)
    tiling = Tiling(4, q_tile=4, min_chunk=16, max_chunk=16, min_share=4)
    planner = Planner(tiling)
    prefixes = [np.arange(100 * i, 100 * i + 8, dtype=np.int32) for i in range(3)]
    next_page = 1000
    tables: list[np.ndarray] = []
    lens: list[int] = []
    kept = 0
    before = None
    for _ in range(500):
        if rng.random() < 0.1 and len(tables) < 10:
            tables.append(prefixes[rng.integers(3)][: rng.integers(1, 9)])
            lens.append(4 * len(tables[-1]))
        if rng.random() < 0.1 and tables:
            leaving = int(rng.integers(len(tables)))
            tables[leaving], lens[leaving] = tables[-1], lens[-1]
            tables.pop()
            lens.pop()
        for row in range(len(tables)):
            lens[row] += 1
            if lens[row] > 4 * len(tables[row]):
                tables[row] = np.append(tables[row], np.int32(next_page))
                next_page += 1
        kv_lens = np.array(lens, np.int64)
        plan = planner.plan(tables, kv_lens)
        kept += plan is before
        before = plan
        check_reads_all(plan, kv_lens, tables)
    assert kept > 100


def check_reads_all(plan: Plan, kv_lens: np.ndarray, tables: list[np.ndarray]) -> None:
    """Each row reads its own pages [0, kv_len), once."""
    seen: list[list[tuple[int, int]]] = [[] for _ in tables]
    for item in plan.items:
        src = item[p.SRC_ROW]
        end = int(kv_lens[src]) if item[p.FLAGS] & p.OPEN else int(item[p.TOK0] + item[p.N_TOK])
        for row in plan.q_list[item[p.Q_OFF] : item[p.Q_OFF] + item[p.N_Q]]:
            first, last = item[p.TOK0] // 4, -(-end // 4)
            np.testing.assert_array_equal(tables[row][first:last], tables[src][first:last])
            seen[row].append((int(item[p.TOK0]), end))
    for row, ranges in enumerate(seen):
        ranges.sort()
        assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
        assert ranges[-1][1] == kv_lens[row]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_segments_found_with_memory_of_other_batches_equal_those_found_from_nothing(data):
    tree = PageTree(data.draw, page=1)
    for _ in range(data.draw(st.integers(1, 6))):
        tree.grow()
    prefixes = PrefixOrder()
    tables = [tree.row(1)[0] for _ in range(data.draw(st.integers(1, 12)))]
    for _ in range(6):
        change = data.draw(st.sampled_from(["join", "leave", "grow", "shuffle"]))
        if change == "join":
            tables.append(tree.row(1)[0])
        elif change == "leave" and len(tables) > 1:
            tables.pop(data.draw(st.integers(0, len(tables) - 1)))
        elif change == "grow":
            row = data.draw(st.integers(0, len(tables) - 1))
            tables[row] = np.append(tables[row], np.array(tree.fresh(1), np.int32))
        else:
            tables = data.draw(st.permutations(tables))
        shareable = np.array([len(table) for table in tables], np.int64)
        remembered = find_segments(tables, shareable, 1, 1, prefixes=prefixes)
        from_nothing = find_segments(tables, shareable, 1, 1)
        assert read_by(remembered) == read_by(from_nothing)


def read_by(segments: Segments) -> set[tuple[frozenset[int], int, int]]:
    """Every segment's rows and tokens."""
    columns = zip(segments.lo, segments.hi, segments.tok0, segments.tok1, strict=True)
    return {(frozenset(segments.order[lo:hi].tolist()), int(tok0), int(tok1)) for lo, hi, tok0, tok1 in columns}


def test_rows_with_one_table_between_them_share_all_of_it():
    table = np.arange(5, dtype=np.int32)
    segments = find_segments([table, table, table], np.full(3, 5), page_size=1, min_share=1)
    assert read_by(segments) == {(frozenset({0, 1, 2}), 0, 5)}
