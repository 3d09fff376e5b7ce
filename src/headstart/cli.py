"""The `headstart` command. Every subcommand is a dataclass with `run`; heavy imports happen inside `run` only."""

import dataclasses
import errno
import inspect
import os
import signal
import sys
import textwrap
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_origin

import tyro

from headstart.bench.errors import BenchError
from headstart.bench.options import Options
from headstart.config.errors import ConfigError, require, told_together
from headstart.config.other_names import refuse_other_names
from headstart.config.settings import GatewaySettings, WorkerSettings, refuse_conflicts
from headstart.core.errors import WorkerError
from headstart.core.messages import Role
from headstart.launch.topology import WantedWorkers, WorkerCount, check_counts, detect_machine, resolve_topology
from headstart.plan.options import PlanOptions, SimulateOptions
from headstart.worker.exits import Exit
from headstart.worker.spec import LogSpec, WorkerSpec
from headstart.worker.streams import flush_or_drop, open_standard_streams, try_print

DEMO = "smollm2-135m-instruct"


class Command(Protocol):
    def run(self) -> int:
        """Do it; return the exit status. Raises ConfigError and WorkerError with a message for the user."""
        ...


@dataclass(frozen=True)
class LogSettings:
    """What the processes say on standard error."""

    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """text: for people. json: one object a line, with every field in full."""

    def __post_init__(self) -> None:
        known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        require(self.log_level.upper() in known, f"--log-level must be one of {', '.join(known)}, got {self.log_level}")

    @property
    def spec(self) -> LogSpec:
        return LogSpec(self.log_level, self.log_format == "json")


@dataclass(frozen=True)
class ServeCommand:
    """Serve a model on this machine: gateway, prefill and decode workers, one process each."""

    model: tyro.conf.Positional[str] = DEMO
    """Folder in Hugging Face's layout, a GGUF file, or the packaged demo model."""
    prefill: WorkerCount = "auto"
    """Prefill workers. 0: decode workers compute prompts themselves. auto: 1, but 0 on a machine with one GPU."""
    decode: WorkerCount = "auto"
    """Decode workers. auto: 1 on a CPU; every GPU that is not for prefill."""
    gpus: str = ""
    """GPUs to use, comma separated, as CUDA_VISIBLE_DEVICES names them. Empty: all."""
    share_gpu: bool = False
    """Let several workers share a card; each takes its part of --mem-fraction-static."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        check_counts(self.prefill, self.decode)

    def run(self) -> int:
        from headstart.config.secret_files import with_keys_of_files
        from headstart.launch.serve import ServePlan, serve

        wanted = WantedWorkers(self.prefill, self.decode, self.worker.model.device, self.gpus, self.share_gpu)
        topology = resolve_topology(wanted, detect_machine(os.environ))
        refuse_conflicts(self.worker)
        gateway = with_keys_of_files(self.gateway)
        return serve(ServePlan(self.model, gateway, self.worker, topology, self.log.spec))


@dataclass(frozen=True)
class GatewayCommand:
    """Run a gateway alone. Workers join it at --control-host and --control-port."""

    model: tyro.conf.Positional[str] = DEMO
    """The model that its workers serve: the gateway needs the tokenizer."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def run(self) -> int:
        from headstart.config.secret_files import with_keys_of_files
        from headstart.launch.serve import check_control_is_guarded, check_ports, prepare_model
        from headstart.model.refusals import refuse_unservable
        from headstart.worker.gateway_process import run_gateway_process
        from headstart.worker.ports import refuse_ipv6
        from headstart.worker.spec import GatewaySpec, served_name

        refuse_conflicts(self.worker)
        refuse_ipv6(self.gateway.control_host, "--control-host")
        check_control_is_guarded(self.gateway, self.worker.cluster)
        check_ports(self.gateway)
        gateway = with_keys_of_files(self.gateway)
        folder = prepare_model(self.model)
        refuse_unservable(folder, self.worker.model.json_model_override_args, "dummy")  # it needs no weights here
        name = served_name(self.model, self.worker.model)
        run_gateway_process(GatewaySpec(name, str(folder), gateway, self.worker, log=self.log.spec))


@dataclass(frozen=True)
class JoinSettings:
    """Where a worker belongs."""

    join: str
    """HOST:PORT of the gateway's control channel."""
    name: str = ""
    """Name of this worker, unique in its cluster. Empty: from role and host."""
    threads: int = 0
    """Threads of its computation. 0: all cores. Workers of one machine should divide its cores."""


@dataclass(frozen=True)
class PrefillCommand:
    """Run one prefill worker that joins a gateway."""

    at: JoinSettings
    model: tyro.conf.Positional[str] = DEMO
    """Folder in Hugging Face's layout, a GGUF file, or the packaged demo model."""
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def run(self) -> int:
        return run_worker(Role.PREFILL, self)


@dataclass(frozen=True)
class DecodeCommand:
    """Run one decode worker that joins a gateway."""

    at: JoinSettings
    model: tyro.conf.Positional[str] = DEMO
    """Folder in Hugging Face's layout, a GGUF file, or the packaged demo model."""
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def run(self) -> int:
        return run_worker(Role.DECODE, self)


@dataclass(frozen=True)
class DoctorCommand:
    """Print versions, cores, devices and backends, and what would be chosen for a model."""

    model: tyro.conf.Positional[str] = DEMO
    """Folder in Hugging Face's layout, a GGUF file, or the packaged demo model."""
    worker: WorkerSettings = field(default_factory=WorkerSettings)

    def run(self) -> int:
        from headstart.launch.doctor import examine

        return examine(self.model, self.worker)


@dataclass(frozen=True)
class BenchCommand(Options):
    """Measure a server, or two against each other, with workloads that share prefixes, continue or replay a trace."""

    def run(self) -> int:
        from headstart.bench.command import run

        return run(self)


@dataclass(frozen=True)
class ReplayCommand:
    """Repeat what processes decided while they ran with --record, and compare it decision by decision."""

    folder: tyro.conf.Positional[str]
    """The folder that --record named."""

    def run(self) -> int:
        from headstart.sim.decision_report import replay_folder

        return replay_folder(Path(self.folder))


@dataclass(frozen=True)
class SimulateCommand(SimulateOptions):
    """Play the same workloads on a cluster in virtual time, with step times from a data sheet or a calibration."""

    def run(self) -> int:
        from headstart.plan.simulate_command import run

        return run(self)


@dataclass(frozen=True)
class PlanCommand(PlanOptions):
    """Say how many prefill and decode workers some cards should become for a workload, and what binds them."""

    def run(self) -> int:
        from headstart.plan.advise import run

        return run(self)


@dataclass(frozen=True)
class KeyCommand:
    """Print a new key pair for a cluster that spans machines. Keep it in a file that only its members can read."""

    def run(self) -> int:
        from headstart.worker.ports import new_cluster_key

        print(new_cluster_key(), end="")
        return 0


COMMANDS: dict[str, type[Command]] = {
    "serve": ServeCommand,
    "gateway": GatewayCommand,
    "prefill": PrefillCommand,
    "decode": DecodeCommand,
    "doctor": DoctorCommand,
    "bench": BenchCommand,
    "simulate": SimulateCommand,
    "plan": PlanCommand,
    "replay": ReplayCommand,
    "key": KeyCommand,
}
"""Name on the command line -> dataclass whose fields are its flags."""


def run_worker(role: Role, command: PrefillCommand | DecodeCommand) -> int:
    """Become the worker; the process ends with it."""
    from headstart.wire.security import is_loopback
    from headstart.worker.process import run_worker_process

    at = command.at
    if ":" not in at.join:
        raise ConfigError(f"--join {at.join}: give HOST:PORT")
    run_worker_process(
        WorkerSpec(
            role=role,
            name=at.name,
            join=at.join,
            model=command.model,
            settings=command.worker,
            num_threads=at.threads,
            is_local=is_loopback(at.join.rpartition(":")[0]),
            log=command.log.spec,
        )
    )


def parse(arguments: list[str] | None = None) -> Command:
    """Read the command line. Raises ConfigError for values out of range, all of them at once; exits for usage errors,
    --help and --version."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "-V", "--version"):
        print(f"headstart {version('headstart')}" if name in ("-V", "--version") else usage())
        raise SystemExit(0)
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}; there is {', '.join(COMMANDS)}")
    kind = COMMANDS[name]
    refuse_other_names(rest, flags_of(kind))
    with told_together():
        command: Command = tyro.cli(
            kind,
            prog=f"headstart {name}",
            description=inspect.getdoc(kind),
            args=rest,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    return command


def flags_of(kind: type) -> list[str]:
    """Every flag of a command: the fields of its dataclass and of those in it."""
    found = []
    for each in dataclasses.fields(kind):
        if isinstance(each.default_factory, type) and dataclasses.is_dataclass(each.default_factory):
            found += flags_of(each.default_factory)
        elif get_origin(each.type) is not Annotated:  # a positional argument is
            found.append("--" + each.name.replace("_", "-"))
    return found


def usage() -> str:
    """What there is, one command a line."""
    lines = [f"  {name:<9} {(inspect.getdoc(kind) or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headstart COMMAND ...",
            "",
            "LLM serving with prefill and decode split, and a radix cache on the decode side.",
            "",
            *(textwrap.fill(line, 79, subsequent_indent=" " * 12) for line in lines),
            "",
            "headstart COMMAND --help shows a command's flags; headstart --version this version.",
        ]
    )


def main() -> None:
    open_standard_streams()
    try:
        status = parse().run()
    except (BenchError, ConfigError, WorkerError) as error:
        try_print(f"headstart: {error}")
        status = Exit.BAD_SETTINGS
    except KeyboardInterrupt:
        try_print("headstart: interrupted")
        status = 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        try_print(f"headstart: output cannot be written: {error.strerror}")
        status = Exit.CRASHED
    if not flush_or_drop() and status == 0:
        status = Exit.CRASHED
    sys.exit(status)


if __name__ == "__main__":
    main()
