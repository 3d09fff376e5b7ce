"""Buffers of a step are not mapped anew for the next one."""

import platform
import resource

import pytest
import torch

from headstart.executor.allocator import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_buffer_that_is_allocated_again_costs_no_page_faults() -> None:
    assert keep_freed_memory()
    num_bytes = 8 << 20
    for _ in range(16):  # an aligned block splits off small ones, of which the C library first keeps seven aside
        torch.ones(num_bytes, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.ones(num_bytes, dtype=torch.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < num_bytes // resource.getpagesize() // 2
