"""The launcher of a cluster: reports exits, starts the next incarnation only after the last has ended, kills on request."""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.core.messages import KillRequest, LauncherHello, Message, WorkerExited, WorkerRef
from headstart.sim.clock import Agenda, VirtualClock
from headstart.sim.network import ControlNetwork
from headstart.sim.spec import Timing
from headstart.sim.worker import GATEWAY

LAUNCHER = "launcher"
KILLED = -9


@dataclass(frozen=True, slots=True)
class Processes:
    """What the launcher does to processes: end one now, start the next incarnation of a name."""

    end: Callable[[WorkerRef], bool]
    start: Callable[[str], WorkerRef]


class SimLauncher:
    def __init__(
        self, clock: VirtualClock, agenda: Agenda, network: ControlNetwork, timing: Timing, processes: Processes
    ) -> None:
        self._clock = clock
        self._agenda = agenda
        self._network = network
        self._timing = timing
        self._processes = processes

    def hello(self, names: tuple[str, ...]) -> None:
        self._network.attach(LAUNCHER, self.handle)
        self._network.send(LAUNCHER, GATEWAY, LauncherHello(names))

    def handle(self, sender: str, message: Message) -> None:
        if isinstance(message, KillRequest):
            self.kill(message.worker)

    def kill(self, worker: WorkerRef) -> None:
        """End the process; its exit is reported a little later. One that has already ended is left alone."""
        if self._processes.end(worker):
            self._agenda.add(self._clock.now() + self._timing.exit_report_s, lambda: self._report(worker))

    def _report(self, worker: WorkerRef) -> None:
        self._network.send(LAUNCHER, GATEWAY, WorkerExited(worker, KILLED))
        if self._timing.restart_s is not None:
            start_at = self._clock.now() + self._timing.restart_s
            self._agenda.add(start_at, lambda: self._restart(worker.name))

    def _restart(self, name: str) -> None:
        self._processes.start(name)
