"""What a process is started with: one JSON document on its standard input, so that no child has a secret on its command
line."""

import os
import socket
import sys
from pathlib import Path
from typing import BinaryIO, TypeVar

from msgspec import Struct, json

from headstart.config.settings import GatewaySettings, ModelSettings, WorkerSettings
from headstart.core.messages import Role
from headstart.worker.machine_limits import usable_cores


class LogSpec(Struct, frozen=True):
    level: str = "INFO"
    as_json: bool = False


class WorkerSpec(Struct, frozen=True):
    """One prefill or decode worker."""

    role: Role
    name: str  # empty: the first free of role-host-0, role-host-1, ...
    join: str  # HOST:PORT of the gateway's control channel
    model: str  # as resolve_model takes it
    settings: WorkerSettings
    num_threads: int = 0  # of its computation; 0: all cores
    memory_bytes: int = 0  # room for all that share it, before any of them has loaded; 0: it looks itself
    num_sharing: int = 1  # workers whose pools share one memory: this machine's, or their card's
    gpu: str = ""  # the one card it may see, as CUDA_VISIBLE_DEVICES names it; empty: as the environment says
    incarnation: int = 0  # 0: from the clock; a launcher chooses it, so that it can name the exit
    parent_pid: int = 0  # a process that this one must not outlive; 0: none
    is_local: bool = False  # its whole cluster runs on this machine
    log: LogSpec = LogSpec()


class GatewaySpec(Struct, frozen=True):
    """One gateway."""

    model_name: str  # what clients call it
    model_folder: str
    settings: GatewaySettings
    worker: WorkerSettings  # what the workers it starts with are given; flags of theirs concern the gateway too
    parent_pid: int = 0
    log: LogSpec = LogSpec()


Spec = TypeVar("Spec", WorkerSpec, GatewaySpec)


def encode_spec(spec: WorkerSpec | GatewaySpec) -> bytes:
    return json.encode(spec)


def read_spec(kind: type[Spec], stream: BinaryIO | None = None) -> Spec:
    """Read a spec to the end of `stream`, standard input if None. Raises ValueError for one of another version."""
    return json.decode((stream or sys.stdin.buffer).read(), type=kind)


def served_name(model: str, settings: ModelSettings) -> str:
    """What clients call the model: as set, else the last part of what the user named, without its file type."""
    return settings.served_model_name or Path(model).name.removesuffix(".gguf")


def default_names(role: Role) -> list[str]:
    """Names a worker started by hand may take on this host, in order of preference."""
    host = socket.gethostname().split(".")[0]
    return [f"{role}-{host}-{index}" for index in range(64)]


def transfer_environment(is_local: bool) -> dict[str, str]:
    """Settings that must be in the environment before NIXL loads. Its data ports ask for no key and open on every
    network interface: where the whole cluster is on this machine, on the loopback one alone."""
    if not is_local or "UCX_NET_DEVICES" in os.environ:
        return {}
    return {"UCX_NET_DEVICES": "lo"}


def gpu_environment(gpu: str) -> dict[str, str]:
    """Settings that must be in the environment before torch loads, so that the worker's card is its device 0."""
    return {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}


def thread_environment(num_threads: int) -> dict[str, str]:
    """Settings that must be in the environment before torch and NIXL load.

    Spinning threads of two processes on two cores slow each other down by two orders of magnitude.
    """
    count = str(num_threads or usable_cores())
    quiet = {"NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "WARN")}
    return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **quiet}
