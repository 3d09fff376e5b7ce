"""Standard input, output and error may be closed, full or unread: that must never end a service."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def open_standard_streams() -> None:
    """Open /dev/null for each of the three that is closed, before any other file can take its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def try_print(text: str, stream: TextIO | None = None) -> bool:
    """Print a line to standard error or `stream`; False if nobody can take it."""
    try:
        print(text, file=stream or sys.stderr, flush=True)
    except (OSError, ValueError):
        return False
    return True


def flush_or_drop() -> bool:
    """Flush both outputs before the process ends, and drop what cannot be written: at its end the interpreter would turn it
    into another exit status. Returns whether standard output was written."""
    is_written = True
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except (OSError, ValueError):
            is_written = stream is not sys.stdout
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return is_written
