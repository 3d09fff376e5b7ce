"""The batch sampler in Triton's interpreter. Runs in a process of its own (`tests/unit/executor/test_triton_sampler.py`)."""

import pytest
import torch

from tests.gpu.interpreted import interpreter_runs
from tests.gpu.sampler_cases import CASES, check_random_specs

pytestmark = pytest.mark.skipif(not interpreter_runs(), reason="this Triton's interpreter does not run with this numpy")
CPU = torch.device("cpu")


@pytest.mark.parametrize("check", CASES)
def test_case(check):
    check(CPU)


@pytest.mark.parametrize(("vocab", "dtype"), [(97, torch.float32), (5000, torch.bfloat16)])
def test_random_parameters_draw_the_cpu_samplers_tokens(vocab, dtype):
    assert check_random_specs(CPU, vocab, dtype, num_batches=20) > 150
