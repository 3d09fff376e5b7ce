"""`headstart doctor`: what is installed, what this machine is, and what would be chosen for a model."""

import importlib.metadata
import importlib.util
import platform
import shutil
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from headstart.config.resolve import (
    DeviceFacts,
    ModelFacts,
    resolve_pool,
    resolve_step,
    threads_for,
)
from headstart.config.settings import WorkerSettings, conflicts
from headstart.core.errors import HeadstartError
from headstart.model.info import ModelInfo, fix_context, parse_overrides, read_model_info
from headstart.model.source import WeightSource, resolve_model
from headstart.worker.machine_limits import usable_cores
from headstart.worker.spec import served_name

NUM_COPIES = 10
PACKAGES = ("headstart", "torch", "transformers", "nixl", "mooncake-transfer-engine", "pyzmq", "msgspec", "tokenizers")


def examine(model: str, settings: WorkerSettings) -> int:
    """Print the findings. Exit status 1 if something would keep `headstart serve` from working."""
    console = Console()
    problems = conflicts(settings)
    console.print(_table("installed", [(name, _version(name)) for name in PACKAGES]))
    device, machine = _machine(settings.model.device)
    console.print(_table("machine", machine))
    problems += _transport_problems()
    try:
        folder = resolve_model(model)
        chosen = settings.model
        overrides = fix_context(folder, chosen.json_model_override_args, chosen.context_length)
        info = read_model_info(folder, parse_overrides(overrides))
        source = WeightSource(folder, settings.model.load_format, overrides=overrides)
        console.print(_table(f"model {served_name(model, settings.model)}", _choices(settings, info, source, device)))
    except HeadstartError as error:
        problems.append(str(error))
    for problem in problems:
        console.print(f"[red]problem:[/red] {problem}", highlight=False)
    console.print("nothing stands in the way" if not problems else f"problems: {len(problems)}")
    return 1 if problems else 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine(wanted: str) -> tuple[DeviceFacts, list[tuple[str, str]]]:
    import torch

    from headstart.worker.build import free_host_bytes

    cores = usable_cores()
    facts = [
        ("python", platform.python_version()),
        ("cores", f"{cores} ({threads_for(cores, 2)} for each of 1 prefill and 1 decode worker)"),
        ("nvidia-smi", shutil.which("nvidia-smi") or "absent"),
    ]
    if wanted != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        facts += _card(free, total)
        return DeviceFacts("cuda", free, 1, total), [*facts, ("device", "cuda: one worker prefills and decodes")]
    free = free_host_bytes()
    return DeviceFacts("cpu", free, num_sharing=2), [*facts, ("device", f"cpu, {free >> 20} MiB free")]


def _card(free: int, total: int) -> list[tuple[str, str]]:
    """The first GPU: its name, memory, driver and the rate at which it copies its own memory, read and written bytes."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    source = torch.empty(min(1 << 30, free // 4), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(NUM_COPIES):
        target.copy_(source)
    ended.record()
    ended.synchronize()
    rate = 2 * NUM_COPIES * source.nbytes / (began.elapsed_time(ended) * 1e-3)
    return [
        ("gpus", str(torch.cuda.device_count())),
        ("gpu 0", f"{properties.name}, {properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"),
        ("gpu memory", f"{free >> 20} MiB free of {total >> 20} MiB"),
        ("gpu copies", f"{rate / 1e12:.2f} TB/s"),
    ]


def _choices(
    settings: WorkerSettings, info: ModelInfo, source: WeightSource, device: DeviceFacts
) -> list[tuple[str, str]]:
    from headstart.worker.build import choose_kv_dtype, dtype_and_token_bytes, token_memory, weight_bytes

    kv_dtype = settings.cache.kv_cache_dtype
    dtype, token_bytes = dtype_and_token_bytes(settings.model.dtype, kv_dtype, device.device, info)
    device = replace(device, weight_bytes=weight_bytes(source, dtype, device.device))
    pool = resolve_pool(settings, device, ModelFacts(info.context_len, token_memory(token_bytes, device.device)))
    step = resolve_step(settings.step, settings.cache.num_reserved_decode_tokens, pool, device.device, 0.0)
    chunk = settings.step.chunked_prefill_size
    return [
        ("architecture", f"{info.architecture}, {info.num_layers} layers, vocabulary {info.vocab_size}"),
        ("weights", dtype),
        ("KV", choose_kv_dtype(kv_dtype, dtype, device.device)),
        ("page size", f"{pool.page_size} tokens, {pool.page_size * token_bytes} bytes"),
        ("pool", f"{pool.num_pages} pages, {pool.num_tokens} tokens, {pool.num_tokens * token_bytes >> 20} MiB"),
        ("context", f"{pool.context_len} tokens"),
        ("running requests", str(step.max_running_requests)),
        ("local prefill", f"{step.local_prefill_tokens} tokens a step"),
        ("prefill credit", f"{step.credit_tokens} tokens"),
        ("chunk", "measured when a worker starts" if chunk == "auto" else f"{chunk} tokens"),
    ]


def _transport_problems() -> list[str]:
    names = ("nixl", "nixl_cu13", "nixl_cu12")
    if any(importlib.util.find_spec(name) for name in names):
        return []
    return ["NIXL is not installed: workers cannot exchange KV"]


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    return table
