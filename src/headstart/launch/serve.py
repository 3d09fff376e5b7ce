"""`headstart serve`: checks, the model, then a Launcher over one gateway and its workers; and what the user sees of it."""

import errno
import http.client
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from headstart.config.errors import ConfigError
from headstart.config.resolve import threads_for
from headstart.config.settings import ClusterSettings, GatewaySettings, ModelSettings, WorkerSettings
from headstart.core.messages import Role, WorkerRef, WorkerState
from headstart.launch.child import Child
from headstart.launch.launcher import Launcher, LauncherPorts
from headstart.launch.loading_watch import LoadingWatch, work_of
from headstart.launch.topology import Topology
from headstart.model.info import parse_overrides, read_model_info
from headstart.model.refusals import refuse_unservable
from headstart.model.source import resolve_model
from headstart.observe.logs import set_up_logging
from headstart.wire.channels import TO_WORKER
from headstart.wire.security import is_loopback
from headstart.wire.sockets import Dealer
from headstart.worker.machine_limits import (
    check_open_files,
    memory_kills,
    memory_room,
    raise_open_files_limit,
    usable_cores,
)
from headstart.worker.ports import control_url, http_family, is_ipv6, open_wiring, refuse_ipv6
from headstart.worker.spec import GatewaySpec, LogSpec, WorkerSpec, encode_spec, served_name
from headstart.worker.streams import try_print
from headstart.worker.wake import Waker


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What `headstart serve` was asked for."""

    model: str
    gateway: GatewaySettings
    worker: WorkerSettings
    topology: Topology
    log: LogSpec

    @property
    def model_name(self) -> str:
        return served_name(self.model, self.worker.model)


def serve(plan: ServePlan) -> int:
    """Run until a signal. Returns the exit status. Raises ConfigError before anything has started."""
    began = time.monotonic()
    set_up_logging("launcher", plan.log.level, plan.log.as_json)
    check_open_files(raise_open_files_limit())
    refuse_ipv6(plan.gateway.control_host, "--control-host")
    check_control_host(plan)
    check_control_is_guarded(plan.gateway, plan.worker.cluster)
    check_ports(plan.gateway)
    folder = prepare_model(plan.model)
    refuse_unservable(folder, plan.worker.model.json_model_override_args, plan.worker.model.load_format)
    check_context(folder, plan.worker.model)
    plan = replace(plan, gateway=with_admin_key(plan.gateway))
    topology = plan.topology
    try_print(
        f"starting gateway, {topology.num_prefill} prefill and {topology.num_decode} decode on {_device_words(topology)}, "
        f"model {plan.model_name}"
    )
    wiring = open_wiring(plan.worker.cluster).wiring
    control = Dealer.connect(wiring, control_url(plan.gateway.control_address), "launcher", TO_WORKER)
    ports = LauncherPorts(control, JoinedWorkers(plan.gateway), Waker.open(), memory_kills, LoadingWatch(work_of))

    def greet() -> None:
        try_print(welcome(plan, time.monotonic() - began))

    launcher = Launcher(list(children(plan, folder)), ports, plan.worker.step.drain_timeout, greet, try_print)
    return launcher.run()


def check_ports(gateway: GatewaySettings) -> None:
    """Raise ConfigError if a port that the gateway needs is taken."""
    for host, port, flag in (
        (gateway.host, gateway.port, "--port"),
        (gateway.control_host, gateway.resolved_control_port, "--control-port"),
    ):
        with socket.socket(http_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                reason = "is taken by another process" if taken else f"cannot be used: {error.strerror or error}"
                raise ConfigError(f"port {port} on {host} {reason}; choose another with {flag}") from error


def check_control_is_guarded(gateway: GatewaySettings, cluster: ClusterSettings) -> None:
    """Raise ConfigError where control messages would leave this machine without a key."""
    if is_loopback(gateway.control_host) or cluster.cluster_key or cluster.insecure_control:
        return
    raise ConfigError(
        f"--control-host {gateway.control_host} lets other machines in: give --cluster-key FILE (`headstart key` makes "
        "one), or --insecure-control where whoever reaches the port may be a member"
    )


def check_control_host(plan: ServePlan) -> None:
    """Raise ConfigError where the prefill workers would tell others a loopback address: they tell the one that they
    reach the gateway by."""
    if plan.topology.num_prefill and plan.gateway.control_host == "0.0.0.0":
        raise ConfigError(
            "--control-host 0.0.0.0 does not say where workers on other machines reach the prefill workers of this one; "
            "give this machine's address in their network"
        )


def with_admin_key(settings: GatewaySettings) -> GatewaySettings:
    """`settings` with a key for the launcher's own questions, where the gateway asks for one and the user names none."""
    access = settings.access
    if access.admin_api_key or (not access.api_keys and is_loopback(settings.host)):
        return settings
    return replace(settings, access=replace(access, admin_api_key=secrets.token_urlsafe(32)))


def prepare_model(model: str) -> Path:
    """The model's folder; a GGUF file is converted once, with a progress bar if somebody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return resolve_model(model)
    with _progress(console) as progress:
        return resolve_model(model, progress)


def check_context(folder: Path, settings: ModelSettings) -> None:
    """Raise ConfigError for a context that the model was not made for: found here, it costs no start of a worker."""
    info = read_model_info(folder, parse_overrides(settings.json_model_override_args))
    wanted = settings.context_length
    if wanted != "auto" and wanted > info.context_len:
        raise ConfigError(f"--context-length {wanted} is more than the {info.context_len} tokens of {folder.name}")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update


def children(plan: ServePlan, folder: Path) -> Iterator[Child]:
    """Gateway first, then decode and prefill workers."""
    gateway = GatewaySpec(plan.model_name, str(folder), plan.gateway, plan.worker, os.getpid(), plan.log)
    yield Child("gateway", "gateway", lambda incarnation: (_argv("gateway_process"), encode_spec(gateway)))
    topology = plan.topology
    groups: tuple[tuple[Role, int, tuple[str, ...]], ...] = (
        (Role.DECODE, topology.num_decode, topology.decode_gpus),
        (Role.PREFILL, topology.num_prefill, topology.prefill_gpus),
    )
    for role, count, gpus in groups:
        for index in range(count):
            yield _worker_child(plan, folder, role, f"{role}-{index}", gpus[index] if gpus else "")


def _worker_child(plan: ServePlan, folder: Path, role: Role, name: str, gpu: str) -> Child:
    topology = plan.topology
    num_workers = topology.num_prefill + topology.num_decode
    room = memory_room() if topology.device == "cpu" else None
    model = replace(plan.worker.model, served_model_name=plan.model_name, device=topology.device)
    settings = replace(plan.worker, model=model)

    def command(incarnation: int) -> tuple[list[str], bytes]:
        spec = WorkerSpec(
            role=role,
            name=name,
            join=plan.gateway.control_address,
            model=str(folder),
            settings=settings,
            num_threads=threads_for(usable_cores(), num_workers),
            memory_bytes=room.room_bytes if room is not None else 0,
            num_sharing=topology.num_sharing(gpu),
            gpu=gpu,
            incarnation=incarnation,
            parent_pid=os.getpid(),
            is_local=is_loopback(plan.gateway.control_host),
            log=plan.log,
        )
        return _argv("process"), encode_spec(spec)

    return Child(name, role, command)


def _device_words(topology: Topology) -> str:
    """Where the workers compute, for people."""
    if topology.device == "cpu":
        return "the CPU"
    cards = sorted(set(topology.decode_gpus + topology.prefill_gpus))
    return f"GPU{'s' * (len(cards) > 1)} {', '.join(cards)}"


def _argv(module: str) -> list[str]:
    return [sys.executable, "-m", f"headstart.worker.{module}"]


@dataclass(frozen=True, slots=True)
class JoinedWorkers:
    """Asks the gateway which workers it may give work; None if it does not answer. Blocks for a fraction of a second."""

    gateway: GatewaySettings

    def __call__(self) -> frozenset[WorkerRef] | None:
        host = client_host(self.gateway.host).strip("[]")
        key = self.gateway.access.admin_api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection = http.client.HTTPConnection(host, self.gateway.port, timeout=0.3)
        try:
            connection.request("GET", "/cluster", headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                return None
            workers = json.loads(response.read())["workers"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None
        finally:
            connection.close()
        alive = [worker for worker in workers if worker["state"] == WorkerState.ALIVE]
        return frozenset(WorkerRef(worker["name"], worker["incarnation"]) for worker in alive)


def client_host(host: str) -> str:
    """What a client on this machine writes into a URL for an address that HTTP listens on."""
    any_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    reached = any_host.get(host, host)
    return f"[{reached}]" if is_ipv6(reached) else reached


def welcome(plan: ServePlan, elapsed_s: float) -> str:
    """What the user sees when everything runs."""
    url = f"http://{client_host(plan.gateway.host)}:{plan.gateway.port}"
    name = plan.model_name
    key = "-H 'Authorization: Bearer YOUR_KEY' " if plan.gateway.access.api_key else ""
    body = json.dumps({"model": name, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]})
    return (
        f"\nready in {elapsed_s:.1f} s: {url}/v1  (model {name})\n\n"
        f"  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'\n\n"
        f"more workers join with --join {plan.gateway.control_address}; Ctrl-C stops everything in order\n"
    )
