"""Runs the batch sampler's cases for Triton's interpreter, in a process that is told so before it imports Triton."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is optional")
@pytest.mark.parametrize("cases", ["interpreted.py", "interpreted_fusion.py"])
def test_the_batch_sampler_draws_the_right_tokens_in_the_interpreter(cases):
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "--noconftest", "-n", "0"]
    if find_spec("xdist") is None:
        command = command[:-2]
    done = subprocess.run(
        [*command, f"tests/gpu/{cases}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "passed" not in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
