"""docs/behaviours.md has every entry that it should, with the tests that are marked with it."""

import pytest

from tests.behaviours import DOCUMENT, ROW, entries, marked_tests, with_tests

TEXT = DOCUMENT.read_text()
BEHAVIOURS = {*range(1, 35), *range(48, 52), *range(54, 60), *range(62, 65), *range(69, 73), *range(76, 80)}
CASES = {"C11", "M1", "M3", "M6"}
CASES |= {f"G{number}" for number in (1, 2, 3, 5, 6, 7, 8, 10, 12, 13, 14, 15, 16)}
CASES |= {f"I{number}" for number in (1, 2, 3, 4, 5, 6, 7, 9, 11)}
CASES |= {f"K{number}" for number in (1, 2, 3, 4, 6, 7, 8, 9)}


def test_the_document_names_the_tests_that_are_marked() -> None:
    assert with_tests(TEXT, marked_tests()) == TEXT, "python -m tests.behaviours brings it up to date"


def test_every_entry_is_listed_once() -> None:
    assert sorted(entries(TEXT)) == sorted({*map(str, BEHAVIOURS), *CASES})


def test_an_entry_without_a_test_says_why() -> None:
    for line in TEXT.splitlines():
        if ROW.match(line):
            tests, note = (cell.strip() for cell in line.split("|")[2:4])
            assert "::" in tests or note.startswith("Does not apply")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "| **1** a claim | `unit/test_a.py::test_old` | why |",
            "| **1** a claim | `unit/test_b.py::test_new` | why |",
        ),
        ("| **2, C1** another | none |  |", "| **2, C1** another | `x.py::test_x`<br>`y.py::test_y` |  |"),
        ("| **3** nothing shows it | `unit/test_a.py::test_old` | |", "| **3** nothing shows it | none | |"),
        ("| no entry | `x` | |", "| no entry | `x` | |"),
    ],
)
def test_a_row_gets_the_tests_of_its_entries_and_keeps_the_rest(before: str, after: str) -> None:
    marked = {"1": ["unit/test_b.py::test_new"], "2": ["x.py::test_x"], "C1": ["x.py::test_x", "y.py::test_y"]}
    assert with_tests(f"{before}\n", marked) == f"{after}\n"
