"""Case G15: the reserve is never negative, and never more than the last possible token needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.layout import pages_for
from headstart.scheduler.decode.waiting import pages_in_reserve, pages_to_lease


@given(
    prompt=st.integers(1, 4000),
    num_outputs=st.integers(0, 300),
    num_left=st.integers(1, 300),
    reserved=st.integers(0, 600),
    held=st.integers(0, 400),
    page_size=st.sampled_from([1, 16, 64]),
)
@pytest.mark.behaviour("G15")
def test_the_reserve_is_tight_whatever_is_held(
    prompt: int, num_outputs: int, num_left: int, reserved: int, held: int, page_size: int
) -> None:
    num_tokens = prompt + num_outputs
    max_len = num_tokens + num_left
    reserve = pages_in_reserve(num_tokens, max_len, reserved, held, page_size)
    wanted = pages_for(min(num_tokens + reserved, max_len - 1), page_size)
    assert reserve >= 0
    assert held + reserve == max(held, wanted)


@given(num_tokens=st.integers(1, 4000), page_size=st.sampled_from([1, 16, 64]), data=st.data())
@pytest.mark.behaviour("G15")
def test_a_lease_behind_any_hit_ends_with_the_last_token(num_tokens: int, page_size: int, data: st.DataObject) -> None:
    hit_pages = data.draw(st.integers(0, (num_tokens - 1) // page_size))
    lease = pages_to_lease(num_tokens, hit_pages, page_size)
    assert lease >= 1
    assert (hit_pages + lease - 1) * page_size < num_tokens <= (hit_pages + lease) * page_size
