"""An executor for cards with its kernels in Triton's interpreter, no graphs, work done as it is launched."""

import pytest
import torch

from tests.gpu import executor_cases as cases
from tests.gpu.interpreted import interpreter_runs
from tests.gpu.rig import Rig, Setup

pytestmark = pytest.mark.skipif(not interpreter_runs(), reason="this Triton's interpreter does not run with this numpy")
NOISE = 0.05


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def rig(request, tmp_path):
    setup = Setup("cpu", torch.float16, "float16", page_size=16, num_pages=120, head_dim=16, fused=request.param)
    rig = Rig(tmp_path, setup)
    yield rig
    rig.executor.close()


def test_greedy_alone_and_together(rig):
    cases.check_greedy_alone_and_together(rig, NOISE, long=60)


def test_two_steps_ahead(rig):
    cases.check_two_steps_ahead(rig, NOISE)


def test_pages_are_reused(rig):
    cases.check_pages_are_reused(rig, NOISE)


def test_drafts(rig):
    cases.check_drafts(rig)


def test_calls(rig):
    cases.check_order_of_calls(rig)
    cases.check_rows_that_fill_kv_only(rig)
    cases.check_unknown_pending(rig)
