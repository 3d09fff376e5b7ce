"""What this process may use of its machine: memory, cores and open files, as the kernel bounds it. Never imports torch.

A container's bounds are those of its control groups, version 1 or 2, of the process's own and of every group above it that
can be seen. `root` is where /proc and /sys are found; tests make their own.
"""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.config.errors import require

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 if there is no limit."""
WANTED_DESCRIPTORS = 65_536
LEAST_DESCRIPTORS = 256
"""Open files below which a gateway would turn clients away at once: what it needs for itself, and as many connections."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that could be taken now, and what bounds them."""

    room_bytes: int
    limit_bytes: int | None = None  # of the control group that bounds them; None: the machine does


def memory_room(root: Path = ROOT) -> MemoryRoom | None:
    """The smallest of the machine's available memory and of the room in each control group. None if neither is told."""
    found = [MemoryRoom(free)] if (free := _machine_free(root)) is not None else []
    found += [room for folder in _folders(root, "memory") if (room := _room(folder)) is not None]
    return min(found, key=lambda each: each.room_bytes, default=None)


def usable_cores(root: Path = ROOT, affinity: int | None = None) -> int:
    """Cores that the affinity mask and the quotas of the control groups allow, at least 1. `affinity` is the mask's number
    of cores; None: this process's."""
    allowed = len(os.sched_getaffinity(0)) if affinity is None else affinity
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, int(min([allowed, *quotas])))


def memory_kills(root: Path = ROOT) -> int:
    """How often the kernel has killed a process for want of memory: in the control groups, or on the machine."""
    counts = [_fields(folder / "memory.events").get("oom_kill", 0) for folder in _folders(root, "memory")]
    counts += [_fields(folder / "memory.oom_control").get("oom_kill", 0) for folder in _folders(root, "memory")]
    return max([*counts, _fields(root / "proc/vmstat").get("oom_kill", 0)])


def raise_open_files_limit() -> int:
    """Raise the soft limit towards the hard one; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else WANTED_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def check_open_files(limit: int) -> None:
    """Raise ConfigError if a gateway could serve next to no connections within so many open files."""
    require(
        limit >= LEAST_DESCRIPTORS,
        f"the limit of {limit} open files (ulimit -n) is too low for a gateway, which needs {LEAST_DESCRIPTORS}: raise it",
    )


# ---- control groups --------------------------------------------------------------------------------------------------


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group for `controller` and of the groups above it, in both versions."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            mount = next((each for each in mounts if (each / "cgroup.controllers").is_file()), None)
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            mount = None
        if mount is not None:
            yield from _upwards(mount, path)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """From the group to the root of the mount. A container may see its own group as the root and be told another path."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts or not mount.joinpath(*parts).is_dir():
        parts = []
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _room(folder: Path) -> MemoryRoom | None:
    """Limit less what is used and cannot be dropped: file pages can."""
    for limits, used, prefix in (
        (("memory.max", "memory.high"), "memory.current", ""),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    ):
        known = [number for name in limits if (number := _number(folder / name)) is not None and number < UNLIMITED]
        if not known:
            continue
        stat = _fields(folder / "memory.stat")
        files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        kept = max(0, (_number(folder / used) or 0) - files)
        return MemoryRoom(max(0, min(known) - kept), min(known))
    return None


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time in each period."""
    words = (_text(folder / "cpu.max") or "").split()
    if len(words) == 2:
        quota, period = _int(words[0]), _int(words[1])
    else:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _machine_free(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:") and (kibibytes := _int(line.split()[1])) is not None:
            return kibibytes * 1024
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()


def _number(path: Path) -> int | None:
    return _int((_text(path) or "").strip())


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None  # "max" is no limit


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.split() for line in _lines(path)]
    return {pair[0]: number for pair in pairs if len(pair) == 2 and (number := _int(pair[1])) is not None}
