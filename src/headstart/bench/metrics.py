"""What a run's records add up to, under bench_serving's names and definitions.

Time to first token: sent to first arrival. Latency: sent to last token. TPOT: (latency - TTFT) / (output - 1), one value
per request. ITL: one value per token; tokens that arrive together share the gap. Concurrency: sum of latencies over the
duration. Peaks are of one-second buckets, so peak concurrency may exceed the limit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headstart.bench.load_generator import LoadResult
from headstart.bench.records import RequestRecord

PERCENTILES = (90, 95, 99)
CURVE_POINTS = 501


def summarize(phase: LoadResult) -> dict[str, Any]:
    """bench_serving's keys. Failed requests count in `failed` only."""
    done = [record for record in phase.records if record.is_complete]
    duration_s = phase.duration_s
    input_len = sum(record.prompt_len for record in done)
    output_len = sum(record.num_tokens for record in done)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(phase.records) - len(done) + phase.num_unsent,
        "total_input_tokens": input_len,
        "total_output_tokens": output_len,
        "total_output_tokens_retokenized": sum(len(record.answer.token_ids) for record in done) or None,
        "request_throughput": _ratio(len(done), duration_s),
        "input_throughput": _ratio(input_len, duration_s),
        "output_throughput": _ratio(output_len, duration_s),
        "total_throughput": _ratio(input_len + output_len, duration_s),
        "concurrency": _ratio(sum(record.latency_s for record in done), duration_s),
        "max_output_tokens_per_s": peak_tokens_per_s(done, phase.began_s),
        "max_concurrent_requests": peak_concurrency(done, phase.began_s),
        "mean_late_ms": 1e3 * _mean([record.request.late_s for record in done]),
    }
    for name, values in samples(done).items():
        summary |= {f"{key}_{name}_ms": 1e3 * value for key, value in spread(values).items()}
    return summary | {"reuse": reuse(done)}


def samples(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Seconds, by bench_serving's name of each latency."""
    done = list(records)
    return {
        "e2e_latency": [record.latency_s for record in done],
        "ttft": [record.ttft_s for record in done],
        "tpot": [value for record in done if (value := record.tpot_s) is not None],
        "itl": [value for record in done for value in record.itls_s],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return dict.fromkeys(("mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max"), 0.0)
    array = np.asarray(values)
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "std": float(array.std()),
        **{f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES},
        "max": float(array.max()),
    }


def curve(values: Sequence[float]) -> list[float]:
    """The distribution as equally spaced quantiles, in milliseconds: enough to draw it, however many values there are."""
    if not values:
        return []
    points = min(CURVE_POINTS, len(values))
    return [round(1e3 * float(q), 4) for q in np.quantile(values, np.linspace(0, 1, points))]


def reuse(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Prefix reuse in tokens and what it spared in bytes. None where the server or the prompt format does not tell."""
    prompt_len = sum(record.prompt_len for record in done)
    totals = {
        "possible_tokens": _total(record.request.possible_len for record in done),
        "cached_tokens": _total(record.answer.usage.cached_tokens for record in done),
        "decode_prefix_tokens": _total(record.answer.usage.decode_prefix_len for record in done),
        "bytes_moved": _total(record.answer.usage.bytes_moved for record in done),
    }
    shares = {
        name.replace("_tokens", "_share"): None if total is None else _ratio(total, prompt_len)
        for name, total in totals.items()
        if name != "bytes_moved"
    }
    return {"prompt_tokens": prompt_len, **totals, **shares}


def peak_tokens_per_s(done: Sequence[RequestRecord], began_s: float) -> float:
    buckets: dict[int, int] = {}
    for record in done:
        for arrival in record.answer.arrivals:
            bucket = int(arrival.at_s - began_s)
            buckets[bucket] = buckets.get(bucket, 0) + arrival.num_tokens
    return float(max(buckets.values(), default=0))


def peak_concurrency(done: Sequence[RequestRecord], began_s: float) -> int:
    buckets: dict[int, int] = {}
    for record in done:
        sent_s = record.answer.sent_s
        for bucket in range(int(sent_s - began_s), int(sent_s + record.latency_s - began_s) + 1):
            buckets[bucket] = buckets.get(bucket, 0) + 1
    return max(buckets.values(), default=0)


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratio(value: float, of: float) -> float:
    return value / of if of else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
