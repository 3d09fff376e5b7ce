"""Three kinds of failure, told apart by what they end.

RequestError ends one request and reaches its client; WorkerError ends the process, and the gateway drains it;
InvariantError is a bug of ours and is never caught.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request ended without an answer. The gateway maps each to one HTTP status."""

    INVALID = "invalid"  # the request itself is wrong: 400, never retried
    TOO_LONG = "too_long"  # no worker could ever hold it: 400
    BUSY = "busy"  # bounded queue full: 429
    UNAVAILABLE = "unavailable"  # no worker can serve it now: 503
    DEADLINE = "deadline"  # its time ran out: 504
    CANCELLED = "cancelled"  # client gone or abort: 499 if anyone still listens
    MISMATCH = "mismatch"  # the peers' KV is incompatible: 503, never retried on that pair
    WORKER_LOST = "worker_lost"  # the workers that ran it died: 502
    INTERNAL = "internal"  # anything else that ended only this request: 500


class HeadstartError(Exception):
    """Base of Headstart's own exceptions."""


class RequestError(HeadstartError):
    """Ends one request."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class WorkerError(HeadstartError):
    """Ends the worker process."""


class InvariantError(HeadstartError):
    """A bug of ours."""
