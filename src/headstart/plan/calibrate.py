"""`--calibrate REPORT`: a cost model whose coefficients are fitted to the single requests of a benchmark report.

    decode step   fixed_s + row_s * tokens + request_s * rows + kv_token_s * distinct KV tokens + pair_s * pairs
    prefill       2 * link.latency_s + fixed_s * steps + row_s * tokens + pair_s * pairs, for calls that overlap together
    the rest of a request's time to first token: front.before_s

Least squares with coefficients of 0 or more. A step of one worker takes longer by a share (`contention`) while the other
worker of the machine computes; of many shares the one that fits best is taken. What a client cannot tell apart is
put together: weights and the loop's own time are in `fixed_s`, the transfer is in `link.latency_s` and the prefill's
coefficients (so such links never fill up), HTTP on the way back is in `front.before_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headstart.bench.errors import BenchError
from headstart.bench.report import load
from headstart.config.errors import ConfigError
from headstart.plan.cost import Contention, CostModel, FrontCoefficients, StepCoefficients
from headstart.plan.observations import Floats, Gaps, Seen, Spells, gaps_of, seen_in, spells_of
from headstart.sim.cost import LinkCost

MESSAGE_S = 0.0003
"""One way between two processes of a machine: too short to be told apart in a client's times."""
LEAST_GAPS, LEAST_SPELLS = 50, 5
SLOWED = np.arange(0, 3.01, 0.02)
"""Shares that are tried for how much longer a step takes beside the other worker's."""
TIE = 1e-9
"""Fits that differ by less than this share of what they explain are equal but for rounding."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`decode_error` and `prefill_error` are root mean squares of the residuals over the mean time."""

    costs: CostModel
    page_size: int
    context_len: int
    decode_error: float
    prefill_error: float


def calibrate(path: Path, chunk_tokens: int | None = None) -> Calibration:
    """Fit to every run of a report. `chunk_tokens`: most tokens of a prefill step; where it is not known, steps cost
    nothing besides their tokens. Raises ConfigError where the report does not hold what a fit needs."""
    try:
        report = load(path)
    except BenchError as error:
        raise ConfigError(f"--calibrate: {error}") from error
    try:
        return fit(report["runs"], path.name, chunk_tokens)
    except ConfigError as error:
        raise ConfigError(f"--calibrate {path}: {error}") from error


def fit(runs: Sequence[dict[str, Any]], name: str, chunk_tokens: int | None = None) -> Calibration:
    server = _server(runs)
    requests = [seen_in(run) for run in runs]
    gaps = _joined([gaps_of(some) for some in requests], Gaps)
    spells = _joined([spells_of(some) for some in requests], Spells)
    if len(gaps.seconds) < LEAST_GAPS:
        raise ConfigError(f"{len(gaps.seconds)} gaps between tokens are too few for a fit; measure longer answers")
    if len(spells.seconds) < LEAST_SPELLS:
        raise ConfigError(
            f"{len(spells.seconds)} times that a prefill worker was busy are too few for a fit; add a run with "
            "--max-concurrency 1 and prompts that share nothing"
        )
    decode, decode_slowed, decode_error = fit_decode(gaps)
    prefill, latency_s, prefill_slowed, prefill_error = fit_prefill(spells, chunk_tokens)
    flat = [request for some in requests for request in some]
    front_s = max(0.0, float(np.mean([request.front_s for request in flat])) - 2 * MESSAGE_S)
    costs = CostModel(
        name=f"fitted to {name}",
        device="cpu" if runs[0]["server"].get("device", "cpu") == "cpu" else "cuda",
        kv_token_bytes=_kv_token_bytes(flat, server["page_size"]),
        decode=decode,
        prefill=prefill,
        link=LinkCost(latency_s, 0.0),
        front=FrontCoefficients(before_s=front_s, message_s=MESSAGE_S),
        contention=Contention(decode_slowed, prefill_slowed),
        notes=(
            f"decode: {len(gaps.seconds)} gaps, off by {decode_error:.1%} (root mean square)",
            f"prefill: busy {len(spells.seconds)} times, off by {prefill_error:.1%} (root mean square)",
        ),
    )
    return Calibration(costs, server["page_size"], server["max_model_len"], decode_error, prefill_error)


def fit_decode(gaps: Gaps) -> tuple[StepCoefficients, float, float]:
    """Coefficients, the share by which a busy prefill worker slows a step, and the relative error."""
    ones = np.ones_like(gaps.seconds)
    columns = np.stack([ones, gaps.new_tokens, gaps.rows, gaps.unique_tokens, gaps.pair_tokens], axis=1)
    coefficients, slowed, error = _fit_slowed(columns, gaps.seconds, gaps.busy)
    fixed, row, request, kv_token, pair = coefficients
    return StepCoefficients(fixed, 0.0, kv_token, row, request, pair), slowed, error


def fit_prefill(spells: Spells, chunk_tokens: int | None) -> tuple[StepCoefficients, float, float, float]:
    """Coefficients, the link's latency, the share by which a busy decode worker slows a step, and the relative error."""
    ones = np.ones_like(spells.seconds)
    steps = 0 * ones if chunk_tokens is None else np.ceil(spells.new_tokens / chunk_tokens)
    columns = np.stack([ones, steps, spells.new_tokens, spells.pair_tokens], axis=1)
    coefficients, slowed, error = _fit_slowed(columns, spells.seconds - 2 * MESSAGE_S, spells.busy)
    fixed, step, row, pair = coefficients
    return StepCoefficients(step, 0.0, 0.0, row, 0.0, pair), fixed / 2, slowed, error


def _fit_slowed(columns: Floats, seconds: Floats, busy: Floats) -> tuple[list[float], float, float]:
    """Fit the seconds that a step would take alone to columns @ coefficients: of its share `busy` only 1 / (1 + slowed) were
    progress. The best of SLOWED, if any time was busy."""
    best: tuple[float, Floats, float] | None = None
    for slowed in SLOWED if busy.any() else SLOWED[:1]:
        progress = 1 - busy * slowed / (1 + slowed)
        spread_out = columns / progress[:, None]
        coefficients = non_negative_fit(spread_out, seconds)
        rest = float(np.mean((spread_out @ coefficients - seconds) ** 2))
        if best is None or rest < best[0]:
            best = rest, coefficients, float(slowed)
    assert best is not None
    return best[1].tolist(), best[2], float(np.sqrt(best[0]) / np.mean(seconds))


def non_negative_fit(columns: Floats, values: Floats) -> Floats:
    """Least squares over [num_values, n] columns with n coefficients of 0 or more: the best of all sets of columns whose
    own fit has no negative coefficient, and of equals the one with fewer and earlier columns. n is small."""
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(scale > 0, scale, 1)
    gram, target = scaled.T @ scaled, scaled.T @ values
    best, gained = np.zeros(len(scale)), 0.0
    for size in range(1, len(scale) + 1):
        for chosen in combinations(np.flatnonzero(scale), size):
            part = list(chosen)
            solution = np.linalg.lstsq(gram[np.ix_(part, part)], target[part], rcond=None)[0]
            if (solution >= 0).all() and (gain := float(solution @ target[part])) > gained * (1 + TIE):
                gained = gain
                best = np.zeros(len(scale))
                best[part] = solution
    return np.asarray(best / np.where(scale > 0, scale, 1), dtype=np.float64)


def _server(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    servers = [run["server"] for run in runs]
    if not servers:
        raise ConfigError("the report has no runs")
    for server in servers:
        workers = server.get("num_prefill"), server.get("num_decode")
        if workers != (1, 1):
            raise ConfigError(f"{workers[0]} prefill and {workers[1]} decode workers; a fit needs one of each")
    first: dict[str, Any] = servers[0]
    return first


def _kv_token_bytes(requests: list[Seen], page_size: int) -> int:
    """From the smallest transfer of whole pages that all others are multiples of."""
    moved = [request.bytes_moved for request in requests if request.is_remote]
    return int(np.gcd.reduce(np.array(moved, dtype=np.int64))) // page_size


def _joined(parts: list[Any], kind: type[Any]) -> Any:
    return kind(*(np.concatenate([getattr(part, name) for part in parts]) for name in kind.__dataclass_fields__))
