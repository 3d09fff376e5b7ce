"""Metric definitions, and values that cannot be true."""

import pytest

from headstart.bench.errors import BenchError
from headstart.bench.load_generator import LoadResult
from headstart.bench.measure import refuse_impossible
from headstart.bench.metrics import curve, peak_concurrency, peak_tokens_per_s, spread, summarize
from headstart.bench.records import Answer, RequestRecord, SentRequest
from headstart.bench.sanity_checks import impossible
from tests.support.bench_targets import record


def test_times_of_one_request():
    one = record((2.0, 1), (2.5, 1), (3.5, 2), sent=1.0)
    assert (one.ttft_s, one.latency_s) == (1.0, 2.5)
    assert one.tpot_s == pytest.approx(1.5 / 3)
    assert one.itls_s == [0.5, 0.5, 0.5]


def test_tokens_that_arrive_together_share_the_gap_before_them():
    assert record((1.0, 1), (1.9, 3)).itls_s == pytest.approx([0.3, 0.3, 0.3])


def test_an_answer_of_one_token_has_no_time_per_output_token():
    assert record((1.0, 1)).tpot_s is None
    assert record((1.0, 1)).itls_s == []


def test_throughput_counts_over_the_whole_duration_and_concurrency_is_the_sum_of_latencies_over_it():
    records = (record((1.0, 1), (2.0, 1), prompt=30), record((3.0, 1), (4.0, 3), sent=2.0, prompt=10))
    summary = summarize(LoadResult(records, 0.0, 4.0))
    assert summary["output_throughput"] == 6 / 4
    assert summary["input_throughput"] == 40 / 4
    assert summary["total_throughput"] == 46 / 4
    assert summary["request_throughput"] == 2 / 4
    assert summary["concurrency"] == (2.0 + 2.0) / 4
    assert summary["mean_ttft_ms"] == 1000
    assert summary["completed"] == 2


def test_failed_and_unsent_requests_are_counted_apart():
    broken = RequestRecord(SentRequest("s", 0, 0, 4), Answer(0.0, error="no"))
    summary = summarize(LoadResult((record((1.0, 1)), broken), 0.0, 2.0, num_unsent=3))
    assert (summary["completed"], summary["failed"]) == (1, 4)


def test_peaks_are_of_one_second_buckets():
    records = [record((0.5, 2), (0.9, 3), (1.1, 4)), record((1.2, 1), sent=1.0)]
    assert peak_tokens_per_s(records, 0.0) == 5
    assert peak_concurrency(records, 0.0) == 2


def test_percentiles_are_numpys_linear_ones():
    values = spread([float(value) for value in range(101)])
    assert (values["mean"], values["median"], values["p90"], values["p99"], values["max"]) == (50, 50, 90, 99, 100)
    assert spread([])["p99"] == 0


def test_a_curve_keeps_the_ends_and_at_most_501_points():
    points = curve([value / 1e3 for value in range(10_001)])
    assert (points[0], points[-1], len(points)) == (0.0, 10_000.0, 501)


def test_reuse_is_told_in_tokens_and_shares_of_the_prompts():
    records = [record((1.0, 1), prompt=100, cached_tokens=48, decode_prefix_len=64, bytes_moved=7) for _ in range(2)]
    told = summarize(LoadResult(tuple(records), 0.0, 1.0))["reuse"]
    assert (told["cached_tokens"], told["cached_share"]) == (96, 0.48)
    assert (told["decode_prefix_tokens"], told["decode_prefix_share"], told["bytes_moved"]) == (128, 0.64, 14)
    assert told["possible_tokens"] is None


def test_a_plausible_answer_passes():
    assert impossible(record((1.0, 1), (1.5, 1), cached_tokens=5, decode_prefix_len=10)) == []
    assert impossible(record((1.0, 1))) == []


@pytest.mark.parametrize(
    ("untrue", "reason"),
    [
        (record((0.0, 1), (1.0, 1)), "first token"),
        (record((1.0, 1), (1.0, 1)), "inter-token latency of 0"),
        (record((1.0, 5)), "one arrival"),
        (record((1.0, 1), (2.0, 1), asked=3), "fewer than the 3"),
        (record((1.0, 1), (2.0, 1), asked=1), "more than the 1"),
        (record((1.0, 1), prompt=10, cached_tokens=11), "cached_tokens of 11"),
        (record((1.0, 1), prompt=10, decode_prefix_len=16), "decode_prefix_len of 16"),
        (record((1.0, 1), prompt=10, prompt_tokens=12), "12 prompt tokens"),
        (
            RequestRecord(SentRequest("s", 0, 0, 1, 10), Answer(0.0, record((1.0, 1)).answer.arrivals, (3, 4))),
            "2 token ids",
        ),
    ],
)
def test_impossible_values_are_named_and_fail_the_run(untrue, reason):
    assert any(reason in sentence for sentence in impossible(untrue))
    with pytest.raises(BenchError, match="cannot be used"):
        refuse_impossible(LoadResult((untrue,), 0.0, 1.0))


def test_a_failed_request_fails_the_run_with_its_reason():
    with pytest.raises(BenchError, match="s turn 1 failed: HTTP 500"):
        refuse_impossible(
            LoadResult((RequestRecord(SentRequest("s", 0, 0, 4), Answer(0.0, error="HTTP 500")),), 0.0, 1.0)
        )
