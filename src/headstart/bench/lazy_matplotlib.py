"""matplotlib, for every picture of bench, simulate and plan. It loads only where a picture is asked for."""

from typing import Any

from headstart.bench.errors import BenchError


def check_drawable(flag: str) -> None:
    """Raise BenchError, before work is done for a picture that `flag` asks for, where nothing could draw it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError(f"{flag} needs matplotlib: run `make install-dev`, or `pip install matplotlib`") from error


def open_pyplot() -> Any:
    """matplotlib.pyplot without a screen; the same curves give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "headstart"
    from matplotlib import pyplot

    return pyplot
