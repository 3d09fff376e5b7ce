"""A real launcher over real child processes (that only sleep), seen from the gateway's end of the control socket."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headstart.core.messages import KillRequest, LauncherHello, WorkerExited, WorkerRef
from headstart.wire.channels import FROM_WORKER
from headstart.wire.sockets import Router, Wiring
from headstart.worker.exits import Exit
from tests.support.steady import PATIENCE_S

LAUNCHER = """
import os, sys, zmq
from headstart.wire.channels import TO_WORKER
from headstart.wire.sockets import Dealer, Wiring
from headstart.launch.child import Child
from headstart.launch.launcher import Launcher, LauncherPorts
from headstart.launch.loading_watch import LoadingWatch
from headstart.worker.wake import Waker
address, script, log = sys.argv[1:4]
def child(name, role):
    argv = [sys.executable, script, name, log, str(os.getpid())]
    return Child(name, role, lambda incarnation: ([*argv, str(incarnation)], b""))
control = Dealer.connect(Wiring(zmq.Context()), address, "launcher", TO_WORKER)
children = [child("gateway", "gateway"), child("decode-0", "decode"), child("prefill-0", "prefill")]
joined = lambda: [child.ref for child in children]
ports = LauncherPorts(control, joined, Waker.open(), lambda: 0, LoadingWatch(lambda pid: None))
sys.exit(Launcher(children, ports, 50.0, lambda: print("ready", flush=True), lambda text: None).run())
"""
CHILD = """
import os, signal, sys, time
from headstart.worker.pdeathsig import die_with_parent
name, log, parent_pid, incarnation = sys.argv[1:5]
die_with_parent(int(parent_pid))
def note(what):
    with open(log, "a") as file: file.write(f"{name} {what} {os.getpid()} {incarnation}\\n")
def stop(number, frame):
    note("stopped"); os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("started")
while True: time.sleep(60)
"""


class Launch:
    """The gateway's end, the launcher's process and what its children wrote down."""

    def __init__(self, directory: Path) -> None:
        self.wiring = Wiring(zmq.Context())
        self.router = Router.bind(self.wiring, "tcp://127.0.0.1:0", FROM_WORKER)
        self.log = directory / "log"
        self.log.touch()
        child, launcher = directory / "child.py", directory / "launcher.py"
        child.write_text(CHILD)
        launcher.write_text(LAUNCHER)
        address = f"tcp://127.0.0.1:{self.router.address.rpartition(':')[2]}"
        self.process = subprocess.Popen([sys.executable, str(launcher), address, str(child), str(self.log)])

    def next_message(self, kind: type) -> object:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for sender, message in self.router.drain():
                assert sender == "launcher"
                if isinstance(message, kind):
                    return message
            self.router.socket.poll(50)
        raise AssertionError(f"no {kind.__name__} came")

    def lines(self, name: str, what: str, count: int = 1) -> list[list[str]]:
        """[pid, incarnation] of each time `name` did `what`, once there are `count`."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            words = [line.split() for line in self.log.read_text().splitlines()]
            found = [rest for child, did, *rest in words if (child, did) == (name, what)]
            if len(found) >= count:
                return found
            self.router.socket.poll(20)
        raise AssertionError(f"{name} never {what}")

    def all_started(self) -> None:
        for name in ("gateway", "decode-0", "prefill-0"):
            self.lines(name, "started")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.router.close()
        self.wiring.context.term()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    world = Launch(tmp_path)
    yield world
    world.close()


def test_the_launcher_introduces_itself_with_the_workers_it_can_kill(launch: Launch) -> None:
    hello = launch.next_message(LauncherHello)
    assert isinstance(hello, LauncherHello)
    assert set(hello.workers) == {"decode-0", "prefill-0"}


def test_a_killed_worker_is_reported_with_its_incarnation_and_then_replaced_by_a_later_one(launch: Launch) -> None:
    pid, incarnation = launch.lines("prefill-0", "started")[0]
    os.kill(int(pid), signal.SIGKILL)
    exited = launch.next_message(WorkerExited)
    assert isinstance(exited, WorkerExited)
    assert exited.worker == WorkerRef("prefill-0", int(incarnation))
    assert exited.exit_status == -signal.SIGKILL
    later = launch.lines("prefill-0", "started", count=2)[1][1]
    assert int(later) > int(incarnation)


def test_a_kill_request_ends_exactly_the_incarnation_it_names(launch: Launch) -> None:
    launch.all_started()
    launch.next_message(LauncherHello)
    incarnation = int(launch.lines("prefill-0", "started")[0][1])
    launch.router.send("launcher", KillRequest(WorkerRef("prefill-0", incarnation - 1), "an earlier one"))
    launch.router.send("launcher", KillRequest(WorkerRef("prefill-0", incarnation), "holds pages"))
    exited = launch.next_message(WorkerExited)
    assert isinstance(exited, WorkerExited)
    assert exited.worker == WorkerRef("prefill-0", incarnation)
    assert len(launch.lines("decode-0", "started")) == 1


def test_a_signal_stops_decode_workers_then_prefill_workers_then_the_gateway(launch: Launch) -> None:
    launch.all_started()
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(timeout=PATIENCE_S) == Exit.DRAINED
    stopped = [line.split()[0] for line in launch.log.read_text().splitlines() if " stopped " in line]
    assert stopped == ["decode-0", "prefill-0", "gateway"]


def test_a_gateway_that_is_asked_to_stop_takes_the_launch_with_it_and_that_is_no_failure(launch: Launch) -> None:
    launch.all_started()
    os.kill(int(launch.lines("gateway", "started")[0][0]), signal.SIGTERM)
    assert launch.process.wait(timeout=PATIENCE_S) == Exit.DRAINED
    stopped = [line.split()[0] for line in launch.log.read_text().splitlines() if " stopped " in line]
    assert stopped == ["gateway", "decode-0", "prefill-0"]


def test_children_die_with_a_launcher_that_was_killed(launch: Launch) -> None:
    launch.all_started()
    pids = [int(launch.lines(name, "started")[0][0]) for name in ("gateway", "decode-0", "prefill-0")]
    launch.process.kill()
    launch.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        launch.router.socket.poll(20)


def is_running(pid: int) -> bool:
    """A process that has ended but was not reaped yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("status", "restarts"),
    [(Exit.DRAINED, False), (Exit.BAD_SETTINGS, False), (Exit.NAME_TAKEN, False), (Exit.CRASHED, True), (-9, True)],
)
def test_a_status_says_whether_the_worker_is_started_again(status: int, restarts: bool) -> None:
    assert Exit.restarts(status) is restarts
