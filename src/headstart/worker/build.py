"""The composition root of a worker: the only module that sees concrete classes of every kind.

model folder -> weights, KV pool, executor -> transport over the pool -> prefix cache -> scheduler.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headstart.config.errors import ConfigError
from headstart.config.resolve import (
    DeviceFacts,
    ModelFacts,
    PoolPlan,
    StepPlan,
    resolve_graph_rows,
    resolve_page_size,
    resolve_pool,
    resolve_running,
    resolve_step,
    resolve_verify,
)
from headstart.config.settings import WorkerSettings
from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, DeviceExecutor, Executor, Row
from headstart.core.clock import Clock
from headstart.core.errors import WorkerError
from headstart.core.identity import KVSpec
from headstart.core.kv_layout import DTYPE_BYTES, KVLayout
from headstart.core.layout import pages_for
from headstart.core.messages import Role, Send, WorkerRef
from headstart.executor.build import (
    CPU_COPY_SHARE,
    CardLimits,
    ExecutorConfig,
    choose_dtype,
    choose_kv_dtype,
    make_executor,
    make_kv_spec,
)
from headstart.model.info import ModelInfo, fix_context, parse_overrides, read_model_info
from headstart.model.load import num_parameters
from headstart.model.source import WeightSource, resolve_model, weight_files
from headstart.model.weights import num_elements
from headstart.scheduler.protocol import Scheduler
from headstart.transfer.contract import PageDigests, Transport
from headstart.transfer.digest import HostDigests, NoDigests
from headstart.transfer.nixl import NixlTransport
from headstart.worker.decision_log import DecisionLog, open_decision_log
from headstart.worker.limits import decode_limits, prefill_limits
from headstart.worker.machine_limits import memory_room
from headstart.worker.recorder import record_scheduler
from headstart.worker.schedulers import DecodeSpec, PrefillSpec, SchedulerPorts, SchedulerSpec, make_scheduler
from headstart.worker.spec import WorkerSpec, served_name

MEASURED_TOKENS = 128
"""Prompt tokens of the step that --chunked-prefill-size auto is measured with."""
NUM_PROBES = 2
PROCESS_BYTES = 256 << 20
"""What a worker takes beside its weights and its pool: libraries, and what its steps compute with."""

log = logging.getLogger("headstart.worker")


@dataclass(frozen=True, slots=True)
class BuildPorts:
    """What a worker is wired to."""

    clock: Clock
    send: Send
    on_step_done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """Everything the loop drives, and what the gateway is told."""

    scheduler: Scheduler
    transport: Transport
    executor: Executor
    kv_spec: KVSpec
    page_bytes: int
    capacity_tokens: int
    model_name: str
    facts: dict[str, object]  # for the log
    log: DecisionLog | None  # to be closed when the loop has ended


def build_worker(spec: WorkerSpec, worker: WorkerRef, ports: BuildPorts) -> BuiltWorker:
    """Load the model and put the worker together. Raises ConfigError and WorkerError."""
    began = time.monotonic()
    settings = spec.settings
    folder = resolve_model(spec.model, _log_progress)
    device = _device(settings)
    config, pool, vocab_size = _plan_executor(spec, folder, device)
    kv_spec = make_kv_spec(config)
    executor = make_executor(config, ports.on_step_done)
    loaded = time.monotonic()
    executor.warm_up()
    step = resolve_step(
        settings.step,
        settings.cache.num_reserved_decode_tokens,
        pool,
        device,
        _prompt_tokens_per_s(executor, kv_spec, pool, config.num_threads)
        if settings.step.chunked_prefill_size == "auto"
        else 0.0,
    )
    warm = time.monotonic()
    transport = _transport(settings, worker, executor)
    page_bytes = executor.region.page_bytes
    parts = _Parts(kv_spec, pool, step, transport.descriptor(), page_bytes, vocab_size)
    digests, verifies = _digests(executor, settings)
    scheduler_spec = _scheduler_spec(spec, worker, parts, verifies)
    scheduler_ports = SchedulerPorts(transport, digests, ports.clock, ports.send)
    decisions = open_decision_log(settings.record, str(worker), scheduler_spec)
    scheduler: Scheduler
    if decisions is None:
        scheduler = make_scheduler(scheduler_spec, scheduler_ports)
    else:
        scheduler = record_scheduler(scheduler_spec, scheduler_ports, decisions)
    facts = {
        "weights_dtype": config.dtype,
        "kv_dtype": kv_spec.layout.dtype,
        "page_size": pool.page_size,
        "pool_tokens": pool.num_tokens,
        "chunked_prefill_size": step.chunked_prefill_size,
        "local_prefill_tokens": step.local_prefill_tokens,
        "verify_transfers": verifies,
        "threads": config.num_threads,
        "load_s": loaded - began,
        "warm_up_s": warm - loaded,
        "transport_s": time.monotonic() - warm,
    }
    name = served_name(spec.model, settings.model)
    return BuiltWorker(scheduler, transport, executor, kv_spec, page_bytes, pool.context_len, name, facts, decisions)


@dataclass(frozen=True, slots=True)
class _Parts:
    kv_spec: KVSpec
    pool: PoolPlan
    step: StepPlan
    descriptor: bytes
    page_bytes: int
    vocab_size: int


def _scheduler_spec(spec: WorkerSpec, worker: WorkerRef, parts: _Parts, verifies: bool) -> SchedulerSpec:
    step, pool = parts.step, parts.pool
    if spec.role == Role.PREFILL:
        limits = prefill_limits(step, pool, parts.vocab_size)
        return PrefillSpec(worker, parts.kv_spec, limits, pool.num_pages, parts.descriptor, pool.owner_pages)
    return DecodeSpec(
        worker,
        parts.kv_spec,
        decode_limits(step, pool, parts.vocab_size),
        pool.num_pages,
        parts.descriptor,
        parts.page_bytes,
        owner_pages=pool.owner_pages,
        is_uncached=spec.settings.cache.disable_radix_cache,
        verifies=verifies,
    )


def _plan_executor(spec: WorkerSpec, folder: Path, device: str) -> tuple[ExecutorConfig, PoolPlan, int]:
    settings, model = spec.settings, spec.settings.model
    overrides = "" if model.json_model_override_args.strip() == "{}" else model.json_model_override_args
    overrides = fix_context(folder, overrides, model.context_length)
    info = read_model_info(folder, parse_overrides(overrides))
    weights = WeightSource(folder, load_format=model.load_format, overrides=overrides)
    dtype, token_bytes = dtype_and_token_bytes(model.dtype, settings.cache.kv_cache_dtype, device, info)
    facts = _device_facts(spec, device, weight_bytes(weights, dtype, device))
    pool = resolve_pool(settings, facts, ModelFacts(info.context_len, token_memory(token_bytes, device)))
    running = resolve_running(settings.step, device)
    config = ExecutorConfig(
        weights=weights,
        page_size=resolve_page_size(settings.cache, device),
        device=device,
        dtype=dtype,
        kv_dtype=settings.cache.kv_cache_dtype,
        num_pages=pool.num_pages,
        num_threads=spec.num_threads or torch.get_num_threads(),
        few_rows=spec.role == Role.DECODE,
        card=CardLimits(running, resolve_graph_rows(settings.step, running, device), pool.context_len),
        self_test=not model.skip_model_self_test,
    )
    return config, pool, info.vocab_size


def dtype_and_token_bytes(wanted: str, wanted_kv: str, device: str, info: ModelInfo) -> tuple[str, int]:
    """The type a model's weights have on `device`, and the bytes of one token's KV."""
    dtype = choose_dtype(wanted, device)
    stored = choose_kv_dtype(wanted_kv, dtype, device)
    return dtype, KVLayout.full(1, info.num_layers, info.num_kv_heads, info.head_dim, stored).token_bytes


def token_memory(token_bytes: int, device: str) -> int:
    """Bytes that one token of the pool takes, with its share of what the attention keeps beside the pool."""
    return int(token_bytes * (1 + CPU_COPY_SHARE)) if device == "cpu" else token_bytes


def _device(settings: WorkerSettings) -> str:
    """Where to compute. Raises WorkerError if CUDA does not come up although a GPU is wanted."""
    wanted = settings.model.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise WorkerError(f"CUDA does not start: {str(error).splitlines()[0]}") from error
    return "cuda"


def weight_bytes(source: WeightSource, dtype: str, device: str) -> int:
    """What one worker's weights take: on a GPU the files' size, on a CPU the parameters in `dtype` and, while it loads, in
    the type of activations that they are packed from."""
    if source.load_format == "dummy":
        return num_parameters(source) * DTYPE_BYTES[dtype]
    files = weight_files(source.folder)
    if device != "cpu":
        return sum(path.stat().st_size for path in files)
    width = sum(DTYPE_BYTES[name] for name in {dtype, choose_kv_dtype("auto", dtype, device)})
    return sum(num_elements(path) for path in files) * width


def _device_facts(spec: WorkerSpec, device: str, weights: int) -> DeviceFacts:
    if device == "cpu":
        return DeviceFacts(device, _room_for_sharers(spec, weights), spec.num_sharing, weight_bytes=weights)
    free, total = torch.cuda.mem_get_info()
    return DeviceFacts(device, free, spec.num_sharing, total, weights)


def _room_for_sharers(spec: WorkerSpec, weights: int) -> int:
    """Bytes for weights and pools of all workers that share this one's memory: its launcher's measurement before any of
    them had loaded, and no more than would let this one have its part of what is left now."""
    now = weights * spec.num_sharing + (free_host_bytes() - weights) * spec.num_sharing
    planned = spec.memory_bytes - PROCESS_BYTES * spec.num_sharing
    return max(0, min(now, planned) if spec.memory_bytes else now)


def free_host_bytes() -> int:
    """Memory that this process may still take. Raises ConfigError if the system does not say."""
    room = memory_room()
    if room is None:
        raise ConfigError("nothing tells the free memory of this machine; give --max-total-tokens")
    return room.room_bytes


def _transport(settings: WorkerSettings, worker: WorkerRef, executor: DeviceExecutor) -> Transport:
    if settings.transfer.disaggregation_transfer_backend != "nixl":
        raise ConfigError(
            f"--disaggregation-transfer-backend {settings.transfer.disaggregation_transfer_backend} with --device "
            f"{settings.model.device}: only nixl is built"
        )
    return NixlTransport(str(worker), executor.region)


def _digests(executor: DeviceExecutor, settings: WorkerSettings) -> tuple[PageDigests, bool]:
    """What reads digests of the pool's pages, and whether those of pages that arrive are compared. Raises ConfigError."""
    pages = executor.host_pages()
    if pages is not None:
        return HostDigests(pages), resolve_verify(settings.transfer, "cpu")
    if settings.transfer.verify_transfers == "on":
        raise ConfigError("--verify-transfers on: pages in a GPU's memory are not read by the host")
    return NoDigests(), False


def _prompt_tokens_per_s(executor: DeviceExecutor, kv_spec: KVSpec, pool: PoolPlan, num_threads: int) -> float:
    """Run a chunk through pages that nobody uses yet. On a CPU the processor time counts, not the clock: while
    several workers start, each has the machine for a part of the time only."""
    num_tokens = min(MEASURED_TOKENS, pool.num_tokens)
    pages = int32_array(np.arange(pages_for(num_tokens, kv_spec.page_size)))
    best_s = float("inf")
    for probe in range(NUM_PROBES):
        began_cpu_s = time.process_time()
        executor.launch(Batch(-3 - probe, (Row(0, int32_array(np.zeros(num_tokens)), 0, pages),)))
        while (output := executor.poll()) is None:
            time.sleep(0.001)
        cpu_s = (time.process_time() - began_cpu_s) / num_threads
        best_s = min(best_s, output.elapsed_s, cpu_s if executor.region.device == "cpu" else output.elapsed_s)
    return num_tokens / max(best_s, 1e-6)


def _log_progress(what: str, done: int, total: int) -> None:
    if done == total:
        log.info(what, extra={"steps": total})
