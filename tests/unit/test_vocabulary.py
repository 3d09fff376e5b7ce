"""One name means one thing: public classes and modules can be told apart by their names alone."""

import ast
import re
from collections import defaultdict
from itertools import combinations, takewhile
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "headstart"

MIN_STEM = 4
"""Letters that two module names must begin with alike before they can be forms of one word."""


def public_types(module: Path) -> tuple[list[str], list[str]]:
    """A module's classes, and the names that it gives to other types."""
    classes, aliases = [], []
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            aliases += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return tuple([name for name in names if name[0].isupper() and not name.isupper()] for names in (classes, aliases))


def differ_by_a_suffix(one: str, other: str) -> bool:
    """Whether the longer name is the shorter one with something behind it, or both are forms of one word."""
    stem_len = len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
    if stem_len in (len(one), len(other)):
        return True
    words_differ = one[stem_len - 1] == "_" or "_" in one[stem_len:] + other[stem_len:]
    return not words_differ and stem_len >= MIN_STEM and 5 * stem_len >= 3 * min(len(one), len(other))


def test_no_public_class_shares_its_name_with_another_type():
    classes, places = set(), defaultdict(list)
    for module in sorted(SOURCE.rglob("*.py")):
        own, aliases = public_types(module)
        classes.update(own)
        for name in (*own, *aliases):
            places[name].append(str(module.relative_to(SOURCE)))
    assert len(classes) > 300
    assert not {name: places[name] for name in sorted(classes) if len(places[name]) > 1}


def test_no_two_modules_of_a_package_differ_by_a_suffix_only():
    alike = []
    for package in sorted({module.parent for module in SOURCE.rglob("*.py")}):
        names = {found.stem for found in package.iterdir() if found.suffix == ".py" or (found / "__init__.py").exists()}
        for one, other in combinations(sorted(names - {"__init__", "__main__"}), 2):
            if differ_by_a_suffix(one, other):
                alike.append(f"{package.relative_to(SOURCE)}: {one}, {other}")
    assert not alike


def test_forms_of_one_word_are_recognised():
    assert differ_by_a_suffix("replay", "replay_report")
    assert differ_by_a_suffix("admit", "admission")
    assert differ_by_a_suffix("refusals", "refused")
    assert not differ_by_a_suffix("limits", "machine_limits")
    assert not differ_by_a_suffix("request_log", "request_metrics")
    assert not differ_by_a_suffix("triton_decode", "triton_extend")


DOCUMENT = SOURCE.parents[1] / "docs" / "architecture.md"


def is_defined(file: Path, path: str) -> bool:
    """Whether the file defines `path`: a function, a class or Class.method."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in path.split("."):
        named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = [node for node in body if isinstance(node, named) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_each_of_the_seven_steps_of_a_request_names_functions_that_exist():
    walk = DOCUMENT.read_text().split("\n## A request\n")[1].split("\n## ")[0]
    named = [
        re.findall(r"`([\w/]+\.py):\s+([\w.]+)`", step) for step in re.split(r"^\d\. ", walk, flags=re.MULTILINE)[1:]
    ]
    assert len(named) == 7
    assert all(named)
    assert not [f"{file}: {path}" for step in named for file, path in step if not is_defined(SOURCE / file, path)]


def test_the_words_of_our_own_are_few():
    section = DOCUMENT.read_text().split("## Words of our own")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section, re.MULTILINE)
    words = [word for row in rows if row != "word" and "---" not in row for word in row.split(", ")]
    assert 10 < len(words) <= 25
