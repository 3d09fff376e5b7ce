"""Clusters that tests share. All integration tests run in one process, so that clusters do not crowd two cores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PAIRS_FLAGS, TINY_FLAGS, Cluster, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("clusters"))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo model with default settings: short deltas are computed by the decode worker."""
    yield from running(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Random weights; every delta, however short, comes from the prefill worker."""
    yield from running(tmp_path_factory.mktemp("remote"), *TINY_FLAGS, "--local-prefill-tokens", "0")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers over random weights."""
    yield from running(tmp_path_factory.mktemp("pairs"), *PAIRS_FLAGS)
