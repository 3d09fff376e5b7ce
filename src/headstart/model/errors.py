"""The exception for a model that Headstart does not serve."""

from headstart.core.errors import WorkerError


class ModelRefused(WorkerError):
    """The model cannot be served, whatever the machine: a launcher ends with status 2 and does not start it again."""


def shortened(names: list[str], most: int = 4) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
