"""A process's decision log: every call that its deciding part received, and every call that the part made meanwhile.

    head, then records, each a four-byte little-endian length and that many bytes of msgpack

The deciding part is a worker's scheduler or the gateway's dispatcher. What it does is a function of the head and of what
the log holds of its calls; `sim.replay` repeats it and compares. `worker.recorder` says which calls those are. The log
of a process that was killed may end within a record. It holds prompts and answers as token ids, so only the owner can
read the file. Never imports torch.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import MsgspecError, Raw, Struct, msgpack

from headstart.config.errors import ConfigError
from headstart.config.settings import RecordSettings
from headstart.gateway.limits import DispatchLimits
from headstart.worker.schedulers import DecodeSpec, PrefillSpec

log = logging.getLogger(__name__)

SUFFIX = ".decisions"
BUFFER_BYTES = 1 << 16
FLUSH_S = 1.0
"""Seconds after which a record is flushed with those before it: what the log of a killed process lacks at most."""
_LENGTH_BYTES = 4


class DispatcherSpec(Struct, frozen=True, tag="gateway"):
    """What a gateway's dispatcher is made of. `seed` starts the generator that breaks ties between workers."""

    limits: DispatchLimits
    policy: str
    model_fingerprint: str
    seed: str


Head = DecodeSpec | PrefillSpec | DispatcherSpec


class RecordedFailure(Struct, frozen=True, array_like=True):
    """An exception that ended a call."""

    kind: str
    message: str


class RecordedCall(Struct, frozen=True, array_like=True):
    """A call into the part, or one that the part made on the port `target`, with the calls in the other direction that
    happened during it, in order. `arguments` and `result` are msgpack of what `worker.recorder` keeps of them."""

    target: str  # empty: the part itself
    method: str
    arguments: Raw
    calls: "tuple[RecordedCall, ...]" = ()
    result: Raw = Raw(b"\xc0")
    failure: RecordedFailure | None = None


class DecisionLog:
    """Appends to one file until it holds `max_bytes`. An error of the disk never ends the process that is recorded: the
    log stops, says so among the process's messages, and `is_open` is False from then on."""

    def __init__(self, file: BinaryIO, max_bytes: int, path: Path) -> None:
        self._file = file
        self._encoder = msgpack.Encoder()
        self._room = max_bytes
        self._path = path
        self._flushed_at = float("-inf")
        self.is_open = True

    @classmethod
    def create(cls, folder: Path, name: str, head: Head, max_bytes: int) -> "DecisionLog":
        """A new file of that name. Raises ConfigError if it cannot be made."""
        path = folder / f"{name}{SUFFIX}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror or error}") from error
        decisions = cls(os.fdopen(number, "wb", BUFFER_BYTES), max_bytes, path)
        decisions._append(head)
        decisions.flush()
        return decisions

    def write(self, call: RecordedCall, now: float) -> None:
        """Append a call that ended at `now`."""
        if not self.is_open:
            return
        self._append(call)
        if now >= self._flushed_at + FLUSH_S or call.failure is not None:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._end(error.strerror or str(error))

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, record: Head | RecordedCall) -> None:
        body = self._encoder.encode(record)
        self._room -= _LENGTH_BYTES + len(body)
        if self._room < 0:
            self._end("it is full")
            return
        try:
            self._file.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        except OSError as error:
            self._end(error.strerror or str(error))

    def _end(self, reason: str) -> None:
        log.warning("the decision log ends here", extra={"path": str(self._path), "reason": reason})
        self.close()


def open_decision_log(settings: RecordSettings, name: str, head: Head) -> DecisionLog | None:
    """The process's decision log if one is asked for. Raises ConfigError."""
    if not settings.record:
        return None
    return DecisionLog.create(Path(settings.record), name.replace("#", "."), head, settings.record_max_mb << 20)


class DecisionLogError(Exception):
    """A file that is no decision log."""


def read_decision_log(path: Path) -> tuple[Head, Iterator[RecordedCall]]:
    """The head, and the calls as far as they are whole. Raises DecisionLogError, also while the calls are read."""
    try:
        records = _records(path)
        body = next(records, None)
        if body is None:
            raise DecisionLogError(f"{path} is empty")
        head = msgpack.decode(body, type=Head)
    except (OSError, MsgspecError) as error:
        raise DecisionLogError(f"{path} is no decision log: {error}") from error
    return head, _calls(path, records)


def _calls(path: Path, records: Iterator[bytes]) -> Iterator[RecordedCall]:
    decoder = msgpack.Decoder(RecordedCall)
    for number, body in enumerate(records):
        try:
            yield decoder.decode(body)
        except MsgspecError as error:
            raise DecisionLogError(f"{path}: call {number} cannot be read: {error}") from error


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(length := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            num_bytes = int.from_bytes(length, "little")
            body = file.read(num_bytes)
            if len(body) < num_bytes:
                return
            yield body
