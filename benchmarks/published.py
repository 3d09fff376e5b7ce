"""Two published benchmarks of a radix cache on decode workers: what was run, and every cell of the tables.

SGLang #19746: https://github.com/sgl-project/sglang/pull/19746 (Qwen3-32B, FP8 KV, three prefill and one decode worker of
two B200 each). SGLang #22234: https://github.com/sgl-project/sglang/pull/22234 (MiniMax-M2.5, one prefill and one decode
worker of four H20 each).
"""

from dataclasses import dataclass

from headstart.bench.presets import PRESETS
from headstart.bench.workload import Length, SharedPrefix
from headstart.plan.options import LimitOptions, WorkerOptions
from headstart.plan.residency import PrefixedLoad
from headstart.plan.roofline import Sharding

MIB = 2**20
RETOKENIZED = 4_343_739 / 640 / 6_000
"""#22234's prompts were counted after a round trip through text, which made them longer than what was drawn."""


@dataclass(frozen=True)
class Observed:
    """What was measured. `running` and `itl_ms` are what the decode kernels' speed is taken from."""

    cells: dict[str, float]
    running: float
    itl_ms: float
    residency: dict[str, str]
    """As said in words."""


@dataclass(frozen=True)
class Source:
    name: str
    workload: SharedPrefix
    load: PrefixedLoad
    num_clients: int
    card: str
    card_bytes: float
    """Memory that the driver reports."""
    model: str
    sharding: Sharding
    workers: WorkerOptions
    limits: LimitOptions
    num_warmup: int
    """Requests played before the sample: bench_serving sends its first one, aiperf none."""
    baseline: Observed
    decode_cache: Observed


def retokenized(length: Length) -> Length:
    return Length(round(length.tokens * RETOKENIZED), length.ratio)


_M25 = PRESETS["sglang-22234"]

SGLANG_19746 = Source(
    name="SGLang #19746",
    workload=PRESETS["sglang-19746"],
    load=PrefixedLoad(20, 50_000, 4_500, 350),
    num_clients=128,
    card="B200",
    card_bytes=183_359 * MIB,
    model="Qwen3-32B",
    sharding=Sharding(2, "bfloat16", "fp8"),
    workers=WorkerOptions(3, 1),
    limits=LimitOptions(
        max_running_requests=256, chunked_prefill_size=32_768, local_prefill_tokens=0, num_reserved_decode_tokens=400
    ),
    num_warmup=0,
    baseline=Observed(
        {
            "request_throughput": 1.21,
            "output_throughput": 430,
            "median_ttft_ms": 73_200,
            "mean_ttft_ms": 77_700,
            "median_e2e_latency_ms": 99_100,
            "mean_tpot_ms": 65.6,
            "duration": 827,
        },
        running=37,
        itl_ms=65.6,
        residency={"running": "~37", "pool": "~0.99"},
    ),
    decode_cache=Observed(
        {
            "request_throughput": 1.59,
            "output_throughput": 566,
            "median_ttft_ms": 9_000,
            "mean_ttft_ms": 31_600,
            "median_e2e_latency_ms": 73_400,
            "mean_tpot_ms": 130.6,
            "duration": 628,
        },
        running=115,
        itl_ms=130.6,
        residency={"running": "104-126", "pool": "~0.75"},
    ),
)

SGLANG_22234 = Source(
    name="SGLang #22234",
    workload=SharedPrefix(80, 8, retokenized(_M25.system), retokenized(_M25.question), _M25.output),
    load=PrefixedLoad(80, 5_250 * RETOKENIZED, 750 * RETOKENIZED, 748),
    num_clients=128,
    card="H20",
    card_bytes=97_871 * MIB,
    model="MiniMax-M2.5",
    sharding=Sharding(4, "fp8", "bfloat16"),
    workers=WorkerOptions(1, 1),
    limits=LimitOptions(
        max_running_requests=128, chunked_prefill_size=8_192, local_prefill_tokens=0, num_reserved_decode_tokens=512
    ),
    num_warmup=1,
    baseline=Observed(
        {
            "duration": 274.12,
            "total_input_tokens": 4_343_739,
            "total_output_tokens": 478_516,
            "request_throughput": 2.33,
            "input_throughput": 15_846.12,
            "output_throughput": 1_745.64,
            "max_output_tokens_per_s": 1_951,
            "concurrency": 119.15,
            "mean_e2e_latency_ms": 51_034.87,
            "median_e2e_latency_ms": 51_106.88,
            "p90_e2e_latency_ms": 61_808.48,
            "p99_e2e_latency_ms": 76_013.41,
            "mean_ttft_ms": 19_837.62,
            "median_ttft_ms": 20_315.57,
            "p99_ttft_ms": 38_496.58,
            "mean_tpot_ms": 41.80,
            "median_tpot_ms": 42.67,
            "p90_tpot_ms": 44.00,
            "p99_tpot_ms": 44.47,
            "median_itl_ms": 42.16,
            "p99_itl_ms": 65.06,
        },
        running=1_745.64 * 41.80e-3,
        itl_ms=41.80,
        residency={"running": "73 by Little's law", "pool": "not said"},
    ),
    decode_cache=Observed(
        {
            "duration": 233.71,
            "total_input_tokens": 4_341_981,
            "total_output_tokens": 478_516,
            "request_throughput": 2.74,
            "input_throughput": 18_578.34,
            "output_throughput": 2_047.46,
            "max_output_tokens_per_s": 2_336,
            "concurrency": 120.45,
            "mean_e2e_latency_ms": 43_984.84,
            "median_e2e_latency_ms": 43_068.02,
            "p90_e2e_latency_ms": 56_656.78,
            "p99_e2e_latency_ms": 68_406.12,
            "mean_ttft_ms": 4_564.99,
            "median_ttft_ms": 3_127.30,
            "p99_ttft_ms": 21_727.59,
            "mean_tpot_ms": 52.83,
            "median_tpot_ms": 55.06,
            "p90_tpot_ms": 56.87,
            "p99_tpot_ms": 57.54,
            "median_itl_ms": 55.25,
            "p99_itl_ms": 89.70,
        },
        running=2_047.46 * 52.83e-3,
        itl_ms=52.83,
        residency={"running": "108 by Little's law", "pool": "not said"},
    ),
)

SOURCES = {"sglang-19746": SGLANG_19746, "sglang-22234": SGLANG_22234}
