"""From settings to a running executor: the dtype, the size of the pool, the attention backend."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.attention.torch_cpu import CpuAttention
from headstart.core.errors import WorkerError
from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.executor.pool import KVPool, PoolShape
from headstart.executor.runner import AttentionBackend, StepRunner, TorchExecutor
from headstart.model.info import (
    ModelInfo,
    model_fingerprint,
    parse_overrides,
    read_model_config,
    read_model_info,
    rope_settings,
)
from headstart.model.load import load_model
from headstart.model.source import WeightSource

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What an executor is built from."""

    weights: WeightSource
    page_size: int  # tokens; equal on both sides of a transfer
    device: str = "cpu"
    dtype: str = "auto"  # of weights and activations; "auto": see `choose_dtype`
    kv_dtype: str = "auto"  # of the pool; "auto": as dtype. Equal on both sides of a transfer
    num_pages: int | None = None  # None: as many as `mem_fraction` holds
    mem_fraction: float = 0.2  # of the memory that is free after loading
    num_threads: int = 1  # torch threads of the step
    grouped_attention: bool = True  # False reads a shared prefix once per row: for comparison


def choose_dtype(name: str, device: str) -> str:
    """Resolve "auto": bfloat16 on a GPU and on CPUs that multiply bfloat16 in hardware, else float32.

    A rule rather than a measurement, so that the workers of one machine agree. On CPUs without such instructions
    bfloat16 products are emulated and slower than float32 ones.
    """
    if name == "auto":
        return "bfloat16" if device != "cpu" or _cpu_flags() & _BF16_CPU_FLAGS else "float32"
    if name not in _DTYPES:
        raise WorkerError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return name


def make_executor(config: ExecutorConfig, on_done: Callable[[], None] | None = None) -> TorchExecutor:
    """Load the model, reserve the pool, start the thread, which calls `on_done` after each step. Raises WorkerError."""
    dtype = choose_dtype(config.dtype, config.device)
    kv_dtype = dtype if config.kv_dtype == "auto" else choose_dtype(config.kv_dtype, config.device)
    torch.set_num_threads(config.num_threads)
    model = load_model(config.weights, _DTYPES[dtype], config.device)
    shape = pool_shape(config, _DTYPES[kv_dtype])
    pool = KVPool.allocate(shape, _DTYPES[kv_dtype], config.device)
    executor = TorchExecutor(StepRunner(model, pool, _attention(config, pool)), config.num_threads, on_done)
    executor.start()
    return executor


def make_kv_spec(config: ExecutorConfig) -> KVSpec:
    """What peers must agree on with an executor built from `config`. Torch-free work only, but reads the weights once."""
    info = _info(config)
    dtype = choose_dtype(config.dtype, config.device)
    content = read_model_config(config.weights.folder, parse_overrides(config.weights.overrides))
    return KVSpec(
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=model_fingerprint(config.weights),
        page_size=config.page_size,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        rope=rope_settings(content),
    )


def pool_shape(config: ExecutorConfig, kv_dtype: torch.dtype) -> PoolShape:
    """The pool's shape; the number of pages follows from the free memory where the settings leave it open."""
    info = _info(config)
    one = PoolShape(1, info.num_layers, info.num_kv_heads, config.page_size, info.head_dim)
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = int(_free_bytes(config.device) * config.mem_fraction) // one.page_bytes(kv_dtype)
    if num_pages < 1:
        raise WorkerError(f"no memory for a single page of {one.page_bytes(kv_dtype)} bytes")
    return PoolShape(num_pages, info.num_layers, info.num_kv_heads, config.page_size, info.head_dim)


def _info(config: ExecutorConfig) -> ModelInfo:
    return read_model_info(config.weights.folder, parse_overrides(config.weights.overrides))


def _attention(config: ExecutorConfig, pool: KVPool) -> AttentionBackend:
    if config.device != "cpu":
        raise WorkerError(f"attention on {config.device!r} is not built")
    return CpuAttention(pool.data, grouped=config.grouped_attention)


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}


def _free_bytes(device: str) -> int:
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise WorkerError("/proc/meminfo does not say how much memory is available; set the number of pages")
