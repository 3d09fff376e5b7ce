"""The closed forms against hand-made tables for H100, bf16, and against published numbers of SGLang #19746."""

from typing import Any, Literal

import pytest

from headstart.bench.load_generator import Pace
from headstart.bench.measure import RunSpec
from headstart.bench.workload import Length, SharedPrefix, TokenSource
from headstart.plan.deployment import deployment_of
from headstart.plan.options import ClusterOptions, DeploymentOptions, LimitOptions
from headstart.plan.residency import PrefixedLoad
from headstart.plan.simulate_command import simulated_row

KV_8B, KV_32B, KV_32B_FP8 = 147_456, 262_144, 131_072
WEIGHTS_8B, WEIGHTS_32B = 15.14e9, 63.97e9
BANDWIDTH = 3.35e12
POOL_8B, POOL_32B_TP2, POOL_32B_TP4 = 53.6e9, 74.5e9, 214.5e9

POOL_TOKENS = 19_200

SHORT_OUTPUTS = PrefixedLoad(8, 7000, 1000, 256)
LONG_PREFIXES = PrefixedLoad(4, 32_000, 512, 256)
MANY_GROUPS = PrefixedLoad(80, 7000, 1000, 1000)
SGLANG_19746 = PrefixedLoad(20, 50_000, 4_500, 350)


def bound_ms(load: PrefixedLoad, num_rows: int, weights: float, kv_bytes: int, cards: int, shared: bool) -> float:
    return 1e3 * (weights + load.read_tokens(num_rows, shared=shared) * kv_bytes) / (cards * BANDWIDTH)


@pytest.mark.parametrize(
    ("load", "num_rows", "weights", "kv_bytes", "cards", "naive_ms", "shared_ms"),
    [
        (SHORT_OUTPUTS, 32, WEIGHTS_8B, KV_8B, 1, 16.0, 8.5),
        (SHORT_OUTPUTS, 64, WEIGHTS_8B, KV_8B, 1, 27.4, 10.2),
        (SHORT_OUTPUTS, 128, WEIGHTS_32B, KV_32B, 2, 50.3, 17.4),
        (LONG_PREFIXES, 16, WEIGHTS_8B, KV_8B, 1, 27.5, 10.6),
        (LONG_PREFIXES, 64, WEIGHTS_32B, KV_32B, 2, 91.3, 16.2),
        (MANY_GROUPS, 32, WEIGHTS_8B, KV_8B, 1, 16.5, 14.8),
        (MANY_GROUPS, 128, WEIGHTS_8B, KV_8B, 1, 52.4, 32.7),
    ],
)
def test_a_step_reads_what_the_tables_say(
    load: PrefixedLoad, num_rows: int, weights: float, kv_bytes: int, cards: int, naive_ms: float, shared_ms: float
) -> None:
    assert bound_ms(load, num_rows, weights, kv_bytes, cards, shared=False) == pytest.approx(naive_ms, abs=0.06)
    assert bound_ms(load, num_rows, weights, kv_bytes, cards, shared=True) == pytest.approx(shared_ms, abs=0.06)


@pytest.mark.parametrize(
    ("load", "num_rows", "kv_bytes", "naive_gb", "shared_gb"),
    [
        (SHORT_OUTPUTS, 128, KV_8B, 156, 32.0),
        (SHORT_OUTPUTS, 64, KV_32B, 139, 35.7),
        (LONG_PREFIXES, 64, KV_8B, 309, 26.1),
        (MANY_GROUPS, 128, KV_8B, 170, 104),
    ],
)
def test_a_batch_holds_what_the_tables_say(
    load: PrefixedLoad, num_rows: int, kv_bytes: int, naive_gb: float, shared_gb: float
) -> None:
    assert load.resident_tokens(num_rows, shared=False) * kv_bytes / 1e9 == pytest.approx(naive_gb, rel=0.005)
    assert load.resident_tokens(num_rows, shared=True) * kv_bytes / 1e9 == pytest.approx(shared_gb, rel=0.005)


@pytest.mark.parametrize(
    ("load", "pool_bytes", "kv_bytes", "naive", "shared"),
    [
        (PrefixedLoad(8, 7000, 1000, 1000), POOL_8B, KV_8B, 40, 153),
        (LONG_PREFIXES, POOL_8B, KV_8B, 11, 306),
        (PrefixedLoad(8, 7000, 1000, 1000), POOL_32B_TP2, KV_32B, 31, 114),
        (LONG_PREFIXES, POOL_32B_TP2, KV_32B, 8, 203),
        (SGLANG_19746, POOL_32B_TP4, KV_32B_FP8, 29, 131),
    ],
)
def test_a_pool_holds_what_the_tables_say(
    load: PrefixedLoad, pool_bytes: float, kv_bytes: int, naive: int, shared: int
) -> None:
    assert load.most_resident(pool_bytes / kv_bytes, shared=False) == naive
    assert load.most_resident(pool_bytes / kv_bytes, shared=True) == shared


def test_sglang_19746_fills_its_pool_with_37_requests_and_three_quarters_of_it_when_128_share_prefixes() -> None:
    full = SGLANG_19746.resident_tokens(37, shared=False)
    assert full * KV_32B_FP8 / 1e9 == pytest.approx(266, rel=0.005)
    assert SGLANG_19746.resident_tokens(128, shared=True) / (full / 0.99) == pytest.approx(0.79, abs=0.01)


def test_a_pool_that_the_prefixes_alone_overfill_holds_nobody() -> None:
    assert MANY_GROUPS.most_resident(500_000, shared=True) == 0


def simulated_decode(cache: Literal["both", "prefill"]) -> dict[str, Any]:
    """The decode worker of a run in which 24 clients ask for 2 prefixes of 1,600 tokens, 200 more and 64 outputs."""
    options = DeploymentOptions(
        cluster=ClusterOptions(pool_tokens=POOL_TOKENS, page_size=64, cache=cache),
        limits=LimitOptions(num_reserved_decode_tokens=64, local_prefill_tokens=0),
    )
    workload = SharedPrefix(2, 24, Length(1600), Length(200), Length(64)).build(1)
    row = simulated_row(RunSpec(workload, {}, Pace(24), 1), deployment_of(options), "", TokenSource(1000, 30_000))
    (decode,) = [worker for worker in row["workers"] if worker["worker"].startswith("decode")]
    return decode


def test_what_the_closed_form_holds_is_what_a_simulation_comes_to_hold() -> None:
    load = PrefixedLoad(2, 1600, 200, 64)
    alone, shared = simulated_decode("prefill"), simulated_decode("both")
    assert alone["running"]["max"] == load.most_resident(POOL_TOKENS, shared=False) == 10
    assert alone["pool_usage"]["max"] > 0.95
    assert shared["running"]["max"] > 20
    assert shared["pool_usage"]["max"] == pytest.approx(load.resident_tokens(24, shared=True) / POOL_TOKENS, rel=0.1)
