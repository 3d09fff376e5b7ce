"""Everything here needs a GPU and Triton; without them the tests are skipped."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def missing() -> str | None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
