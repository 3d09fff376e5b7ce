"""A name is of one thing: search and go-to-definition find it at once."""

import ast
from collections import defaultdict
from itertools import combinations, takewhile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "headstart"
SHARED: dict[str, set[str]] = {
    "Call": {"scheduler/prefill/states.py", "worker/decision_log.py"},
    "FusedAttention": {"model/fuse.py", "model/gpu_fusion.py"},
    "FusedMLP": {"model/fuse.py", "model/gpu_fusion.py"},
    "FusedNorm": {"model/fuse.py", "model/gpu_fusion.py"},
    "InflightStep": {"scheduler/decode/batching.py", "scheduler/prefill/states.py"},
    "Plan": {"attention/plan.py", "cli.py"},
    "Prefill": {"cli.py", "core/messages.py"},
    "Running": {"plan/contention.py", "scheduler/decode/states.py"},
}
"""Public classes that still share a name. The list only ever gets shorter."""
ALIKE = {("model", "refusals", "refused")}
"""Modules of one package that still differ by an ending. The list only ever gets shorter."""


def public_classes() -> dict[str, set[str]]:
    """Name -> the files that define a public class of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(str(file.relative_to(SOURCE)))
    return found


def differ_by_an_ending(one: str, other: str) -> bool:
    """As `admit` and `admission` do, and `batch` and `batches`."""
    common = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(one, other, strict=False)))
    stem, endings = one[:common].rpartition("_")[2], (one[common:], other[common:])
    return len(stem) >= 4 and all(len(ending) <= 5 and "_" not in ending for ending in endings)


def test_no_two_public_classes_share_a_name() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == SHARED


def test_no_two_modules_of_a_package_differ_by_an_ending_only() -> None:
    modules: dict[Path, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        modules[file.parent].append(file.stem)
    alike = {
        (str(package.relative_to(SOURCE)), one, other)
        for package, names in modules.items()
        for one, other in combinations(names, 2)
        if differ_by_an_ending(one, other)
    }
    assert alike == ALIKE


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("admit", "admission", True),
        ("batch", "batches", True),
        ("launch", "launcher", True),
        ("replay", "replay_report", False),
        ("prefill_client", "prefill_workers", False),
        ("limits", "listener", False),
        ("triton_tile", "triton_write", False),
    ],
)
def test_an_ending_is_what_follows_four_letters(one: str, other: str, expected: bool) -> None:
    assert differ_by_an_ending(one, other) is expected
