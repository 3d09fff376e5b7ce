"""`headstart doctor`: what is installed, what this machine is, and what would be chosen for a model."""

import importlib.metadata
import importlib.util
import platform
import shutil

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
from headstart.model.info import ModelInfo, parse_overrides, read_model_info
from headstart.model.source import resolve_model
from headstart.worker.machine_limits import memory_room, usable_cores
from headstart.worker.spec import served_name

PACKAGES = ("headstart", "torch", "transformers", "nixl", "mooncake-transfer-engine", "pyzmq", "msgspec", "tokenizers")


def examine(model: str, settings: WorkerSettings) -> int:
    """Print the findings. Exit status 1 if something would keep `headstart serve` from working."""
    console = Console()
    problems = conflicts(settings)
    console.print(_table("installed", [(name, _version(name)) for name in PACKAGES]))
    device, machine = _machine()
    console.print(_table("machine", machine))
    problems += _transport_problems()
    try:
        folder = resolve_model(model)
        info = read_model_info(folder, parse_overrides(settings.model.json_model_override_args))
        console.print(_table(f"model {served_name(model, settings.model)}", _choices(settings, info, device)))
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


def _machine() -> tuple[DeviceFacts, list[tuple[str, str]]]:
    import torch

    cores = usable_cores()
    facts = [
        ("python", platform.python_version()),
        ("cores", f"{cores} ({threads_for(cores, 2)} for each of 1 prefill and 1 decode worker)"),
        ("nvidia-smi", shutil.which("nvidia-smi") or "absent"),
    ]
    if torch.cuda.is_available():
        facts.append(("gpu", f"{torch.cuda.get_device_name()}: not used, steps on a GPU are not built"))
    room = memory_room()
    free = room.room_bytes if room is not None else 0
    return DeviceFacts("cpu", free, num_sharing=2), [*facts, ("device", f"cpu, {free >> 20} MiB free")]


def _choices(settings: WorkerSettings, info: ModelInfo, device: DeviceFacts) -> list[tuple[str, str]]:
    from headstart.worker.build import dtype_and_token_bytes, kv_dtype_of, token_memory

    dtype, token_bytes = dtype_and_token_bytes(settings.model.dtype, device.device, info)
    pool = resolve_pool(settings, device, ModelFacts(info.context_len, token_memory(token_bytes, device.device)))
    step = resolve_step(settings.step, settings.cache.num_reserved_decode_tokens, pool, device.device, 0.0)
    chunk = settings.step.chunked_prefill_size
    return [
        ("architecture", f"{info.architecture}, {info.num_layers} layers, vocabulary {info.vocab_size}"),
        ("weights", dtype),
        ("KV", kv_dtype_of(dtype, device.device)),
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
