"""A run as text, in bench_serving's lines and names; runs as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.bench.errors import BenchError, writing
from headstart.bench.measure import ReportRow

WIDTH = 50
SCHEMA = 1
FACTS = ("cpu", "cores", "memory_gib", "torch")
"""What makes two machines the same."""
SECTIONS = (
    ("End-to-End Latency", "e2e_latency", "E2E Latency"),
    ("Time to First Token", "ttft", "TTFT"),
    ("Time per Output Token (excl. 1st token)", "tpot", "TPOT"),
    ("Inter-Token Latency", "itl", "ITL"),
)
STATISTICS = (("mean", "Mean"), ("median", "Median"), ("p90", "P90"), ("p95", "P95"), ("p99", "P99"))


def table(row: ReportRow) -> str:
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_line(name, value) for name, value in _totals(row)]
    for title, key, short in SECTIONS:
        lines.append(f" {title} ".center(WIDTH, "-"))
        lines += [_line(f"{label} {short} (ms)", row[f"{name}_{key}_ms"]) for name, label in STATISTICS]
    lines.append(_line("Max ITL (ms)", row["max_itl_ms"]))
    lines.append(" Cache Hit Details ".center(WIDTH, "-"))
    lines += [_line(name, value) for name, value in _reuse(row)]
    lines.append(" Cold (warm-up, not in the sample) ".center(WIDTH, "-"))
    lines.append(_line("Requests with an empty cache", row["cold"]["num_first_turns"]))
    lines.append(_line("Mean cold TTFT (ms)", row["cold"]["mean_ttft_ms"]))
    lines.append(_line("Max cold TTFT (ms)", row["cold"]["max_ttft_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _totals(row: ReportRow) -> Iterator[tuple[str, Any]]:
    yield "Backend", row["backend"]
    yield "Traffic request rate", row["request_rate"]
    yield "Max request concurrency", row["max_concurrency"] or "not set"
    yield "Successful requests", row["completed"]
    yield "Benchmark duration (s)", row["duration"]
    yield "Total input tokens", row["total_input_tokens"]
    yield "Total input text tokens", row["total_input_tokens"]
    yield "Total generated tokens", row["total_output_tokens"]
    yield "Total generated tokens (retokenized)", row["total_output_tokens_retokenized"]
    yield "Request throughput (req/s)", row["request_throughput"]
    yield "Input token throughput (tok/s)", row["input_throughput"]
    yield "Output token throughput (tok/s)", row["output_throughput"]
    yield "Peak output token throughput (tok/s)", row["max_output_tokens_per_s"]
    yield "Peak concurrent requests", row["max_concurrent_requests"]
    yield "Total token throughput (tok/s)", row["total_throughput"]
    yield "Concurrency", row["concurrency"]
    if row["open_loop"]:
        yield "Mean delay past the due time (ms)", row["mean_late_ms"]


def _reuse(row: ReportRow) -> Iterator[tuple[str, Any]]:
    reuse = row["reuse"]
    yield "Total prompt tokens", reuse["prompt_tokens"]
    yield "Total cached tokens", reuse["cached_tokens"]
    yield "Cache hit rate", _percent(reuse["cached_share"])
    yield "Possible reuse", _percent(reuse["possible_share"])
    yield "Decode prefix share", _percent(reuse["decode_prefix_share"])
    moved = reuse["bytes_moved"]
    yield "KV moved (MB)", None if moved is None else moved / 1e6
    yield "KV moved per request (MB)", None if moved is None else moved / 1e6 / max(1, row["completed"])


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.1f} %"


def _line(name: str, value: Any) -> str:
    if value is None:
        value = "n/a"
    elif isinstance(value, float):
        value = f"{value:.2f}"
    return f"{name + ':':<40} {value:<10}"


def load(path: Path) -> dict[str, Any]:
    """Raises BenchError for a file that this program did not write."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise BenchError(f"{path} is no benchmark report of schema {SCHEMA}")
    return report


def save(path: Path, machine: dict[str, Any], runs: list[ReportRow], *, append: bool = False) -> None:
    """Raises BenchError when appending to runs of another machine, and where the file cannot be written."""
    if append and path.exists():
        report = load(path)
        if changed := [fact for fact in FACTS if machine[fact] != report["machine"].get(fact)]:
            raise BenchError(f"{path} holds runs of another machine: {', '.join(changed)} differ")
        runs = report["runs"] + runs
    body = json.dumps({"schema": SCHEMA, "machine": machine, "runs": runs}, indent=1, allow_nan=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body + "\n")
