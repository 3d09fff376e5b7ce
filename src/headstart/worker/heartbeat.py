"""Signs of life from a thread and a socket of their own, so that a starved loop does not look like a death.

The beat carries the age of the loop's last pass, so a wedged loop does not look like life either; past the watchdog's
time it ends the process, because nothing else would.
"""

import logging
import threading
from collections.abc import Callable

from headstart.core.clock import Clock
from headstart.core.messages import Heartbeat, WorkerRef
from headstart.worker.loop import LoopHealth

BEAT_S = 0.25
"""Seconds between beats; a gateway suspects a worker after one second of silence."""

log = logging.getLogger(__name__)


class HeartbeatThread:
    """Sends a beat every BEAT_S until stopped. `beat` is called on this thread only and owns its socket."""

    def __init__(
        self,
        worker: WorkerRef,
        health: LoopHealth,
        clock: Clock,
        beat: Callable[[Heartbeat], object],
        on_wedged: Callable[[float], None],
        watchdog_s: float,
    ) -> None:
        self._worker = worker
        self._health = health
        self._clock = clock
        self._beat = beat
        self._on_wedged = on_wedged
        self._watchdog_s = watchdog_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2.0)

    def beat_once(self) -> None:
        """Send one beat, or report a loop older than the watchdog allows."""
        last_pass, load = self._health.read()
        age = max(0.0, self._clock.now() - last_pass)
        if age > self._watchdog_s:
            log.critical("loop wedged", extra={"age_s": age})
            self._on_wedged(age)
            return
        self._beat(Heartbeat(self._worker, age, load))

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.beat_once()
            self._stopped.wait(BEAT_S)
