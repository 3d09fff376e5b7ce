"""Starts Headstart's real processes and looks at them from outside: HTTP, signals, lock files, exit statuses."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx
import openai

DEMO = "smollm2-135m-instruct"
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_FLAGS = ("--load-format", "dummy", "--json-model-override-args", json.dumps(TINY))
"""The demo model's tokenizer over random weights: steps of a few milliseconds."""
PORTS = range(12_000, 32_000)
"""Below those that the kernel gives to outgoing connections, which would take one while its server is away."""
PAIRS_FLAGS = (*TINY_FLAGS, "--dtype", "float32", "--local-prefill-tokens", "0", "--prefill", "2", "--decode", "2")
"""In float32 a token's draw does not depend on its batch."""
START_S = 180.0
PATIENCE_S = 60.0
"""What takes a moment may take this long where other tests have the cores."""
REPORT_S = 0.2
"""A heartbeat may carry a load that is older than its loop's last pass by this much."""
Worker = dict[str, Any]


def free_ports() -> tuple[int, int]:
    """Two ports on which nobody listens."""
    first, second = islice(filter(is_free, SystemRandom().sample(PORTS, len(PORTS))), 2)
    return first, second


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll until `condition` is truthy and return its value; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.02)
    return value


class Cluster:
    """`headstart serve`, or `headstart gateway` whose workers the test starts, with its own runtime directory and ports."""

    def __init__(self, directory: Path, *flags: str, command: str = "serve", host: str = "127.0.0.1") -> None:
        self.directory = directory
        self.flags = flags
        self.command = command
        self.host = host  # workers join there
        self.port, self.control_port = free_ports()
        self.environment = {**os.environ, "HEADSTART_RUNTIME": str(directory)}
        self.log_path = directory / "serve.log"
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        self.process = self.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0)
        self.openai = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the launcher or the gateway, for the first time or again."""
        ports = ("--port", str(self.port), "--control-port", str(self.control_port), "--control-host", self.host)
        self.log_path.write_bytes(b"")
        self.process = self._spawn(self.command, *ports, *self.flags, log=self.log_path)
        return self.process

    def _spawn(
        self, command: str, *arguments: str, log: Path, before: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        argv = [*before, sys.executable, "-m", "headstart.cli", command, *arguments]
        with log.open("ab") as file:
            return subprocess.Popen(argv, env=self.environment | environment, stdout=file, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        word = "ready in" if self.command == "serve" else "listening"

        def ready() -> bool:
            assert self.process.poll() is None, f"{self.command} ended early:\n{self.log}"
            return word in self.log

        try:
            until(ready, "readiness", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    # ---- what can be seen --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return dict(self.http.get("/cluster").raise_for_status().json())

    def workers(self, role: str) -> list[Worker]:
        return [worker for worker in self.state()["workers"] if worker["role"] == role]

    def alive(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers(role) if worker["state"] == "alive"]

    def living(self, state: dict[str, Any] | None = None) -> list[Worker]:
        """Those whose process has not ended, as far as the gateway knows: one that is held up is not alive for a while."""
        return [worker for worker in (state or self.state())["workers"] if worker["state"] != "ended"]

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.state()["workers"] if worker["name"] == name)

    def counter(self, name: str, counter: str) -> float:
        return float(self.worker(name)["load"]["counters"].get(counter, 0))

    @property
    def page_size(self) -> int:
        return int(self.workers("decode")[0]["kv"]["page_size"])

    @property
    def page_bytes(self) -> int:
        return int(self.workers("decode")[0]["kv"]["page_bytes"])

    def settled(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The cluster's state once every living worker has reported a load from after this call."""
        began = time.monotonic()

        def fresh() -> dict[str, Any] | None:
            elapsed = time.monotonic() - began  # at least, when the gateway looks: the answer may take its time
            state = self.state()
            ages = [worker["silent_s"] + worker["loop_age_s"] for worker in self.living(state)]
            return state if all(elapsed - age > REPORT_S for age in ages) else None

        return dict(until(fresh, "a fresh report of every worker", timeout_s))

    def wait_until_free(self, timeout_s: float = PATIENCE_S) -> None:
        """No request anywhere, and every page is cached or free."""
        held = ("num_running", "num_waiting", "inflight_pages", "private_pages", "pinned_pages")

        def free() -> bool:
            state = self.settled(timeout_s)
            loads = [worker["load"] for worker in state["workers"] if worker["state"] == "alive"]
            return state["unfinished"] == 0 and not any(load[field] for load in loads for field in held)

        until(free, "giving everything back", timeout_s)

    def total(self, name: str, counter: str) -> float:
        """A worker's counter, as of now."""
        self.settled()
        return self.counter(name, counter)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def complete(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """One greedy completion that ignores EOS, with its token ids."""
        body = {
            "model": DEMO,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    # ---- doing things to processes -----------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        lock = self.directory / str(self.control_port) / f"{name}.lock"
        return int(lock.read_text().split()[0])

    def kill(self, name: str) -> int:
        """kill -9; returns the incarnation that is gone."""
        incarnation = int(self.worker(name)["incarnation"])
        os.kill(self.pid(name), signal.SIGKILL)
        return incarnation

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """The worker gets what is sent to it, and reads it once the block is over."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # after 5 s its peers may have had it killed
                os.kill(pid, signal.SIGCONT)

    def join(
        self, role: str, name: str, *flags: str, before: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """A worker started by hand. `before`: a command that starts it, as `ip netns exec NAME`."""
        at = ("--join", f"{self.host}:{self.control_port}", "--name", name, "--threads", "1")
        log = self.directory / f"{name}.log"
        self.joined[name] = self._spawn(role, *at, *flags, log=log, before=before, **environment)
        return self.joined[name]

    def wait_for_workers(self, num_prefill: int, num_decode: int, timeout_s: float = START_S) -> None:
        def all_here() -> bool:
            return (len(self.alive("prefill")), len(self.alive("decode"))) == (num_prefill, num_decode)

        until(all_here, f"{num_prefill} prefill and {num_decode} decode workers", timeout_s)

    def stop(self) -> int:
        """Stop everything as Ctrl-C does; returns the launcher's exit status."""
        for process in self.joined.values():
            process.terminate()
        self.process.send_signal(signal.SIGINT)
        for process in self.joined.values():
            process.wait(timeout=60)
        status = self.process.wait(timeout=60)
        self.http.close()
        return status


def running(directory: Path, *flags: str) -> Iterator[Cluster]:
    """A cluster for as long as a fixture is used."""
    cluster = Cluster(directory, *flags)
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.stop()
