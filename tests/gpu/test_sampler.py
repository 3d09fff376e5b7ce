"""The batch sampler on the card."""

import pytest

pytest.importorskip("triton")

import torch

from tests.gpu.sampler_cases import CASES, check_random_specs

CARD = torch.device("cuda")


@pytest.mark.parametrize("check", CASES)
def test_case(check):
    check(CARD)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(311, torch.float32), (49_152, torch.bfloat16), (151_936, torch.bfloat16)]
)
def test_random_parameters_draw_the_cpu_samplers_tokens(vocab, dtype):
    assert check_random_specs(CARD, vocab, dtype, num_batches=100 if vocab < 1000 else 12) > 100
