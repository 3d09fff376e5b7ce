"""Who gives pages back when a running choice needs one and nothing can be evicted."""

from collections.abc import Iterable

from headstart.scheduler.decode.states import Preparing, Ready, Running


def youngest_ready(ready: Iterable[Ready]) -> Ready | None:
    """Ready choices have not started: the last to arrive gives way first."""
    return max(ready, key=lambda entry: entry.choice.order, default=None)


def youngest_preparing(preparing: Iterable[Preparing]) -> Preparing | None:
    return max(preparing, key=lambda entry: entry.choice.order, default=None)


def running_victim(running: Iterable[Running], page_size: int) -> Running | None:
    """The one that frees most pages of its own per token to compute again; never the oldest.

    Pages of the prefix that it found in the cache are left out on both sides: others may hold them, and they stay
    matchable. Ties go to the youngest.
    """

    def worth(entry: Running) -> tuple[float, int]:
        pages = len(entry.lease.pages) - entry.hit_pages
        tokens = entry.choice.sequence.num_computed - entry.hit_pages * page_size
        return pages / max(1, tokens), entry.choice.order

    entries = sorted(running, key=lambda entry: entry.choice.order)
    return max(entries[1:], key=worth, default=None)
