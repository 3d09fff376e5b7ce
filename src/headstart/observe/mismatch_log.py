"""The lines a worker logs about peers with which it exchanges no KV, because a setting differs."""

import logging

from headstart.core.messages import WorkerLoad

log = logging.getLogger("headstart.worker")


class MismatchLog:
    """Logs each mismatch once, and again if it comes back after it had gone."""

    def __init__(self) -> None:
        self._logged: frozenset[str] = frozenset()

    def observe(self, load: WorkerLoad) -> None:
        for mismatch in load.mismatches:
            if mismatch not in self._logged:
                log.error(mismatch)
        self._logged = frozenset(load.mismatches)
