"""Exit statuses of Headstart's processes. The launcher restarts by them, so they are part of the interface."""

import signal
from enum import IntEnum


class Exit(IntEnum):
    """`serve` passes on the status of the child that it cannot go on without: its gateway, or any child that is not
    restarted before all were ready. 0 there: somebody asked that child to stop.

    Negative statuses (a signal) and any number not named here count as a crash: the launcher restarts it."""

    DRAINED = 0  # asked to stop, finished what ran: not restarted
    CRASHED = 1  # a bug (InvariantError or any other exception): restarted
    BAD_SETTINGS = 2  # settings, model or port that cannot work: not restarted
    DEVICE_FAILED = 3  # WorkerError: the device, the model or the transport failed: restarted
    NAME_TAKEN = 4  # another process of this name holds the lock: not restarted
    WEDGED = 5  # the watchdog found the loop stuck: restarted
    PAGES_LOST = 6  # a peer may still write pages here, and nothing proves its end: drained, then restarted

    @classmethod
    def restarts(cls, status: int) -> bool:
        """Whether a launcher starts the worker again after this status."""
        return status not in (cls.DRAINED, cls.BAD_SETTINGS, cls.NAME_TAKEN)


_WORDS = {
    Exit.DRAINED: "it was asked to stop",
    Exit.CRASHED: "it crashed",
    Exit.BAD_SETTINGS: "its settings, model or port cannot work",
    Exit.DEVICE_FAILED: "its device, model or transport failed",
    Exit.NAME_TAKEN: "another process has its name",
    Exit.WEDGED: "its loop was stuck",
    Exit.PAGES_LOST: "a peer that does not answer holds its pages",
}


def status_words(status: int) -> str:
    """What an exit status says, for people."""
    if status < 0:
        return f"signal {signal.Signals(-status).name}" if -status in list(signal.Signals) else f"signal {-status}"
    return _WORDS[Exit(status)] if status in list(Exit) else f"status {status}"
