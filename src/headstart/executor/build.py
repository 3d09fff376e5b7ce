"""From settings to a running executor: the dtype, the size of the pool, the attention backend."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headstart.attention.torch_cpu import CpuAttention
from headstart.core.batch import DeviceExecutor
from headstart.core.errors import WorkerError
from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.core.kv_layout import KVLayout
from headstart.executor.allocator import keep_freed_memory
from headstart.executor.pool import KVPool
from headstart.executor.runner import AttentionBackend, StepRunner, TorchExecutor
from headstart.model.fuse import fuse
from headstart.model.info import (
    ModelInfo,
    model_fingerprint,
    parse_overrides,
    read_model_config,
    read_model_info,
    rope_settings,
)
from headstart.model.linear import float16_weights_are_built, pack_linears, round_linears
from headstart.model.load import load_model
from headstart.model.self_test import ScratchPool, SelfTest, check_model, library_logits, num_test_pages
from headstart.model.source import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_COPY_SHARE = 0.25
"""Of the pool's size, beside it: copies of shared and settled pages that the CPU attention keeps between steps."""
_BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class CardLimits:
    """What the buffers on a GPU are made for."""

    max_rows: int = 256  # decode rows of one step
    graph_max_rows: int = 256  # of one captured step; 0: none is captured
    context_len: int = 0  # tokens of the longest sequence; 0: as many as the pool holds


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What an executor is built from."""

    weights: WeightSource
    page_size: int  # tokens; equal on both sides of a transfer
    num_pages: int
    device: str = "cpu"
    dtype: str = "auto"  # of weights; see `choose_dtype`
    kv_dtype: str = "auto"  # of the pool; see `choose_kv_dtype`. Equal on both sides of a transfer
    num_threads: int = 1  # torch threads of the step
    few_rows: bool = True  # False: steps are long chunks alone, as on a prefill worker
    grouped_attention: bool = True  # False reads a shared prefix once per row: for comparison
    self_test: bool = True  # refuse a model whose steps differ from the library's own forward
    card: CardLimits = CardLimits()  # on a GPU


def choose_dtype(name: str, device: str) -> str:
    """Resolve "auto": bfloat16 on a GPU and on CPUs that multiply bfloat16 in hardware; else float16 weights with
    float32 activations where this torch has the kernels, else float32.

    A rule rather than a measurement, so that the workers of one machine agree. On CPUs without such instructions
    bfloat16 products are emulated, slower than float32 ones from a few rows on.
    """
    if name == "auto":
        if device != "cpu" or _cpu_flags() & _BF16_CPU_FLAGS:
            return "bfloat16"
        return "float16" if float16_weights_are_built() else "float32"
    if name not in DTYPES:
        raise WorkerError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return name


def choose_kv_dtype(name: str, dtype: str, device: str) -> str:
    """Resolve "auto" to the type of activations, given the weights': no conversion between a layer and the pool."""
    if name == "fp8_e4m3":
        if device == "cpu":
            raise WorkerError("--kv-cache-dtype fp8_e4m3 needs a GPU")
        return name
    if name != "auto":
        return choose_dtype(name, device)
    return "float32" if _packs_float16(dtype, device) else dtype


def make_executor(config: ExecutorConfig, on_done: Callable[[], None] | None = None) -> DeviceExecutor:
    """Load the model, reserve the pool, start the executor's thread, which calls `on_done` after each step. Raises
    WorkerError."""
    if config.device == "cpu":
        return make_cpu_executor(config, on_done)
    from headstart.executor.cuda.build import make_card_executor  # Triton is installed on GPU machines alone

    return make_card_executor(config, on_done)


def make_cpu_executor(config: ExecutorConfig, on_done: Callable[[], None] | None = None) -> TorchExecutor:
    """The same on the CPU."""
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    model, expected = _load(config)
    layout = kv_layout(config, model_info(config))
    pool = KVPool.allocate(layout, config.num_pages, config.device)
    if expected is not None:
        _self_test(config, model, expected, layout)
    executor = TorchExecutor(StepRunner(model, pool, _attention(config, pool)), config.num_threads, on_done)
    executor.start()
    return executor


def make_kv_spec(config: ExecutorConfig) -> KVSpec:
    """What peers must agree on with an executor built from `config`. Torch-free work only, but reads the weights once."""
    info = model_info(config)
    content = read_model_config(config.weights.folder, parse_overrides(config.weights.overrides))
    return KVSpec(
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=model_fingerprint(config.weights),
        rope=rope_settings(content),
        layout=kv_layout(config, info),
    )


def kv_layout(config: ExecutorConfig, info: ModelInfo) -> KVLayout:
    """How `config` stores the KV of a model."""
    return KVLayout.full(config.page_size, info.num_layers, info.num_kv_heads, info.head_dim, _kv_dtype(config))


def _self_test(config: ExecutorConfig, model: PreTrainedModel, expected: SelfTest, layout: KVLayout) -> None:
    """Raise ModelRefused unless steps over a small pool of `layout` give what the library computes."""
    info = model_info(config)
    attention = _attention(config, KVPool.allocate(layout, num_test_pages(config.page_size), config.device))
    pool = ScratchPool(attention.begin, config.page_size, info.num_layers)
    check_model(model, expected, pool, DTYPES[choose_dtype(config.dtype, config.device)], info.context_len)


def _load(config: ExecutorConfig) -> tuple[PreTrainedModel, SelfTest | None]:
    """The model, and what the library computes with it, taken before its modules are replaced."""
    dtype = choose_dtype(config.dtype, config.device)
    packs_float16 = _packs_float16(dtype, config.device)
    model = load_model(config.weights, torch.float32 if packs_float16 else DTYPES[dtype], config.device)
    expected = library_logits(model) if config.self_test else None
    fuse(model)
    if packs_float16 and config.few_rows:
        pack_linears(model)
    elif packs_float16:
        round_linears(model)
    return model, expected


def _kv_dtype(config: ExecutorConfig) -> str:
    return choose_kv_dtype(config.kv_dtype, choose_dtype(config.dtype, config.device), config.device)


def _packs_float16(dtype: str, device: str) -> bool:
    return dtype == "float16" and device == "cpu"


def model_info(config: ExecutorConfig) -> ModelInfo:
    return read_model_info(config.weights.folder, parse_overrides(config.weights.overrides))


def _attention(config: ExecutorConfig, pool: KVPool) -> AttentionBackend:
    return CpuAttention(pool.data, config.grouped_attention, copy_bytes=int(pool.data.nbytes * CPU_COPY_SHARE))


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
