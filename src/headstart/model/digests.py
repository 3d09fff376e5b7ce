"""Digests of weight files, remembered between starts. Remembering is optional: without it every start reads the files."""

import hashlib
import logging
import os
from pathlib import Path

log = logging.getLogger("headstart.model")

_DIGEST_BYTES = 32


def file_digest(path: Path, cache: Path) -> bytes:
    """The sha256 of the file's content.

    `cache` / "digests" holds what was computed before, by (path, size, mtime, inode). What is damaged there is computed
    anew; if the cache cannot be written, one warning says so. Raises OSError if the file itself cannot be read.
    """
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode()).hexdigest()
    remembered = cache / "digests" / key
    if (known := _read(remembered)) is not None:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    _remember(remembered, digest)
    return digest


def _read(remembered: Path) -> bytes | None:
    """The digest in the file, or None if there is none that can be believed: 64 hexadecimal digits and their check."""
    try:
        text = remembered.read_text().strip()
        digest, check = bytes.fromhex(text[: 2 * _DIGEST_BYTES]), text[2 * _DIGEST_BYTES :].strip()
    except (OSError, ValueError):
        return None
    return digest if len(digest) == _DIGEST_BYTES and check == _check(digest) else None


def _check(digest: bytes) -> str:
    return hashlib.sha256(b"headstart/digest" + digest).hexdigest()[:16]


def _remember(remembered: Path, digest: bytes) -> None:
    staging = remembered.with_name(f".{remembered.name}.{os.getpid()}")
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.write_text(f"{digest.hex()} {_check(digest)}\n")
            staging.rename(remembered)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "cannot remember the digest of a weights file; every start reads it again",
            extra={"folder": str(remembered.parent), "reason": error.strerror or str(error)},
        )
