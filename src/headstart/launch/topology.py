"""Which workers `headstart serve` starts, and on which device each of them computes. Never imports torch."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.config.errors import ConfigError, require

Auto = Literal["auto"]
WorkerCount = int | Auto

GPU_NODE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides between the CPU and GPUs."""

    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    torch_has_cuda: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """The workers of one machine. `decode_gpus` and `prefill_gpus` have one entry a worker; both are empty on a CPU."""

    device: Literal["cpu", "cuda"]
    num_prefill: int
    num_decode: int
    decode_gpus: tuple[str, ...] = ()
    prefill_gpus: tuple[str, ...] = ()

    def num_sharing(self, gpu: str) -> int:
        """Workers whose pools come from the same memory: all on a CPU, else those of one card."""
        if not gpu:
            return self.num_prefill + self.num_decode
        return (self.decode_gpus + self.prefill_gpus).count(gpu)


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """What the user asked for."""

    prefill: WorkerCount = "auto"
    decode: WorkerCount = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: str = ""  # comma separated; empty: all that are visible
    share_gpu: bool = False


def detect_machine(environment: Mapping[str, str], device_folder: Path = Path("/dev")) -> Machine:
    """The GPUs that CUDA would show this process, and whether the installed torch can use them."""
    return Machine(_visible_gpus(environment, device_folder), _torch_has_cuda())


def resolve_topology(wanted: WantedWorkers, machine: Machine) -> Topology:
    """Turn "auto" into counts and give each worker its card in turn. Raises ConfigError.

    One card: one worker that prefills and decodes. Several: one prefill worker, and the other cards decode. A CPU: one
    worker of each role.
    """
    check_counts(wanted.prefill, wanted.decode)
    if _device(wanted, machine) == "cpu":
        require(not wanted.gpus, f"--gpus {wanted.gpus}: workers compute on the CPU")
        return Topology("cpu", _count(wanted.prefill, 1), _count(wanted.decode, 1))
    gpus = _chosen(wanted.gpus, machine.gpus)
    num_prefill = _count(wanted.prefill, 0 if len(gpus) == 1 or wanted.decode == len(gpus) else 1)
    num_decode = _count(wanted.decode, max(1, len(gpus) - num_prefill))
    num_workers = num_prefill + num_decode
    require(
        num_workers <= len(gpus) or wanted.share_gpu,
        f"{num_prefill} prefill and {num_decode} decode workers on {len(gpus)} GPU{'s' * (len(gpus) > 1)}: "
        "give fewer workers, or --share-gpu to put several on one card",
    )
    placed = tuple(gpus[index % len(gpus)] for index in range(num_workers))
    return Topology("cuda", num_prefill, num_decode, placed[:num_decode], placed[num_decode:])


def check_counts(prefill: WorkerCount, decode: WorkerCount) -> None:
    """Raise ConfigError for a count that is too small for its role."""
    for flag, value, least in (("--prefill", prefill, 0), ("--decode", decode, 1)):
        require(value == "auto" or value >= least, f"{flag} must be auto or at least {least}, got {value}")


def _device(wanted: WantedWorkers, machine: Machine) -> Literal["cpu", "cuda"]:
    if wanted.device == "cuda":
        require(
            bool(machine.gpus), "--device cuda: this machine shows no NVIDIA GPU (CUDA_VISIBLE_DEVICES, /dev/nvidia*)"
        )
        require(
            machine.torch_has_cuda, "--device cuda: the installed torch is a CPU build; see README, 'On a GPU machine'"
        )
        return "cuda"
    return "cuda" if wanted.device == "auto" and machine.gpus and machine.torch_has_cuda else "cpu"


def _count(wanted: WorkerCount, default: int) -> int:
    return default if wanted == "auto" else wanted


def _chosen(wanted: str, visible: tuple[str, ...]) -> tuple[str, ...]:
    """The cards that the user named, each of which must be visible."""
    if not wanted:
        return visible
    chosen = tuple(part.strip() for part in wanted.split(","))
    unknown = [gpu for gpu in chosen if gpu not in visible]
    require(not unknown, f"--gpus {wanted}: no GPU {', '.join(unknown)} here; there is {', '.join(visible)}")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"--gpus {wanted} names a GPU twice; --share-gpu puts several workers on one card")
    return chosen


def _visible_gpus(environment: Mapping[str, str], device_folder: Path) -> tuple[str, ...]:
    """CUDA's rule: the variable's entries up to the first that is none, else every card from 0 on."""
    nodes = [path for path in device_folder.glob("nvidia*") if GPU_NODE.fullmatch(path.name)]
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None or not nodes:
        return tuple(str(index) for index in range(len(nodes)))
    visible: list[str] = []
    for entry in (part.strip() for part in named.split(",")):
        if not entry or entry.startswith("-"):
            break
        visible.append(entry)
    return tuple(visible)


def _torch_has_cuda() -> bool:
    """Read off torch's own file of its version: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec is not None and spec.origin else None
    if version is None or not version.is_file():
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None
