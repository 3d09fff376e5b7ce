"""An executor for cards with its kernels in Triton's interpreter, no graphs, work done as it is launched."""

from dataclasses import replace

import pytest
import torch

from tests.gpu import executor_cases as cases
from tests.gpu.interpreted import interpreter_runs
from tests.gpu.rig import Rig, Setup

pytestmark = pytest.mark.skipif(not interpreter_runs(), reason="this Triton's interpreter does not run with this numpy")
NOISE = 0.05


EAGER = Setup("cpu", torch.float16, "float16", page_size=16, num_pages=120, head_dim=16, graph_rows=0)
SETUPS = {"fused": EAGER, "plain": replace(EAGER, fused=False)}


@pytest.fixture(params=SETUPS.values(), ids=SETUPS)
def rig(request, tmp_path):
    rig = Rig(tmp_path, request.param)
    yield rig
    rig.executor.close()


def test_greedy_alone_and_together(rig):
    cases.check_greedy_alone_and_together(rig, NOISE, long=60)


def test_two_steps_ahead(rig):
    cases.check_two_steps_ahead(rig, NOISE)


def test_bodies_of_graphs(tmp_path):
    """As they are before they are captured: padded, at fixed addresses."""
    rig = Rig(tmp_path, replace(EAGER, graph_rows=4))
    cases.check_pages_are_reused(rig, NOISE)
    rig.executor.close()


def test_pages_are_reused(rig):
    cases.check_pages_are_reused(rig, NOISE)


def test_drafts(rig):
    cases.check_drafts(rig)


def test_calls(rig):
    cases.check_order_of_calls(rig)
    cases.check_rows_that_fill_kv_only(rig)
    cases.check_unknown_pending(rig)
