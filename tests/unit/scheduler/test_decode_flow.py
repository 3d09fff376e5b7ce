"""A request from Submit to Finished: cold, repeated, shared, multi-turn, local and remote."""

import pytest
from decode_rig import GATEWAY, P0, PAGE_BYTES, Rig

from headstart.core.arrays import int32_array
from headstart.core.identity import cache_namespace
from headstart.core.messages import Accepted, Tokens
from headstart.core.request import FinishReason


def test_a_request_without_any_prefill_worker_is_computed_here():
    rig = Rig()
    ref = rig.submit("a", range(10), max_new=3)
    rig.run()
    assert rig.answer(ref) == [10, 11, 12]
    assert rig.finished(ref).finish_reason == FinishReason.LENGTH
    assert rig.is_clean()


def test_a_cold_prompt_is_fetched_from_prefill_as_whole_pages():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), max_new=2)
    rig.step()
    (call,) = rig.calls()
    assert call.start == 0
    assert call.tokens.tolist() == list(range(42))
    assert len(call.dst_pages) == 11
    assert rig.step() is None, "nothing runs before the pages are here"
    rig.serve(call)
    rig.run()
    assert rig.answer(ref) == [43, 44]
    assert rig.stats(ref).bytes_moved == 11 * PAGE_BYTES
    assert rig.stats(ref).decode_prefix_len == 0
    assert rig.cached_pages(range(44)) == (43 + 2 - 1) // 4
    assert rig.is_clean()
