"""What a worker says of its place in the cluster.

    waiting ─► joined ◄─► lost

waiting  no gateway has taken it in yet
joined   connected to the gateway; a decode worker has heard from it, too
lost     the connection is gone

Where a worker waits or is lost for `PATIENCE_S` it says so and why, and again every `REPEAT_S`.
"""

import logging

from headstart.wire.watch import LinkState

PATIENCE_S = 4.0
REPEAT_S = 30.0
REASONS: dict[LinkState, str] = {
    "unreached": "nobody listens there: the address is wrong, or the gateway has not started",
    "unanswered": "what listens there refuses this worker: it has another --cluster-key, or only one of the two has one, "
    "or it is no gateway's control port",
    "up": "it is connected but does not take this worker in: the gateway's log says why",
}

log = logging.getLogger("headstart.worker")


class MembershipLog:
    """`gateway`: HOST:PORT, as the user gave it."""

    def __init__(self, gateway: str, now: float) -> None:
        self._gateway = gateway
        self._is_member = False
        self._was_member = False
        self._speaks_at = now + PATIENCE_S

    def observe(self, now: float, link: LinkState, is_taken_in: bool) -> None:
        """`is_taken_in`: whether the gateway is known to have accepted this worker, or never tells its kind."""
        if link == "up" and is_taken_in:
            if not self._is_member:
                log.info("joined again" if self._was_member else "ready", extra={"gateway": self._gateway})
            self._is_member = self._was_member = True
            return
        if self._is_member:
            self._is_member, self._speaks_at = False, now + PATIENCE_S
        if now >= self._speaks_at:
            self._speaks_at = now + REPEAT_S
            log.warning(f"no answer from the gateway at {self._gateway}: {REASONS[link]}")
