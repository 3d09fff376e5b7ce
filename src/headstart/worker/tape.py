"""A process's tape: every call that its deciding part got, the clock readings it took, and what it decided, in order.

    head, then calls, each a four-byte little-endian length and that many bytes of msgpack

The deciding part is a worker's scheduler or the gateway's dispatcher. What it does is a function of the head and of the
calls' inputs, clock readings, page digests and results of posted writes: `sim.replay` feeds them to a fresh one and
compares the rest. Messages are kept as the frames that travel. A call inside a call (a client's callback that stops its
choice) stands among the outer one's effects, where it happened. Never imports torch.

A tape holds prompts and answers as token ids: its file is readable by its owner alone.
"""

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from msgspec import MsgspecError, Struct, msgpack

from headstart.config.errors import ConfigError
from headstart.config.settings import RecordSettings
from headstart.core.batch import Batch, BatchOutput, Row
from headstart.core.messages import Message, Submit
from headstart.gateway.limits import DispatchLimits
from headstart.transfer.contract import Completed, Notice, PeerLost, TransferEvent, WriteFailed
from headstart.wire.channels import CHANNELS, Channel
from headstart.wire.codec import Codec
from headstart.wire.limits import WireLimits
from headstart.worker.schedulers import DecodeSpec, PrefillSpec

log = logging.getLogger(__name__)

SUFFIX = ".tape"
BUFFER_BYTES = 1 << 16
FLUSH_S = 1.0
"""Readings this far apart flush the file: what a killed process loses of its tape."""
_LENGTH_BYTES = 4
_ANY = Channel("a tape", tuple(dict.fromkeys(kind for channel in CHANNELS for kind in channel.types)))
_frames = Codec(_ANY, WireLimits(max_message_bytes=1 << 31, max_array_len=1 << 29))


class DispatcherSpec(Struct, frozen=True, tag="gateway"):
    """What a gateway's dispatcher is made of. `seed` starts the generator that breaks ties between workers."""

    limits: DispatchLimits
    policy: str
    model_fingerprint: str
    seed: str


Head = DecodeSpec | PrefillSpec | DispatcherSpec


# ---- inputs ----------------------------------------------------------------------------------------------------------


class Received(Struct, frozen=True, array_like=True, tag="received"):
    sender: str
    frame: bytes


class Transferred(Struct, frozen=True, array_like=True, tag="transferred"):
    event: Literal["Completed", "WriteFailed", "Notice", "PeerLost"]
    handle: int = -1
    text: str = ""  # a failure's reason, or a lost peer
    payload: bytes = b""


class StepEnded(Struct, frozen=True, array_like=True, tag="step ended"):
    output: BatchOutput


class Asked(Struct, frozen=True, array_like=True, tag="asked"):
    """A call without arguments. "built" is the construction."""

    what: Literal["built", "advance", "schedule", "load", "flush"]


class Submitted(Struct, frozen=True, array_like=True, tag="submitted"):
    """A client's choice, as the frame of a Submit."""

    frame: bytes


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled"):
    request_id: str
    code: str
    message: str


class Stopped(Struct, frozen=True, array_like=True, tag="stopped"):
    request_id: str
    choice: int


Input = Received | Transferred | StepEnded | Asked | Submitted | Cancelled | Stopped


# ---- effects ---------------------------------------------------------------------------------------------------------


class Said(Struct, frozen=True, array_like=True, tag="said"):
    """A message sent. `recipient` is a process, or a client: see `client_name`."""

    recipient: str
    frame: bytes


class Wrote(Struct, frozen=True, array_like=True, tag="wrote"):
    """A write posted, with what came of the post: a handle, or the error's text. Pages are little-endian int32."""

    peer: str
    src_pages: bytes
    dst_pages: bytes
    notice: bytes
    handle: int = -1
    error: str | None = None


class Linked(Struct, frozen=True, array_like=True, tag="linked"):
    """A connection made (or refused with an error's text), or given up where there is no descriptor."""

    peer: str
    descriptor: bytes | None
    error: str | None = None


class Digested(Struct, frozen=True, array_like=True, tag="digested"):
    """Digests read of our own pages, 64 bits each."""

    pages: bytes
    digests: tuple[int, ...]


class LaunchedRow(Struct, frozen=True, array_like=True):
    """`written` are the pages that the row's tokens go to, `table` the CRC-32 of its whole page table. Arrays are
    little-endian int32."""

    row_id: int
    start: int
    tokens: bytes
    written: bytes
    table: int
    output_index: int = -1  # of the token that it samples


class Launched(Struct, frozen=True, array_like=True, tag="launched"):
    """What `schedule` returned; step -1 for nothing."""

    step_id: int
    rows: tuple[LaunchedRow, ...] = ()


class Wakeup(Struct, frozen=True, array_like=True, tag="wakeup"):
    """What `advance` returned."""

    at: float | None


class Counted(Struct, frozen=True, array_like=True, tag="counted"):
    """What `load` said of queues and pages."""

    num_running: int
    num_waiting: int
    inflight: int
    private: int
    pinned: int
    cached: int
    free: int


class Raised(Struct, frozen=True, array_like=True, tag="raised"):
    error: str


class Call(Struct, frozen=True, array_like=True, tag="call"):
    """An input, the clock readings taken for it, and its effects in order."""

    input: Input
    times: tuple[float, ...] = ()
    effects: tuple["Effect", ...] = ()


Effect = Said | Wrote | Linked | Digested | Launched | Wakeup | Counted | Raised | Call


# ---- from live values ------------------------------------------------------------------------------------------------


def frame_of(message: Message) -> bytes:
    return _frames.encode(message)


def message_in(frame: bytes) -> Message:
    """Raises WireError for what is no message of ours."""
    return _frames.decode(frame)


def submit_in(frame: bytes) -> Submit:
    message = message_in(frame)
    assert isinstance(message, Submit)
    return message


def client_name(request_id: str, choice: int) -> str:
    return f"client of {request_id}/{choice}"


def transferred(event: TransferEvent) -> Transferred:
    match event:
        case Completed(handle):
            return Transferred("Completed", handle)
        case WriteFailed(handle, reason):
            return Transferred("WriteFailed", handle, reason)
        case Notice(payload):
            return Transferred("Notice", payload=payload)
        case PeerLost(peer):
            return Transferred("PeerLost", text=peer)


def event_of(noted: Transferred) -> TransferEvent:
    match noted.event:
        case "Completed":
            return Completed(noted.handle)
        case "WriteFailed":
            return WriteFailed(noted.handle, noted.text)
        case "Notice":
            return Notice(noted.payload)
        case "PeerLost":
            return PeerLost(noted.text)


def launched(batch: Batch | None, page_size: int) -> Launched:
    if batch is None:
        return Launched(-1)
    return Launched(batch.step_id, tuple(_launched_row(row, page_size) for row in batch.rows))


def _launched_row(row: Row, page_size: int) -> LaunchedRow:
    written = row.pages[row.start // page_size : -(-(row.start + len(row.tokens)) // page_size)]
    output_index = -1 if row.sample is None else row.sample.output_index
    table = zlib.crc32(int32_bytes(row.pages))
    return LaunchedRow(row.row_id, row.start, int32_bytes(row.tokens), int32_bytes(written), table, output_index)


def int32_bytes(array: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> bytes:
    return np.ascontiguousarray(array, dtype="<i4").tobytes()


# ---- files -----------------------------------------------------------------------------------------------------------


class TapeWriter:
    """Appends to one file until it holds `max_bytes`. Raises no error of the disk: a tape must not end what it watches. It
    stops, says so in the log, and is not `is_open` any more."""

    def __init__(self, file: BinaryIO, max_bytes: int, path: Path) -> None:
        self._file = file
        self._encoder = msgpack.Encoder()
        self._room = max_bytes
        self._path = path
        self._flushed_at = float("-inf")
        self.is_open = True

    @classmethod
    def create(cls, folder: Path, name: str, head: Head, max_bytes: int) -> "TapeWriter":
        """A new file of that name. Raises ConfigError where it cannot be made."""
        path = folder / f"{name}{SUFFIX}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {folder}: {error.strerror or error}") from error
        tape = cls(os.fdopen(number, "wb", BUFFER_BYTES), max_bytes, path)
        tape._append(head)
        tape.flush()
        return tape

    def write(self, call: Call) -> None:
        if self.is_open:
            self._append(call)
            if call.times and call.times[-1] >= self._flushed_at + FLUSH_S:
                self._flushed_at = call.times[-1]
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

    def _append(self, record: Head | Call) -> None:
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
        log.warning("the tape ends here", extra={"tape": str(self._path), "reason": reason})
        self.close()


def open_tape(settings: RecordSettings, name: str, head: Head) -> TapeWriter | None:
    """The process's tape where one is asked for. Raises ConfigError."""
    if not settings.record:
        return None
    return TapeWriter.create(Path(settings.record), name.replace("#", "."), head, settings.record_max_mb << 20)


class TapeError(Exception):
    """A file that is no tape."""


def read_tape(path: Path) -> tuple[Head, Iterator[Call]]:
    """The head, and the calls as far as they are whole: the file of a killed process may end within one. Raises
    TapeError, while it is read as well."""
    try:
        records = _records(path)
        body = next(records, None)
        if body is None:
            raise TapeError(f"{path} is empty")
        head = msgpack.decode(body, type=Head)
    except (OSError, MsgspecError) as error:
        raise TapeError(f"{path} is no tape: {error}") from error
    return head, _calls(path, records)


def _calls(path: Path, records: Iterator[bytes]) -> Iterator[Call]:
    decoder = msgpack.Decoder(Call)
    for number, body in enumerate(records):
        try:
            yield decoder.decode(body)
        except MsgspecError as error:
            raise TapeError(f"{path}: call {number} cannot be read: {error}") from error


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(length := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            num_bytes = int.from_bytes(length, "little")
            body = file.read(num_bytes)
            if len(body) < num_bytes:
                return
            yield body
