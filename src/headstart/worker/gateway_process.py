"""Main of a gateway process: the composition root of `gateway`.

    bound ─► serving ──SIGTERM──► draining ─► ended

bound     both ports are ours; workers may already queue their Join
serving   HTTP in front, workers behind, the dispatcher driven by messages and by time
draining  nothing new; open answers get --drain-timeout, then an error event

Never imports torch.
"""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import NoReturn

import uvicorn
from prometheus_client import CollectorRegistry

from headstart.config.errors import ConfigError
from headstart.config.settings import GatewaySettings
from headstart.core.clock import MonotonicClock
from headstart.core.errors import WorkerError
from headstart.core.messages import Message, Send
from headstart.gateway.api.app import create_app
from headstart.gateway.api.auth import KeyRing
from headstart.gateway.dispatch import Dispatcher, DispatcherApi
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.model import ModelBounds, ServedModel, load_served_model
from headstart.gateway.state import GatewayState, HttpLimits, OpenGenerations, Telemetry
from headstart.gateway.token_memory import TokenMemory
from headstart.model.info import fix_context, model_fingerprint, parse_overrides, read_model_info
from headstart.model.source import WeightSource, weight_files
from headstart.observe.logs import set_up_logging
from headstart.observe.metrics import GatewayMetrics, WorkerCollector, WorkerSample
from headstart.wire.aio import RouterWatch
from headstart.wire.channels import FROM_WORKER
from headstart.wire.errors import WireError
from headstart.wire.security import is_loopback
from headstart.wire.sockets import Router
from headstart.worker.decision_log import DecisionLog, DispatcherSpec, open_decision_log
from headstart.worker.exits import Exit
from headstart.worker.http_protocol import TimeoutH11Protocol, connection_limits
from headstart.worker.machine_limits import check_open_files, raise_open_files_limit
from headstart.worker.pdeathsig import die_with_parent
from headstart.worker.ports import control_bind_url, http_family, open_wiring
from headstart.worker.recorder import make_dispatcher, record_dispatcher
from headstart.worker.signals import stop_signals
from headstart.worker.spec import GatewaySpec, read_spec
from headstart.worker.streams import flush_or_drop

TICK_S = 0.02
"""Longest the dispatcher is left alone while nothing comes in: bounds how late a deadline is noticed."""
DRAIN_POLL_S = 0.05
REFUSED_REPORT_S = 300.0
"""How often refused connections are spoken of: whoever reaches the port can make as many as they like."""

log = logging.getLogger("headstart.gateway")


def main() -> NoReturn:
    """Entry point for launchers: the spec comes on standard input."""
    run_gateway_process(read_spec(GatewaySpec))


def run_gateway_process(spec: GatewaySpec) -> NoReturn:
    """Be the gateway until it ends, and end the process."""
    die_with_parent(spec.parent_pid)
    set_up_logging("gateway", spec.log.level, spec.log.as_json)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        asyncio.run(_serve(spec))
        status = Exit.DRAINED
    except (ConfigError, WireError, WorkerError) as error:
        log.error(str(error))
        status = Exit.BAD_SETTINGS
    except BaseException:
        log.exception("gateway crashed")
        status = Exit.CRASHED
    logging.shutdown()
    flush_or_drop()
    os._exit(status)


async def _serve(spec: GatewaySpec) -> None:
    check_open_files(raise_open_files_limit())
    listener = _listen(spec.settings)
    wiring = open_wiring(spec.worker.cluster).wiring
    router = Router.bind(wiring, control_bind_url(spec.settings), FROM_WORKER, watches=True)
    loop = asyncio.get_running_loop()
    line = ControlChannel(router)
    handle = build_dispatcher(spec, line.send)
    state = build_state(spec, handle)
    line.start(loop, handle.calls)
    server = _server(state)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at with every collection
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stop = asyncio.Event()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    log.info("listening", extra={"http": spec.settings.port, "control": router.address, "model": state.model.name})
    await asyncio.wait([serving, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    await _drain(state.generations, spec.worker.step.drain_timeout)
    server.should_exit = True
    await serving
    line.stop()
    router.close()
    if handle.log is not None:
        handle.log.close()


class _QuietServer(uvicorn.Server):
    """Leaves signals to this module: a drain comes before the server's own shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(state: GatewayState) -> uvicorn.Server:
    limits = connection_limits()
    config = uvicorn.Config(
        create_app(state),
        http=partial(TimeoutH11Protocol, limits),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=limits.max_head_bytes,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        ws="none",
    )
    return _QuietServer(config)


async def _drain(generations: OpenGenerations, timeout_s: float) -> None:
    """Let open answers end, then end them."""
    generations.is_draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while generations.open and loop.time() < deadline:
        await asyncio.sleep(DRAIN_POLL_S)
    generations.abandon()


class ControlChannel:
    """The workers' socket in the event loop: sends for the dispatcher, and feeds it with messages and with time."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._watch: RouterWatch | None = None
        self._ticking: asyncio.Task[None] | None = None

    def send(self, recipient: str, message: Message) -> None:
        """Nothing is sent before `start`: nobody can have joined."""
        if self._watch is not None:
            self._watch.send(recipient, message)

    def start(self, loop: asyncio.AbstractEventLoop, calls: DispatcherApi) -> None:
        self._watch = RouterWatch(self._router, loop, calls.handle)
        self._watch.start()
        self._ticking = loop.create_task(_tick(calls, RefusedConnections(self._router, loop.time)))

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._ticking is not None:
            self._ticking.cancel()


class RefusedConnections:
    """Logs at most every `REFUSED_REPORT_S` how many connections were refused."""

    def __init__(self, router: Router, now: Callable[[], float]) -> None:
        self._router = router
        self._now = now
        self._num_refused = 0
        self._logged_at = float("-inf")

    def check(self) -> None:
        if self._router.refusals is None:
            return
        self._num_refused += self._router.refusals.take()
        if self._num_refused and self._now() - self._logged_at >= REFUSED_REPORT_S:
            reason = "no handshake on the control port: another --cluster-key, only one side has one, or no worker"
            log.warning("connections refused", extra={"connections": self._num_refused, "reason": reason})
            self._num_refused, self._logged_at = 0, self._now()


async def _tick(calls: DispatcherApi, refused: RefusedConnections) -> None:
    while True:
        calls.advance()
        refused.check()
        await asyncio.sleep(TICK_S)


@dataclass(frozen=True, slots=True)
class DispatcherHandle:
    """The dispatcher, the way in to it, and the log of its decisions."""

    dispatcher: Dispatcher
    calls: DispatcherApi
    log: DecisionLog | None


def build_dispatcher(spec: GatewaySpec, send: Send) -> DispatcherHandle:
    """Raises ConfigError if a decision log is asked for and cannot be made."""
    clock, seed = MonotonicClock(), f"{SystemRandom().getrandbits(64):016x}"
    head = DispatcherSpec(DispatchLimits(), spec.settings.load_balance_method, served_fingerprint(spec), seed)
    decisions = open_decision_log(spec.worker.record, f"gateway.{time.time_ns()}", head)
    if decisions is None:
        dispatcher = make_dispatcher(head, clock, send)
        return DispatcherHandle(dispatcher, dispatcher, None)
    return DispatcherHandle(*record_dispatcher(head, clock, send, decisions), decisions)


def build_state(spec: GatewaySpec, handle: DispatcherHandle) -> GatewayState:
    """Everything the HTTP handlers share. Raises WorkerError for a model folder without a tokenizer."""
    settings = spec.settings
    access = settings.access
    model = _model(spec)
    dispatcher = handle.dispatcher
    registry = CollectorRegistry()
    registry.register(WorkerCollector(lambda: _samples(dispatcher)))
    return GatewayState(
        model=model,
        dispatcher=dispatcher,
        calls=handle.calls,
        memory=TokenMemory(model.tokenizer),
        keys=KeyRing(access.api_keys, access.admin_api_key, is_local=is_loopback(settings.host)),
        telemetry=Telemetry(GatewayMetrics(registry), registry, MonotonicClock()),
        generations=OpenGenerations(access.tenant_max_requests),
        rng=SystemRandom(),
        limits=HttpLimits(
            request_timeout_s=settings.request_timeout,
            cors_origins=settings.http.origins,
            strict_fields=settings.http.strict_fields,
            log_requests=settings.http.log_requests,
        ),
    )


def _model(spec: GatewaySpec) -> ServedModel:
    folder = Path(spec.model_folder)
    info = read_model_info(folder, parse_overrides(_overrides(spec)))
    wanted = spec.worker.model.context_length
    context_len = info.context_len if wanted == "auto" else min(wanted, info.context_len)
    bounds = ModelBounds(info.vocab_size, context_len, info.eos_token_ids)
    return load_served_model(folder, spec.model_name, bounds)


def served_fingerprint(spec: GatewaySpec) -> str:
    """What decode workers of the gateway's model carry. Empty if its folder has a tokenizer but no weights."""
    folder, model = Path(spec.model_folder), spec.worker.model
    if model.load_format != "dummy" and not weight_files(folder):
        log.warning(
            "no weights to compare workers with: the first decode worker decides", extra={"folder": str(folder)}
        )
        return ""
    return model_fingerprint(WeightSource(folder, model.load_format, overrides=_overrides(spec)))


def _overrides(spec: GatewaySpec) -> str:
    model = spec.worker.model
    return fix_context(Path(spec.model_folder), model.json_model_override_args, model.context_length)


def _samples(dispatcher: Dispatcher) -> list[WorkerSample]:
    return [
        WorkerSample(record.ref.name, record.join.role, record.state, record.load)
        for record in dispatcher.registry.all()
    ]


def _listen(settings: GatewaySettings) -> socket.socket:
    # The protocol by name: asyncio turns Nagle's algorithm off only for sockets that say they are TCP.
    family = http_family(settings.host)
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise ConfigError(f"--host {settings.host} --port {settings.port}: {error.strerror or error}") from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    main()
