"""Bench's workloads on clusters in virtual time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.bench.errors import BenchError
from headstart.bench.measure import ReportRow
from headstart.bench.options import LengthOptions, LoadOptions, PrefixOptions, ReportOptions
from headstart.bench.run_specs import run_specs
from headstart.bench.workload import TokenSource
from headstart.config.errors import ConfigError
from headstart.plan.deployment import deployment_of
from headstart.plan.options import (
    ClusterOptions,
    CostOptions,
    DeploymentOptions,
    LimitOptions,
    SheetOptions,
    SimulateOptions,
    TrafficOptions,
    WorkerOptions,
)
from headstart.plan.simulate_command import run, simulated_row, stepping

GROUPS = PrefixOptions(
    gsp_num_groups=2, gsp_prompts_per_group=8, gsp_system_prompt_len=640, gsp_question_len=100, gsp_output_len=24
)
TIGHT = ClusterOptions(pool_tokens=4096, prefill_pool_tokens=16_384)
"""Room for five requests that share nothing."""


def one_run(
    cluster: ClusterOptions = TIGHT,
    workers: WorkerOptions = WorkerOptions(),  # noqa: B008
    limits: LimitOptions = LimitOptions(),  # noqa: B008
    rates: SheetOptions = SheetOptions(),  # noqa: B008
    step_by_step: bool = False,
    **what: object,
) -> ReportRow:
    options = SimulateOptions(TrafficOptions(**({"prefix": GROUPS} | what)))  # type: ignore[arg-type]
    deployment = deployment_of(DeploymentOptions(sheet_rates=rates, workers=workers, cluster=cluster, limits=limits))
    if step_by_step:
        deployment = stepping(deployment)
    (run_spec,) = run_specs(options.bench, deployment.spec.decode.context_len)
    return simulated_row(run_spec, deployment, "sim", TokenSource(1000, 30_000))


def worker(row: ReportRow, name: str) -> ReportRow:
    (found,) = [worker for worker in row["workers"] if worker["worker"] == name]
    return found


def test_a_decode_cache_moves_only_the_questions_and_runs_more_at_once() -> None:
    cached, uncached = one_run(), one_run(replace(TIGHT, cache="prefill"))
    assert cached["reuse"]["decode_prefix_share"] > 0.8
    assert uncached["reuse"]["decode_prefix_tokens"] == 0
    assert cached["reuse"]["bytes_moved"] < uncached["reuse"]["bytes_moved"] / 4
    assert worker(cached, "decode-0")["running"]["max"] == 8
    assert worker(uncached, "decode-0")["running"]["max"] <= 5
    assert cached["output_throughput"] > uncached["output_throughput"]


def test_without_a_decode_cache_prefill_workers_still_keep_theirs() -> None:
    kept, nothing = one_run(replace(TIGHT, cache="prefill")), one_run(replace(TIGHT, disable_radix_cache=True))
    assert worker(kept, "prefill-0")["hit_rate"] > 0.8
    assert worker(nothing, "prefill-0")["hit_rate"] == 0
    assert worker(nothing, "decode-0")["hit_rate"] == 0


def test_pool_usage_counts_what_is_neither_free_nor_evictable() -> None:
    row = one_run(load=LoadOptions(max_concurrency=(1,)))
    usage = worker(row, "decode-0")["pool_usage"]
    pages = -(-(640 + 100 + 24) // 64) + 1  # of one request, and what is reserved for its growth
    assert 0 < usage["max"] <= pages / (4096 // 64)


def test_attention_that_shares_nothing_takes_longer_steps() -> None:
    shared, naive = one_run(), one_run(replace(TIGHT, naive_attention=True))
    assert naive["mean_itl_ms"] > shared["mean_itl_ms"]


def test_the_bytes_that_move_are_the_model_s() -> None:
    row = one_run(replace(TIGHT, disable_radix_cache=True), load=LoadOptions(max_concurrency=(1,)))
    assert row["reuse"]["bytes_moved"] == 16 * 12 * 64 * 147_456  # 739 tokens, in pages of 64, of an 8B model's KV


def test_a_link_carries_its_rate_however_many_workers_send() -> None:
    workers, load = WorkerOptions(4, 1), LoadOptions(max_concurrency=(16,))
    rates = SheetOptions(link_gb_s=0.5)
    row = one_run(replace(TIGHT, disable_radix_cache=True, pool_tokens=32_768), workers, load=load, rates=rates)
    busy_s = row["reuse"]["bytes_moved"] / 0.5e9
    assert busy_s < row["duration"] < 1.1 * busy_s


def test_a_link_so_slow_that_the_cluster_ends_a_worker_fails_the_run() -> None:
    limits, rates = LimitOptions(request_timeout=20.0), SheetOptions(link_gb_s=0.001)
    with pytest.raises(BenchError, match=r"the link is too slow for this load: (prefill|decode)-0 was ended"):
        one_run(replace(TIGHT, disable_radix_cache=True), limits=limits, rates=rates)


def test_a_first_token_waits_for_the_pages_and_for_their_notice() -> None:
    load = LoadOptions(max_concurrency=(1,))
    cluster = replace(TIGHT, disable_radix_cache=True)
    near, far = (one_run(cluster, rates=SheetOptions(link_latency_us=us), load=load) for us in (0.0, 2e6))
    assert far["mean_ttft_ms"] - near["mean_ttft_ms"] == pytest.approx(2 * 2000)


def test_more_workers_serve_sooner() -> None:
    one, two = (one_run(workers=WorkerOptions(1, n), prefix=replace(GROUPS, gsp_num_groups=4)) for n in (1, 2))
    assert {row["worker"] for row in two["workers"]} == {"prefill-0", "decode-0", "decode-1"}
    assert two["duration"] < one["duration"]


def test_decode_workers_serve_alone_where_there_is_no_prefill_worker() -> None:
    row = one_run(workers=WorkerOptions(0, 1))
    assert row["completed"] == 16
    assert row["reuse"]["bytes_moved"] == 0


def test_a_conversation_finds_its_own_answers() -> None:
    length = LengthOptions(num_prompts=3, num_turns=4, random_input_len=300, turn_len=80, random_output_len=64)
    row = one_run(workload="multi-turn", length=length)
    assert row["reuse"]["decode_prefix_share"] > 0.5


def test_the_front_delays_the_first_token_and_no_other() -> None:
    options = SimulateOptions(TrafficOptions(prefix=GROUPS, load=LoadOptions(max_concurrency=(1,))))
    plain = deployment_of(DeploymentOptions(cluster=TIGHT))
    front = replace(plain.costs.front, before_s=0.5, after_s=0.25)
    slow = replace(plain, costs=replace(plain.costs, front=front))
    (run_spec,) = run_specs(options.bench, plain.spec.decode.context_len)
    fast_row, slow_row = (simulated_row(run_spec, some, "sim", TokenSource(1000, 30_000)) for some in (plain, slow))
    assert slow_row["mean_ttft_ms"] - fast_row["mean_ttft_ms"] == pytest.approx(750, abs=0.01)
    assert slow_row["mean_itl_ms"] == pytest.approx(fast_row["mean_itl_ms"])


def test_jumps_change_nothing() -> None:
    assert one_run() == one_run(step_by_step=True)


def test_a_request_that_fails_fails_the_run() -> None:
    with pytest.raises(BenchError, match="deadline"):
        one_run(limits=LimitOptions(request_timeout=0.01))


def command(**output: object) -> SimulateOptions:
    return SimulateOptions(
        TrafficOptions(prefix=replace(GROUPS, gsp_prompts_per_group=2), load=LoadOptions(num_seeds=2)),
        deployment=DeploymentOptions(cluster=TIGHT),
        output=ReportOptions(**output),  # type: ignore[arg-type]
    )


def test_two_runs_print_and_write_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for name in ("a.json", "b.json"):
        assert run(command(output_file=str(tmp_path / name))) == 0
        printed.append(capsys.readouterr())
    assert printed[0].out == printed[1].out
    assert "decode-0" in printed[0].out
    assert "MB at most" in printed[0].err
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_reports_compare_as_measured_ones_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.json")
    run(command(output_file=path, details=True))
    assert len(json.loads(Path(path).read_text())["runs"][0]["requests"]) == 6
    capsys.readouterr()
    assert run(command(compare=(path, path))) == 0
    assert "1.000" in capsys.readouterr().out


def test_saved_coefficients_give_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, options = str(tmp_path / "costs.json"), command()
    saved = replace(options.deployment, cost=CostOptions(card="H200", save_sheet=path))
    read = replace(options.deployment, cost=CostOptions(sheet=path))
    assert run(replace(options, deployment=saved)) == 0
    first = capsys.readouterr().out
    assert run(replace(options, deployment=read)) == 0
    assert capsys.readouterr().out == first


def test_text_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        TrafficOptions(load=LoadOptions(prompt_format="text"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (DeploymentOptions(cluster=ClusterOptions(pool_tokens=100)), "fewer than two pages"),
        (DeploymentOptions(limits=LimitOptions(context_length=1_000_000)), "more than the model's 131072"),
        (DeploymentOptions(cost=CostOptions(model="MiniMax-M2.5")), "does not fit --tp 1"),
        (DeploymentOptions(cost=CostOptions(sheet="/nowhere")), "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(options: DeploymentOptions, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        deployment_of(options)
    assert "\n" not in str(refusal.value)
