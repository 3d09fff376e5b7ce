"""Trace files: the three formats, and how recorded sessions become turns."""

import json
import math

import pytest

from headstart.bench.errors import BenchError
from headstart.bench.trace import TraceReplay, read_trace
from headstart.bench.workload import TokenSource

SOURCE = TokenSource(1000, 30_000)


def written(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def mooncake(at_ms, input_len, hash_ids, output_len=5, **more):
    return {"timestamp": at_ms, "input_length": input_len, "output_length": output_len, "hash_ids": hash_ids, **more}


def replayed(tmp_path, *rows, **options):
    return TraceReplay("t", tuple(read_trace(written(tmp_path, *rows))), **options).build(1)


def test_mooncake_requests_have_blocks_of_512_unless_they_say_otherwise(tmp_path):
    first, second = read_trace(written(tmp_path, mooncake(0, 600, [0, 1]), mooncake(1500, 100, [0, 2], block_size=64)))
    assert (first.block_size, first.at_s) == (512, 0.0)
    assert (second.block_size, second.at_s) == (64, 1.5)


def test_equal_hashes_become_equal_tokens_and_prompts_have_the_recorded_length(tmp_path):
    rows = [mooncake(t, n, h, block_size=64) for t, n, h in ((0, 10, [9]), (1, 150, [0, 1, 2]), (2, 130, [0, 1, 3]))]
    workload = replayed(tmp_path, *rows)
    first, second = (SOURCE.tokens(session.turns[0].fresh) for session in workload.measured)
    assert (len(first), len(second)) == (150, 130)
    assert first[:128] == second[:128]
    assert first[128:130] != second[128:130]


def test_tokens_behind_the_last_hash_are_the_requests_own(tmp_path):
    rows = [mooncake(t, 70, [0], block_size=64) for t in range(3)]
    first, second = (SOURCE.tokens(session.turns[0].fresh) for session in replayed(tmp_path, *rows).measured)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]


def session_rows(**more):
    """Two turns at block 16: 40 tokens in, 10 out, then 70 in that begin with the first two blocks."""
    return [
        mooncake(0, 20, [99], 4, session_id="w", block_size=16),
        mooncake(1000, 40, [0, 1], 10, session_id="s", block_size=16),
        mooncake(4000, 70, [0, 1, 2, 3], 5, session_id="s", block_size=16, **more),
    ]


def test_a_turn_that_extends_the_last_one_keeps_its_prompt_and_answer(tmp_path):
    (session,) = replayed(tmp_path, *session_rows()).measured
    assert [turn.keep for turn in session.turns] == [0, 50]
    assert [sum(piece.length for piece in turn.fresh) for turn in session.turns] == [40, 20]


def test_a_turn_that_departs_from_the_last_one_keeps_the_blocks_they_share(tmp_path):
    rows = session_rows()
    rows[2]["hash_ids"] = [0, 7, 8, 9]
    (session,) = replayed(tmp_path, *rows).measured
    assert session.turns[1].keep == 16
    assert sum(piece.length for piece in session.turns[1].fresh) == 54


def test_a_turn_too_short_for_the_answer_keeps_blocks_only(tmp_path):
    rows = session_rows()
    rows[2] |= {"input_length": 45, "hash_ids": [0, 1]}
    (session,) = replayed(tmp_path, *rows).measured
    assert session.turns[1].keep == 32


def test_delays_are_the_recorded_ones_or_what_the_gap_leaves_after_the_answer(tmp_path):
    (told,) = replayed(tmp_path, *session_rows(delay_ms=700)).measured
    (guessed,) = replayed(tmp_path, *session_rows()).measured
    assert told.turns[1].delay_s == 0.7
    assert guessed.turns[1].delay_s == pytest.approx(3.0 - 10 * 0.02)


def test_open_loop_times_begin_with_the_first_measured_session(tmp_path):
    (session,) = replayed(tmp_path, *session_rows()).measured
    assert [turn.due_s for turn in session.turns] == [0.0, 3.0]


def test_whole_sessions_a_line_share_blocks_between_their_agents(tmp_path):
    def request(t, agent, input_len, share_with, share_blocks, think=0.5):
        lengths = {"in": input_len, "out": 8, "share_with": share_with, "share_blocks": share_blocks}
        return {"t": t, "agent": agent, "think_time": think, **lengths}

    requests = [request(0, 0, 40, -1, 0, None), request(3, 1, 50, 0, 1), request(5, 0, 64, 0, 2)]
    row = {"id": "a", "block_size": 16, "requests": requests}
    main, helper, again = read_trace(written(tmp_path, row))
    assert main.session == again.session != helper.session
    assert helper.hash_ids[:1] == main.hash_ids[:1]
    assert helper.hash_ids[1] != main.hash_ids[1]
    assert again.hash_ids[:2] == main.hash_ids
    assert (main.delay_s, again.delay_s) == (0.0, 0.5)


def test_a_session_ends_before_the_first_request_that_does_not_fit(tmp_path):
    (session,) = replayed(tmp_path, *session_rows(), context_len=60).measured
    assert len(session.turns) == 1


def test_warm_up_sessions_are_the_first_ones_and_the_number_is_bounded(tmp_path):
    rows = [mooncake(t, 20, [t], block_size=16) for t in range(6)]
    workload = replayed(tmp_path, *rows, num_warmup=2, num_sessions=3)
    assert [s.name for s in workload.warmup] == ["r0", "r1"]
    assert [s.name for s in workload.measured] == ["r2", "r3", "r4"]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 1}', '{"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]}', "7"]
)
def test_a_line_of_no_known_format_is_named(tmp_path, line):
    with pytest.raises(BenchError, match="line 2"):
        read_trace(written(tmp_path, mooncake(0, 5, [0]), line))


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_length": 10.5},
        {"output_length": True},
        {"block_size": "16"},
        {"timestamp": math.nan},
        {"timestamp": 10**400},
        {"delay_ms": -math.inf},
    ],
)
def test_a_line_with_a_number_of_the_wrong_kind_is_named(tmp_path, wrong):
    with pytest.raises(BenchError, match="line 2"):
        read_trace(written(tmp_path, mooncake(0, 5, [0]), mooncake(1, 5, [0]) | wrong))


@pytest.mark.parametrize("wrong", [{"in": 40.5}, {"in": 0}, {"out": -1}, {"t": "nan"}, {"think_time": math.inf}])
def test_a_request_of_a_session_with_a_number_of_the_wrong_kind_is_named(tmp_path, wrong):
    request = {"t": 0, "agent": 0, "think_time": 0, "in": 40, "out": 8, "share_with": -1, "share_blocks": 0}
    with pytest.raises(BenchError, match="line 1"):
        read_trace(written(tmp_path, {"id": "a", "block_size": 16, "requests": [request | wrong]}))


@pytest.mark.parametrize("line", [b"\xff\xfe\x00", b"[" * 100_000, b'{"timestamp": ' + b"9" * 5000 + b"}"])
def test_a_line_that_no_parser_takes_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(mooncake(0, 5, [0])).encode() + b"\n" + line)
    with pytest.raises(BenchError, match="line 2"):
        read_trace(path)


def test_a_trace_of_which_nothing_fits_is_an_error(tmp_path):
    with pytest.raises(BenchError, match="none is left"):
        replayed(tmp_path, *session_rows(), context_len=10)
    with pytest.raises(BenchError, match="no requests"):
        read_trace(written(tmp_path, ""))
