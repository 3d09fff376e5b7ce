"""CPU time of the gateway process for each streamed token: a real gateway process between a scripted decode worker and
clients that only read.

    python benchmarks/gateway_cost.py [--streams 128] [--tokens 400] [--pace-ms 20] [--model smollm2-135m-instruct] [--profile FILE]

The worker sends one message a step with one token of every stream, at `--pace-ms`. Worker and clients share this process;
what is counted is the user and system time of the gateway's process from the first step until the last stream has ended.
With --profile the gateway runs under cProfile, which slows it down. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import zmq

from headstart.config.settings import GatewaySettings, ModelSettings, WorkerSettings
from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.core.kv_layout import KVLayout
from headstart.core.messages import (
    Accepted,
    Finished,
    Heartbeat,
    Join,
    Submit,
    TokenDelta,
    Tokens,
    WorkerLoad,
    WorkerRef,
)
from headstart.core.request import FinishReason, Request, RequestStats
from headstart.model.info import model_fingerprint
from headstart.model.source import WeightSource, resolve_model
from headstart.wire.channels import TO_WORKER
from headstart.wire.sockets import Dealer, Wiring
from headstart.worker.spec import GatewaySpec, encode_spec

CONTEXT = 4096
BEAT_S = 0.25
RUN_GATEWAY = "from headstart.worker.gateway_process import main; main()"
PROFILE_GATEWAY = """
import cProfile, os, sys
from headstart.worker import gateway_process
profile, leave = cProfile.Profile(), os._exit
def exit_with_profile(status):
    profile.disable()
    profile.dump_stats(sys.argv[1])
    leave(status)
os._exit = exit_with_profile
profile.enable()
gateway_process.main()
"""


class ScriptedWorker(threading.Thread):
    """A decode worker that waits for `num_streams` submissions and then gives each one token a step."""

    def __init__(self, address: str, fingerprint: str, num_streams: int, num_tokens: int, pace_s: float) -> None:
        super().__init__(daemon=True)
        self.ref = WorkerRef("decode-0", 1)
        layout = KVLayout.full(16, 1, 1, 8, "float32")
        self._join = Join(self.ref, "decode", KVSpec(PROTOCOL_VERSION, fingerprint, "", layout), "", CONTEXT)
        self._address = address
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._pace_s = pace_s
        self.on_start = threading.Event()

    def run(self) -> None:
        wiring = Wiring(zmq.Context())
        dealer = Dealer.connect(wiring, self._address, str(self.ref), TO_WORKER)
        beats = Dealer.connect(wiring, self._address, f"hb:{self.ref}", TO_WORKER)
        requests: list[Request] = []
        beat_at = 0.0

        def beat() -> None:
            nonlocal beat_at
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                dealer.send(self._join)
                beats.send(Heartbeat(self.ref, 0.0, WorkerLoad(free_pages=CONTEXT)))

        while len(requests) < self._num_streams:
            beat()
            for message in dealer.drain():
                if isinstance(message, Submit):
                    requests.append(message.request)
                    dealer.send(Accepted(message.request.ref))
            time.sleep(0.002)
        time.sleep(1.0)  # let the streams' heads pass
        rng = Random(0)
        self.on_start.set()
        due = time.monotonic()
        for index in range(self._num_tokens):
            beat()
            dealer.send(Tokens(tuple(TokenDelta(r.ref, index, (rng.randrange(1000, 20_000),)) for r in requests)))
            due += self._pace_s
            time.sleep(max(due - time.monotonic(), 0))
        for request in requests:
            dealer.send(Finished(request.ref, FinishReason.LENGTH, self._num_tokens, RequestStats()))
        while True:
            beat()
            dealer.drain()
            time.sleep(0.05)


async def read_stream(port: int, body: bytes) -> int:
    """Events of one streamed completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    num_events, last = 0, b""
    while chunk := await reader.read(1 << 16):
        data = last + chunk
        num_events += data.count(b"data: ")
        last = data[-5:]
    writer.close()
    return num_events


async def read_all(args: argparse.Namespace, port: int, name: str) -> list[int]:
    fields = {"model": name, "prompt": "Once upon", "max_tokens": args.tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    return await asyncio.gather(*(read_stream(port, body) for _ in range(args.streams)))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway(args: argparse.Namespace, settings: GatewaySettings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    worker = WorkerSettings(ModelSettings(load_format="dummy"))
    spec = GatewaySpec("model", str(folder), settings, worker)
    command = [RUN_GATEWAY] if args.profile is None else [PROFILE_GATEWAY, args.profile]
    process = subprocess.Popen([sys.executable, "-c", *command], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(encode_spec(spec))
    process.stdin.close()
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                probe.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                if b"200" in probe.recv(64):
                    return
        if time.monotonic() > deadline:
            raise TimeoutError("the gateway did not get ready")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--profile")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    fingerprint = model_fingerprint(WeightSource(folder, "dummy", overrides="{}"))
    settings = GatewaySettings(port=free_port(), control_port=free_port())
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["HEADSTART_RUNTIME"] = runtime
        with gateway(args, settings, folder) as process:
            address = f"tcp://127.0.0.1:{settings.resolved_control_port}"
            worker = ScriptedWorker(address, fingerprint, args.streams, args.tokens, args.pace_ms / 1000)
            worker.start()
            wait_ready(settings.port)
            marks: list[float] = []
            threading.Thread(target=lambda: (worker.on_start.wait(), marks.append(cpu_s(process.pid)))).start()
            events = asyncio.run(read_all(args, settings.port, "model"))
            used_s = cpu_s(process.pid) - marks[0]
    num_tokens = args.streams * args.tokens
    result = {"streams": args.streams, "tokens": num_tokens, "events": sum(events), "cpu_s": round(used_s, 2)}
    print(json.dumps(result | {"us_per_token": round(used_s / num_tokens * 1e6, 1)}))


if __name__ == "__main__":
    main()
