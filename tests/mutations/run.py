"""python tests/mutations/run.py [WORD]: take one safeguard away at a time from a copy of the source; a test must fail.

Prints mutation -> the first test that failed. Exits with 1 if a mutation is survived or no longer applies. WORD selects
mutations by name.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


def copy_tree(target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, target / part, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


def first_failure(mutation: Mutation, tree: Path) -> str | None:
    """The test that notices, or None."""
    source = tree / "src" / "headstart" / mutation.path
    text = source.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(f"{mutation.name}: its text occurs {text.count(mutation.before)} times in {mutation.path}")
    source.write_text(text.replace(mutation.before, mutation.after))
    try:
        return _failing_test(mutation.tests, tree)
    finally:
        source.write_text(text)


def _failing_test(tests: tuple[str, ...], tree: Path) -> str | None:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
    try:
        run = subprocess.run(argv, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "(hangs)"
    failed = [line.split(" - ")[0] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if run.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run: {run.stdout}{run.stderr}")
    return failed[0] if failed else None


def main(word: str = "") -> int:
    survived = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_tree(tree)
        for mutation in MUTATIONS:
            if word not in mutation.name:
                continue
            noticed = first_failure(mutation, tree)
            survived += noticed is None
            print(f"{mutation.name}\n    {noticed or 'SURVIVED'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
