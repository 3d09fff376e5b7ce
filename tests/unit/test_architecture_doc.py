"""docs/architecture.md names functions that exist, and few words of our own."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
NUM_STEPS = 7
MOST_WORDS = 25


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def is_defined(file: Path, path: str) -> bool:
    """Whether `path`, a function or Class.method, stands in the file."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in path.split("."):
        named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = [node for node in body if isinstance(node, named) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_step_of_a_request_names_functions_that_exist() -> None:
    steps = re.split(r"^\d\. ", section("A request"), flags=re.MULTILINE)[1:]
    assert len(steps) == NUM_STEPS
    for step in steps:
        named = re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", step)
        assert named
        assert not [pair for pair in named if not is_defined(ROOT / "src" / "headstart" / pair[0], pair[1])]


def test_the_glossary_has_few_words() -> None:
    words = re.findall(r"^\| (?!word )([\w, ]+?) \|", section("Glossary"), flags=re.MULTILINE)
    assert 0 < len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)


def test_every_package_has_its_line() -> None:
    packages = {init.parent.name for init in (ROOT / "src" / "headstart").glob("*/__init__.py")}
    rows = "\n".join(line.split("|")[1] for line in section("Packages").splitlines() if line.startswith("|"))
    assert packages <= set(re.findall(r"`(\w+)`", rows))
