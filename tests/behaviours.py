"""python -m tests.behaviours: write into docs/behaviours.md which tests show each of its entries.

A test tells what it shows by its marker, `@pytest.mark.behaviour("12", "C7")`. What an entry says, and the note beside it,
are the document's own; its tests are generated.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "behaviours.md"
ROW = re.compile(r"\| \*\*([^*]+)\*\*")


def marked_tests() -> dict[str, list[str]]:
    """Entry -> the tests that show it, as `file::name`, in the order of files and lines."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for entry in _entries_of(node):
                    found.setdefault(entry, []).append(f"{file.relative_to(TESTS)}::{node.name}")
    return found


def _entries_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The arguments of the test's markers, in order."""
    calls = [decorator for decorator in test.decorator_list if isinstance(decorator, ast.Call)]
    markers = [call for call in calls if ast.unparse(call.func) == "pytest.mark.behaviour"]
    return [ast.literal_eval(argument) for marker in markers for argument in marker.args]


def entries(text: str) -> list[str]:
    """Every entry of the document, in order."""
    return [entry for line in text.splitlines() if (row := ROW.match(line)) for entry in row[1].split(", ")]


def with_tests(text: str, marked: dict[str, list[str]]) -> str:
    """The document with the tests of each entry in the second cell of its row."""
    return "".join(_row(line, marked) if ROW.match(line) else line for line in text.splitlines(keepends=True))


def _row(line: str, marked: dict[str, list[str]]) -> str:
    head, _, note = line.split("|")[1:4]
    row = ROW.match(line)
    assert row is not None
    tests = dict.fromkeys(test for entry in row[1].split(", ") for test in marked.get(entry, ()))
    cell = "<br>".join(f"`{test}`" for test in tests) or "none"
    return f"|{head}| {cell} |{note}|\n"


def main() -> None:
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(with_tests(text, marked_tests()))


if __name__ == "__main__":
    main()
