"""The one exception of this package, and how several mistakes are told at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headstart.core.errors import HeadstartError


class ConfigError(HeadstartError):
    """Settings that cannot work; the message names every setting involved. Raised before anything starts."""


_found: ContextVar[list[str] | None] = ContextVar("found", default=None)


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds. Within `told_together` it is raised at the end."""
    if condition:
        return
    if (found := _found.get()) is None:
        raise ConfigError(message)
    found.append(message)


@contextmanager
def told_together() -> Iterator[None]:
    """Collect what `require` finds in this context, and raise one ConfigError with all of it, a line each."""
    found: list[str] = []
    token = _found.set(found)
    try:
        yield
    except ConfigError as error:
        found.append(str(error))
    finally:
        _found.reset(token)
    if found:
        raise ConfigError(found[0] if len(found) == 1 else "\n  ".join(["these settings cannot work:", *found]))
