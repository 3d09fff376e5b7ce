"""The periodic line a worker logs about itself: what runs, where its pages are, what the cache saved."""

import logging
from collections.abc import Mapping

from headstart.core.messages import WorkerLoad

INTERVAL_S = 5.0

log = logging.getLogger("headstart.worker")


class LoadLine:
    """Logs differences between two loads, and nothing while nothing happens."""

    def __init__(self, role: str, page_size: int, page_bytes: int) -> None:
        self._role = role
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._logged_at: float | None = None
        self._counters: Mapping[str, float] = {}
        self._was_busy = False

    def observe(self, now: float, load: WorkerLoad) -> None:
        """Log if INTERVAL_S have passed and something ran since."""
        if self._logged_at is None:
            self._logged_at, self._counters = now, load.counters
            return
        elapsed = now - self._logged_at
        if elapsed < INTERVAL_S:
            return
        gained = {key: value - self._counters.get(key, 0) for key, value in load.counters.items()}
        busy = load.num_running + load.num_waiting > 0
        if busy or self._was_busy or any(gained.values()):
            log.info(self._role, extra=self._fields(load, gained, elapsed))
        self._logged_at, self._counters, self._was_busy = now, load.counters, busy

    def _fields(self, load: WorkerLoad, gained: Mapping[str, float], elapsed: float) -> dict[str, object]:
        fields: dict[str, object] = {
            "running": load.num_running,
            "queued": load.num_waiting,
            "pages": "/".join(
                f"{getattr(load, name + '_pages')} {name}"
                for name in ("inflight", "private", "pinned", "cached", "free")
            ),
        }
        prompt, hit = gained.get("prompt_tokens", 0), gained.get("hit_tokens", 0)
        if prompt:
            fields["hit_rate"] = round(hit / prompt, 3)
        if "output_tokens" in gained:
            fields["tokens_per_s"] = round(gained["output_tokens"] / elapsed, 1)
        if "tokens_computed" in gained:
            fields["prefill_tokens_per_s"] = round(gained["tokens_computed"] / elapsed, 1)
        moved = gained.get("pages_moved", 0) + gained.get("pages_posted", 0)
        if moved:
            fields["mb_moved"] = round(moved * self._page_bytes / 1e6, 3)
        if hit:
            fields["mb_saved"] = round(hit / self._page_size * self._page_bytes / 1e6, 3)
        return fields
