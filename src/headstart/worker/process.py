"""Main of a worker process.

    locked ─► loading ─► joined ──SIGTERM──► draining ─► left ─► ended
      └──────────┴──────────┴───────────────────┴─ failure ─────► ended (status in `exits`)

locked    holds its name; nothing of a former incarnation can land any more
loading   model, pool, transport; SIGTERM ends it at once
joined    the gateway knows it; heartbeats run
draining  finishes what runs within --drain-timeout, takes nothing new; also where the scheduler gives up

Imports torch only through `build`, after the thread settings are in the environment.
"""

import gc
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import NoReturn

import zmq

from headstart.config.errors import ConfigError
from headstart.config.settings import refuse_conflicts
from headstart.core.clock import Clock, MonotonicClock
from headstart.core.errors import WorkerError
from headstart.core.messages import Join, Leave, Role, WorkerLoad, WorkerRef
from headstart.model.errors import ModelRefused
from headstart.model.refusals import refuse_unservable
from headstart.model.source import resolve_model
from headstart.observe.decode_line import LoadLine
from headstart.observe.logs import set_up_logging
from headstart.observe.mismatch_log import MismatchLog
from headstart.wire.channels import TO_PREFILL, TO_WORKER
from headstart.wire.errors import WireError
from headstart.wire.sockets import Dealer, Router
from headstart.worker.exits import Exit
from headstart.worker.heartbeat import HeartbeatThread
from headstart.worker.lock import NameLock, NameTaken, runtime_dir
from headstart.worker.loop import LoopHealth, LoopParts, WorkerLoop
from headstart.worker.membership import MembershipLog
from headstart.worker.messenger import GATEWAY, Messenger
from headstart.worker.pdeathsig import die_with_parent
from headstart.worker.ports import OpenWiring, control_url, open_wiring, peer_url
from headstart.worker.signals import stop_signals
from headstart.worker.spec import (
    WorkerSpec,
    default_names,
    gpu_environment,
    read_spec,
    thread_environment,
    transfer_environment,
)
from headstart.worker.streams import flush_or_drop
from headstart.worker.wake import Waker

JOIN_S = 1.0
"""How often a worker repeats its Join, for a gateway that was restarted."""

log = logging.getLogger("headstart.worker")


def main() -> NoReturn:
    """Entry point for launchers: the spec comes on standard input."""
    run_worker_process(read_spec(WorkerSpec))


def run_worker_process(spec: WorkerSpec) -> NoReturn:
    """Be the worker until it ends, and end the process: libraries' threads must not keep it alive."""
    try:
        status = _run(spec)
    except (ConfigError, ModelRefused, NameTaken, WireError) as error:
        status = Exit.NAME_TAKEN if isinstance(error, NameTaken) else Exit.BAD_SETTINGS
        log.error(str(error))
    except WorkerError as error:
        log.error("worker failed", extra={"reason": str(error)}, exc_info=log.isEnabledFor(logging.DEBUG))
        status = Exit.DEVICE_FAILED
    except BaseException:
        log.exception("worker crashed")
        status = Exit.CRASHED
    logging.shutdown()
    flush_or_drop()
    os._exit(status)


def _run(spec: WorkerSpec) -> Exit:
    os.environ |= thread_environment(spec.num_threads) | transfer_environment(spec.is_local) | gpu_environment(spec.gpu)
    die_with_parent(spec.parent_pid)
    set_up_logging(spec.name or spec.role, spec.log.level, spec.log.as_json)
    refuse_conflicts(spec.settings)
    control_url(spec.join)  # raises for what cannot be joined
    _refuse_unservable(spec)
    lock, name = _take_name(spec)
    worker = WorkerRef(name, spec.incarnation or max(time.time_ns(), lock.last_incarnation + 1))
    lock.note_incarnation(worker.incarnation)
    log.info("loading", extra={"worker": str(worker), "pid": os.getpid()})
    lines = _open_lines(spec, worker)

    gc.disable()  # what loads now stays: looking through it for garbage is a sixth of the loading, and pauses steps later
    from headstart.worker.build import BuildPorts, build_worker  # torch loads here

    clock = MonotonicClock()
    built = build_worker(spec, worker, BuildPorts(clock, lines.messenger.send, lines.waker.wake))
    gc.freeze()
    gc.enable()
    parts = LoopParts(
        scheduler=built.scheduler,
        transport=built.transport,
        executor=built.executor,
        inbox=lines.messenger,
        clock=clock,
        health=LoopHealth(clock.now()),
        runs_are_transfers=spec.role == Role.PREFILL,
    )
    join = Join(
        worker, spec.role, built.kv_spec, lines.peer_address, built.capacity_tokens, built.model_name, lock.domain
    )
    log.info("loaded, waiting for the gateway", extra={"capacity_tokens": built.capacity_tokens, **built.facts})
    try:
        status = _serve(spec, parts, lines, join, built.page_bytes)
    finally:
        if built.log is not None:
            built.log.close()
    built.executor.close()
    built.transport.close()
    lock.release()
    return status


def _refuse_unservable(spec: WorkerSpec) -> None:
    """Raise ConfigError for a model that is not there or cannot be served: before torch loads, and not tried again."""
    model = spec.settings.model
    try:
        refuse_unservable(resolve_model(spec.model), model.json_model_override_args, model.load_format)
    except WorkerError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Lines:
    """A worker's open sockets."""

    opened: OpenWiring
    messenger: Messenger
    beats: Dealer
    waker: Waker
    peer_address: str

    def close(self) -> None:
        self.messenger.close()
        self.beats.close()
        self.opened.close()


def _open_lines(spec: WorkerSpec, worker: WorkerRef) -> _Lines:
    waker = Waker.open()
    opened = open_wiring(spec.settings.cluster)
    wiring = opened.wiring
    control = control_url(spec.join)
    gateway = Dealer.connect(wiring, control, str(worker), TO_WORKER, watches=True)
    beats = Dealer.connect(wiring, control, f"hb:{worker}", TO_WORKER)
    peers, peer_address = None, ""
    if spec.role == Role.PREFILL:
        host_url = peer_url(spec.join)
        peers = Router.bind(wiring, f"{host_url}:0", TO_PREFILL)
        peer_address = f"{host_url}:{peers.address.rpartition(':')[2]}"
    messenger = Messenger(worker, wiring, gateway, peers, waker, zmq.Poller())
    messenger.start()
    return _Lines(opened, messenger, beats, waker, peer_address)


def _serve(spec: WorkerSpec, parts: LoopParts, lines: _Lines, join: Join, page_bytes: int) -> Exit:
    """Join, run until drained, leave. Returns what the process ends with."""
    step = spec.settings.step
    heartbeat = HeartbeatThread(
        join.worker, parts.health, parts.clock, lines.beats.send, _end_wedged, step.watchdog_timeout
    )
    line = LoadLine(spec.role, join.kv_spec.page_size, page_bytes)
    reporter = _Reporter(lines.messenger, join, line, MembershipLog(spec.join, parts.clock.now()), parts.clock)
    lines.messenger.join(join)
    heartbeat.start()
    asked = _drain_on_signal(lines.waker)
    loop = WorkerLoop(parts, reporter)
    finished = loop.run(lambda: bool(asked), step.drain_timeout)
    log.info("drained" if finished else "drain timed out")
    lines.messenger.send(GATEWAY, Leave(join.worker))
    heartbeat.stop()
    lines.close()
    if asked or not loop.must_restart:
        return Exit.DRAINED
    log.error("pages are lost to a peer that neither answers nor is known to have ended; restart this worker")
    return Exit.PAGES_LOST


class _Reporter:
    """Called by the loop with each published load: repeats Join, logs the periodic line and whether it is a member."""

    def __init__(
        self, messenger: Messenger, join: Join, line: LoadLine, membership: MembershipLog, clock: Clock
    ) -> None:
        self._messenger = messenger
        self._join = join
        self._line = line
        self._membership = membership
        self._mismatches = MismatchLog()
        self._clock = clock
        self._joined_at = clock.now()

    def __call__(self, load: WorkerLoad) -> None:
        now = self._clock.now()
        self._line.observe(now, load)
        self._mismatches.observe(load)
        is_taken_in = self._messenger.has_heard_gateway or self._join.role == Role.PREFILL  # which it sends nothing to
        self._membership.observe(now, self._messenger.link_state(), is_taken_in)
        if now - self._joined_at >= JOIN_S:
            self._joined_at = now
            self._messenger.join(self._join)


def _take_name(spec: WorkerSpec) -> tuple[NameLock, str]:
    directory = runtime_dir(spec.join)
    if spec.name:
        return NameLock.acquire(directory, spec.name), spec.name
    for name in default_names(spec.role):
        try:
            return NameLock.acquire(directory, name), name
        except NameTaken:
            continue
    raise NameTaken(f"every name for a {spec.role} worker of {spec.join} is taken on this host; give --name")


def _end_wedged(age_s: float) -> None:
    logging.shutdown()
    os._exit(Exit.WEDGED)


def _drain_on_signal(waker: Waker) -> list[int]:
    """The first signal of `stop_signals` asks for a drain, a second one ends the process. Returns the signals so far."""
    asked: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)
        waker.wake()

    for number in stop_signals():
        signal.signal(number, on_signal)
    return asked


if __name__ == "__main__":
    main()
