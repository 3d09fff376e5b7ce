"""docs/behaviours.md names tests that exist, and every entry that it should."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "behaviours.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TEXT)))
ROWS = [line for line in TEXT.splitlines() if line.startswith("| **")]
BEHAVIOURS = {*range(1, 35), *range(48, 52), *range(54, 60), *range(62, 65), *range(69, 73), *range(76, 80)}
CASES = {"C11", "M1", "M3", "M6"}
CASES |= {f"G{number}" for number in (1, 2, 3, 5, 6, 7, 8, 10, 12, 13, 14, 15, 16)}
CASES |= {f"I{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 11)}
CASES |= {f"K{number}" for number in (1, 2, 3, 4, 6, 7, 8, 9)}


def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def entries() -> list[str]:
    numbers = [re.match(r"\| \*\*([^*]+)\*\*", row) for row in ROWS]
    return [entry for found in numbers if found for entry in found[1].split(", ")]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_named_in_the_document_exists(file: str) -> None:
    names = {name for other, name in NAMED if other == file}
    assert all(name.startswith("test_") for name in names)
    assert names <= functions(file)


def test_every_entry_is_listed_once() -> None:
    assert sorted(entries()) == sorted({*map(str, BEHAVIOURS), *CASES})


def test_an_entry_without_a_test_says_why() -> None:
    for row in ROWS:
        _, _, tests, note, _ = (cell.strip() for cell in row.split("|"))
        assert "::" in tests or note.startswith("Does not apply")
