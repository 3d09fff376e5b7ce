"""When each gateway was last heard, and which have been silent for too long."""

from math import inf

OWN_STALL_S = 1.0
"""A time in which this worker itself stood still for longer is no silence of theirs."""


class GatewayLiveness:
    """Those that this worker has heard of, and may hold choices of."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._heard: dict[str, float] = {}
        self._looked_at = now
        self.silent_at = inf  # when one has been silent for too long, if nothing is heard of any before

    def names(self) -> list[str]:
        return sorted(self._heard)

    def heard(self, gateway: str, now: float) -> None:
        self._heard[gateway] = now
        self._note_silence()

    def look(self, now: float) -> list[tuple[str, float]]:
        """The gateways that are given up now, and for how long nothing was heard of them. Comes round all the time."""
        stood_still_s = now - self._looked_at
        self._looked_at = now
        if stood_still_s > OWN_STALL_S:
            self._heard = {gateway: min(now, heard + stood_still_s) for gateway, heard in self._heard.items()}
            self._note_silence()
        if now < self.silent_at:
            return []
        silent = [(name, now - heard) for name, heard in self._heard.items() if now >= heard + self._silence_s]
        for name, _ in silent:
            del self._heard[name]
        self._note_silence()
        return silent

    def _note_silence(self) -> None:
        self.silent_at = min(self._heard.values(), default=inf) + self._silence_s
