"""Starts the real system as a user would, and stops it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

READY_S = 180.0
STOP_S = 60.0


@dataclass(frozen=True)
class Deployment:
    """How `headstart serve` is started: `num_prefill` 0 is unified."""

    label: str
    num_prefill: int
    cache: bool
    flags: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        return self.num_prefill + 1


@dataclass(frozen=True)
class Running:
    base_url: str
    ready_s: float


@contextmanager
def running(deployment: Deployment) -> Iterator[Running]:
    """Raises RuntimeError with the end of its log if it does not become ready."""
    port, control_port = free_ports()
    command = [sys.executable, "-m", "headstart.cli", "serve", *deployment.flags]
    command += ["--port", str(port), "--control-port", str(control_port), "--prefill", str(deployment.num_prefill)]
    command += [] if deployment.cache else ["--disable-radix-cache"]
    with tempfile.TemporaryDirectory(prefix="headstart-bench-") as folder:
        log = Path(folder, "serve.log")
        began = time.perf_counter()
        with log.open("wb") as out:
            environment = {**os.environ, "HEADSTART_RUNTIME": folder}
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, deployment.num_workers, process, log)
            yield Running(url, time.perf_counter() - began)
        finally:
            stop(process)


def wait_until_ready(url: str, num_workers: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.perf_counter() + READY_S
    while time.perf_counter() < deadline and process.poll() is None:
        try:
            cluster = httpx.get(f"{url}/cluster", timeout=5).json()
            if cluster["ready"] and len(cluster["workers"]) == num_workers:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"headstart serve is not ready (exit status {process.poll()}):\n{tail}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
