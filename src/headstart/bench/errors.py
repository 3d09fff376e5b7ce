"""What ends a measurement with a message for its user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BenchError(Exception):
    """The measurement cannot be made, or what came out of it cannot be true."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises BenchError for what the file system refuses inside."""
    try:
        yield
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}") from error
