"""What `make compiled` made does what the sources do. `make test-compiled` runs these, and most other tests on that form."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest

ROOT = Path(__file__).parents[2]
FORMS = {"sources": ROOT / "src", "compiled": ROOT / "build" / "compiled"}
SIMULATE = split(
    "headstart.cli simulate --gsp-num-groups 4 --gsp-prompts-per-group 16 --gsp-system-prompt-len 2048 "
    "--gsp-question-len 128 --gsp-output-len 400 --max-concurrency 24 --num-decode 2 --pool-tokens 8192 --details "
    "--output-file"
)
NATIVE = """
import headstart.kv.ledger, headstart.scheduler.decode.scheduler, headstart.gateway.dispatch, headstart.sim.world
for module in (headstart.kv.ledger, headstart.scheduler.decode.scheduler, headstart.gateway.dispatch, headstart.sim.world):
    print(module.__file__.endswith(".so"))
"""
STRUCTS = """
from importlib import import_module
from pkgutil import walk_packages
from msgspec import Struct, structs
import headstart
for part in ("core", "wire", "scheduler", "gateway", "sim", "worker"):
    for module in walk_packages([f"{headstart.__path__[0]}/{part}"], f"headstart.{part}."):
        for name, found in sorted(vars(import_module(module.name)).items()):
            if isinstance(found, type) and issubclass(found, Struct) and found.__module__ == module.name:
                print(name, [(field.name, str(field.type)) for field in structs.fields(found)])
"""


def said(form: str, *arguments: str) -> str:
    """What Python prints that runs with these arguments on one form of the package."""
    environment = {**os.environ, "PYTHONPATH": str(FORMS[form])}
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return run.stdout


def test_what_serves_a_request_is_native() -> None:
    assert set(said("compiled", "-c", NATIVE).split()) == {"True"}
    assert set(said("sources", "-c", NATIVE).split()) == {"False"}


def test_messages_and_what_else_is_decoded_keep_the_types_of_their_fields() -> None:
    assert said("compiled", "-c", STRUCTS) == (expected := said("sources", "-c", STRUCTS))
    assert "TokenDelta" in expected


@pytest.mark.parametrize("seed", range(12))
def test_a_seed_of_faults_has_the_same_history(seed: int) -> None:
    told = [said(form, "-m", "headstart.sim.chaos", "--timeline", str(seed)).partition("CPU time")[0] for form in FORMS]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) > 100


@pytest.mark.parametrize("more", [(), ("--stepping",), ("--cache", "prefill"), ("--link-gb-s", "1")])
def test_a_simulation_has_the_same_result(tmp_path: Path, more: tuple[str, ...]) -> None:
    reports = []
    for form in FORMS:
        said(form, "-m", *SIMULATE, str(tmp_path / form), *more)
        (run,) = json.loads((tmp_path / form).read_text())["runs"]
        reports.append({key: value for key, value in run.items() if key != "commit"})
    assert reports[0] == reports[1]
    assert reports[0]["completed"] == 64
