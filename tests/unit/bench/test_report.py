"""Tables, JSON files, comparisons and pictures of made-up runs."""

import json

import pytest

from headstart.bench.compare import compare, render
from headstart.bench.errors import BenchError
from headstart.bench.load_generator import LoadResult
from headstart.bench.machine import machine_facts
from headstart.bench.metrics import curve, summarize
from headstart.bench.plots import draw
from headstart.bench.report import load, save, table
from tests.support.bench_targets import record

MACHINE = {"cpu": "c", "cores": 2, "memory_gib": 8.0, "torch": "2", "load_average": 0.1}


def run(label="a", seed=1, concurrency=8, share=None, speed=1.0, moved=1_000_000, output=2, **more):
    """A run whose times are divided by `speed`."""
    arrivals = [((index + 1) / speed, 1) for index in range(output)]
    phase = LoadResult((record(*arrivals, prompt=100, cached_tokens=50, bytes_moved=moved),), 0.0, output / speed)
    heading = {
        "label": label,
        "backend": "headstart",
        "dataset_name": "shared-prefix",
        "options": {"n": 1},
        "seed": seed,
        "prefix_share": share,
        "max_concurrency": concurrency,
        "request_rate": "inf",
        "open_loop": False,
        "cold": {"num_first_turns": 3, "mean_ttft_ms": 9.0, "max_ttft_ms": 11.0},
        "curves": {"ttft_ms": [1.0, 2.0], "itl_ms": curve([0.1, 0.2, 0.4])},
    }
    return {**heading, **summarize(phase), **more}


def report(*runs, **machine):
    return {"schema": 1, "machine": MACHINE | machine, "runs": list(runs)}


def test_the_table_has_bench_servings_lines_in_its_order():
    names = [line.partition(":")[0] for line in table(run()).splitlines()]
    wanted = ["Backend", "Traffic request rate", "Max request concurrency", "Successful requests"]
    wanted += ["Benchmark duration (s)", "Total input tokens", "Total generated tokens", "Request throughput (req/s)"]
    wanted += ["Output token throughput (tok/s)", "Peak output token throughput (tok/s)", "Concurrency"]
    wanted += ["Mean E2E Latency (ms)", "P99 TTFT (ms)", "Median TPOT (ms)", "P95 ITL (ms)", "Max ITL (ms)"]
    wanted += ["Total cached tokens", "Possible reuse", "KV moved (MB)", "Mean cold TTFT (ms)"]
    positions = [names.index(name) for name in wanted]
    assert positions == sorted(positions)


def test_what_a_server_does_not_tell_is_not_shown_as_zero():
    unknown = run()
    unknown["reuse"]["bytes_moved"] = None
    (line,) = [line for line in table(unknown).splitlines() if line.startswith("KV moved (MB)")]
    assert "n/a" in line


def test_a_report_is_read_back_and_appended_to(tmp_path):
    path = tmp_path / "new" / "r.json"
    save(path, MACHINE, [run("a")])
    save(path, MACHINE | {"load_average": 3.0}, [run("b")], append=True)
    assert [row["label"] for row in load(path)["runs"]] == ["a", "b"]
    save(path, MACHINE, [run("c")])
    assert len(load(path)["runs"]) == 1


def test_runs_of_another_machine_are_not_mixed_in(tmp_path):
    path = tmp_path / "r.json"
    save(path, MACHINE, [run()])
    with pytest.raises(BenchError, match="cores"):
        save(path, MACHINE | {"cores": 4}, [run()], append=True)


def test_what_cannot_be_written_is_said(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BenchError, match="cannot be written"):
        save(file / "r.json", MACHINE, [run()])
    with pytest.raises(BenchError, match="cannot be written"):
        draw([run()], file / "plots")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"r\.json"):
        load(path)


def test_machine_facts_say_what_a_number_needs():
    facts = machine_facts()
    assert {"cpu", "cores", "torch", "commit", "load_average"} <= facts.keys()
    assert facts["cores"] >= 1
    json.dumps(facts)


def ratios(comparison):
    return {line.metric: line.ratio for line in comparison.lines}


def test_ratios_are_second_over_first_of_the_means_over_seeds():
    a = report(*(run(seed=seed, speed=1.0) for seed in (1, 2, 3)))
    b = report(*(run(seed=seed, speed=speed, moved=250_000) for seed, speed in ((1, 1.0), (2, 2.0), (3, 3.0))))
    warnings, (comparison,) = compare(a, b)
    assert warnings == []
    assert ratios(comparison)["output tok/s"] == pytest.approx(2.0)
    assert ratios(comparison)["TTFT mean ms"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert ratios(comparison)["KV moved MB"] == pytest.approx(0.25)
    swing = next(line.b.swing for line in comparison.lines if line.metric == "output tok/s")
    assert swing == pytest.approx(1.0)


def test_only_equal_loads_are_compared_and_the_others_named():
    warnings, comparisons = compare(report(run(concurrency=8)), report(run(concurrency=30)))
    text = render(warnings, comparisons)
    assert "only the first report has shared-prefix, concurrency 8" in text
    assert [c.title for c in comparisons if "best" not in c.title] == []


def test_few_seeds_other_outputs_and_other_machines_are_warned_of():
    warnings, _ = compare(report(run(output=2)), report(run(output=3), cpu="d"))
    text = "\n".join(warnings)
    assert "cpu differs" in text
    assert "1 seed;" in text
    assert "output lengths differ (2, 3 tokens)" in text


def test_each_side_is_also_taken_at_its_best_deployment_and_concurrency():
    a = report(run("1P1D", concurrency=8, speed=1.0), run("1P1D", concurrency=30, speed=4.0))
    b = report(run("2P1D", concurrency=8, speed=2.0), run("1P2D", concurrency=8, speed=6.0))
    _, comparisons = compare(a, b)
    best = next(c for c in comparisons if "best" in c.title)
    assert ratios(best)["output tok/s"] == pytest.approx(6 / 4)
    assert "1P1D at 30 against 1P2D at 8" in best.title


def test_every_picture_is_drawn_as_png_and_svg_with_units(tmp_path):
    runs = [run(label, concurrency=c, share=s) for label in ("a", "b") for c in (1, 8) for s in (0.0, 0.5)]
    names = {path.name for path in draw(runs, tmp_path)}
    assert names == {
        f"{name}.{kind}" for name in ("ttft", "itl", "throughput", "bytes_moved") for kind in ("png", "svg")
    }
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "bytes_moved.svg").read_text()


def test_a_picture_without_points_is_not_drawn(tmp_path):
    assert {path.stem for path in draw([run()], tmp_path)} == {"ttft", "itl"}
