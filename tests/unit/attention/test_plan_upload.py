"""A plan in device buffers of fixed size; here the device is the CPU."""

import numpy as np
import pytest

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Plan, Tiling, build_plan


def plan_of(kv_lens: list[int]) -> Plan:
    tables = [np.arange(100 * row, 100 * row + -(-kv_len // 4), dtype=np.int32) for row, kv_len in enumerate(kv_lens)]
    ones = np.ones(len(kv_lens), np.int64)
    return build_plan(tables, np.array(kv_lens, np.int64) - 1, ones, Tiling(4, q_tile=4, min_chunk=8, max_chunk=8))


def test_buffers_hold_the_plan_and_padding_tokens_have_no_slots():
    plan = plan_of([9, 30, 3])
    device_plan = DevicePlan(max_tokens=5, max_items=16, device="cpu")
    device_plan.upload(plan)
    assert int(device_plan.count) == len(plan.items)
    assert device_plan.items[: plan.items.size].reshape(-1, 8).tolist() == plan.items.tolist()
    assert device_plan.q_list[:3].tolist() == plan.q_list.tolist()
    assert device_plan.pos_of[:3].tolist() == [8, 29, 2]
    assert device_plan.slot_ptr.tolist() == [*plan.slot_ptr.tolist(), plan.num_slots, plan.num_slots]


def test_a_shorter_plan_leaves_nothing_of_a_longer_one():
    device_plan = DevicePlan(max_tokens=5, max_items=16, device="cpu")
    for _ in range(4):  # more than the staging blocks
        device_plan.upload(plan_of([9, 30, 3, 8, 8]))
    shorter = plan_of([5])
    device_plan.upload(shorter)
    assert int(device_plan.count) == 1
    assert device_plan.slot_ptr.tolist() == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("max_tokens", "max_items"), [(2, 16), (5, 3)])
def test_a_plan_larger_than_the_buffers_is_refused(max_tokens, max_items):
    with pytest.raises(ValueError, match="plan of 3 tokens"):
        DevicePlan(max_tokens, max_items, "cpu").upload(plan_of([9, 30, 3]))
