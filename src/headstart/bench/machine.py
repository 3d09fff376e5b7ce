"""Facts about the machine and the code, without which a number means nothing."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """About this process's machine: the client's. On one machine it is the server's too."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "headstart": version_of("headstart"),
        "commit": commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The checkout that this code runs from, with "+" behind it if files differ. Empty outside a checkout."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    return head + "+" if head and _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
