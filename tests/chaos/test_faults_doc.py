"""docs/faults.md names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs" / "faults.md").read_text())))


def test_every_test_named_in_the_document_exists() -> None:
    assert len(NAMED) > 40
    for file, name in NAMED:
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"
