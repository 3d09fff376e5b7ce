"""What moving a delta costs, and what reserving for growth costs: behaviour 64 and case G2, over whole clusters."""

import pytest

from tests.support.clusters import assert_right, make_cluster, prompt, serve, settle, stats, submit

NUM_GROUPS, NUM_QUESTIONS, SHARED = 8, 8, 40


@pytest.mark.behaviour("64")
def test_every_request_moves_its_delta_to_the_page_and_the_worker_counts_the_same() -> None:
    cluster = make_cluster(prefill_pages=300, decode_pages=300)
    page = cluster.spec.page_bytes
    moved = 0
    for question in range(NUM_QUESTIONS):
        for group in range(NUM_GROUPS):
            tokens = prompt(SHARED, group) + prompt(3 + question, 90 + group * NUM_QUESTIONS + question)
            answer = stats(serve(cluster, tokens, 3))
            assert answer.decode_prefix_len == (SHARED if question else 0)
            exact = (len(tokens) - 1 - answer.decode_prefix_len) * page / cluster.spec.page_size
            assert exact <= answer.bytes_moved < exact + page
            moved += answer.bytes_moved
    cluster.run_for(1.0)
    load = cluster.load("decode-0")
    assert load["pages_moved"] * page == moved
    assert load.get("pages_moved_in_vain", 0) == 0
    settle(cluster)


def time_of_all(num_reserved: int) -> float:
    """Virtual seconds for requests that together want more than the pool, with this reserve for each."""
    cluster = make_cluster(decode_pages=60, decode={"num_reserved_decode_tokens": num_reserved})
    handles = [submit(cluster, prompt(20, first), 80) for first in range(12)]
    cluster.finish()
    assert_right(*handles)
    return max(handle.ended_at or 0.0 for handle in handles)


@pytest.mark.behaviour("G2")
def test_a_reserve_ten_times_too_small_is_nearly_as_fast_as_the_best_one() -> None:
    times = {num_reserved: time_of_all(num_reserved) for num_reserved in (8, 0, 20, 40, 80)}
    assert times[8] <= 1.15 * min(times.values())
