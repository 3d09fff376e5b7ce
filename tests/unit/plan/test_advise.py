"""`headstart plan` from its flags to its words, on simulations of seconds."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.bench.command import run as bench
from headstart.bench.options import LoadOptions, PrefixOptions, ReportOptions, TargetOptions
from headstart.config.errors import ConfigError
from headstart.plan.advise import run, splits_of
from headstart.plan.capacity import Split
from headstart.plan.options import ClusterOptions, CostOptions, PlanOptions, SimulateOptions, TrafficOptions
from headstart.plan.simulate_command import run as simulate
from headstart.plan.slo import Targets

SMALL = PlanOptions(
    TrafficOptions(
        prefix=PrefixOptions(gsp_num_groups=2, gsp_prompts_per_group=4, gsp_system_prompt_len=640, gsp_output_len=16),
        load=LoadOptions(max_concurrency=(4,)),
    ),
    cards=3,
)


def test_cards_become_every_pair_of_prefill_and_decode_workers() -> None:
    assert splits_of(8, 2) == [Split(1, 3), Split(2, 2), Split(3, 1)]
    with pytest.raises(ConfigError, match="need 8"):
        splits_of(7, 4)


def test_a_plan_names_workers_goodput_and_what_binds_and_is_the_same_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, reports = [], []
    for name in ("a.json", "b.json"):
        assert run(replace(SMALL, output_file=str(tmp_path / name))) == 0
        texts.append(capsys.readouterr().out)
        reports.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert reports[0] == reports[1]
    (load,) = json.loads(reports[0])["loads"]
    assert len(load["estimates"]) == 2
    best, other = load["trials"]
    assert best["goodput"] == best["throughput"] >= other["goodput"] > 0
    num_prefill, num_decode = best["split"]["num_prefill"], best["split"]["num_decode"]
    assert f"Use {num_prefill} prefill and {num_decode} decode workers" in texts[0]
    assert f"binding: {load['binding']}" in texts[0]


def test_links_whose_bytes_take_no_time_have_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet, report = tmp_path / "sheet.json", tmp_path / "plan.json"
    assert run(replace(SMALL, cost=CostOptions(save_sheet=str(sheet)))) == 0
    costs = json.loads(sheet.read_text())
    sheet.write_text(json.dumps({**costs, "link": {**costs["link"], "byte_s": 0.0}}))
    capsys.readouterr()
    asked = replace(SMALL, cost=CostOptions(sheet=str(sheet)), cluster=ClusterOptions(pool_tokens=65_536))
    assert run(replace(asked, output_file=str(report))) == 0
    assert "the link any number" in capsys.readouterr().out
    (load,) = json.loads(report.read_text())["loads"]
    assert [found["link_rate"] for found in load["estimates"]] == [None, None]


def test_cards_that_make_no_worker_are_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(SMALL, cards=5, cost=CostOptions(tp=2))) == 0
    assert "4 of 5 cards" in capsys.readouterr().out


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(replace(SMALL, output_file=str(tmp_path / "file" / "a.json"))) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_targets_out_of_reach_are_named_with_the_distance(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(SMALL, targets=Targets(ttft_p99_ms=0.5))) == 1
    text = capsys.readouterr().out
    assert "No split of 3 cards meets the targets" in text
    assert "ms (" in text.split("TTFT p99 is")[1]
    assert "binding: the TTFT target" in text


def test_the_fewest_cards_that_meet_the_targets_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(
        SMALL,
        cards="auto",
        traffic=replace(SMALL.traffic, load=LoadOptions(max_concurrency=(8,))),
        cluster=ClusterOptions(pool_tokens=2000, cache="prefill"),
        targets=Targets(ttft_p50_ms=100.0),
    )
    assert run(busy) == 0
    (found,) = re.findall(r"decode workers, (\d+) cards", capsys.readouterr().out)
    assert int(found) > 2
    assert run(replace(busy, cards=int(found) - 1)) == 1


def test_the_fewest_cards_are_a_question_only_with_targets() -> None:
    with pytest.raises(ConfigError, match="needs a target"):
        run(replace(SMALL, cards="auto"))


def test_a_curve_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    assert run(replace(SMALL, figure=str(tmp_path / "curve.png"))) == 0
    first = (tmp_path / "curve.svg").read_bytes()
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert run(replace(SMALL, figure=str(tmp_path / "curve.png"))) == 0
    assert (tmp_path / "curve.svg").read_bytes() == first


def test_a_rate_is_planned_for_without_waiting_clients(capsys: pytest.CaptureFixture[str]) -> None:
    rate = LoadOptions(request_rate=2.0, max_concurrency=(4,))
    assert run(replace(SMALL, traffic=replace(SMALL.traffic, load=rate))) == 1
    assert "--max-concurrency 0" in capsys.readouterr().err
    free = replace(rate, max_concurrency=(0,))
    assert run(replace(SMALL, traffic=replace(SMALL.traffic, load=free))) == 0
    assert "binding: the offered load: all of it is served" in capsys.readouterr().out


def test_several_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="one seed"):
        run(replace(SMALL, traffic=TrafficOptions(load=LoadOptions(num_seeds=2))))


def test_a_picture_that_nothing_could_draw_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(replace(SMALL, figure=str(tmp_path / "curve.png"))) == 1
    simulated = SimulateOptions(SMALL.traffic, output=ReportOptions(plots=str(tmp_path)))
    assert simulate(simulated) == 1
    assert bench(replace(simulated.bench, target=TargetOptions(base_url="http://127.0.0.1:1"))) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(" needs ")[0] for line in said.err.splitlines()] == [
        "headstart plan: --figure",
        "headstart simulate: --plots",
        "headstart bench: --plots",
    ]
    assert said.err.count("make install-dev") == 3


def test_work_is_announced_before_it_begins_also_where_output_goes_to_files(capfd: pytest.CaptureFixture[str]) -> None:
    assert simulate(SimulateOptions(SMALL.traffic)) == 0
    assert capfd.readouterr().err.startswith("1P1D: concurrency 4, seed 1: simulating 10 requests ...\n")
    assert run(SMALL) == 0
    assert re.match(r"simulating 10 requests on .P.D, \d+ running at most \.\.\.\n", capfd.readouterr().err)
