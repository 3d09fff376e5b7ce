"""What a decode worker's cache holds decides what is moved: behaviours 1-16 and their neighbours, over whole clusters.

p is the page size, P the prompt length. The delta ends at P - 1: the last prompt token runs on the decode worker, and
there is no aux row and no first token from prefill. Behaviours 5, 11-13 and 16 are also tests of the schedulers alone.
"""

from collections.abc import Iterator

import pytest

from headstart.core.identity import cache_namespace
from headstart.core.request import ChoiceRef
from tests.support.clusters import assert_right, make_cluster, pages, pages_moved, prompt, serve, settle, stats, submit

PAGE_SIZES = pytest.mark.parametrize("p", [1, 4, 16])
POOLS = {"prefill_pages": 400, "decode_pages": 400}


@PAGE_SIZES
@pytest.mark.behaviour("1")
def test_a_cold_prompt_moves_every_page_and_is_cached_with_its_output(p: int) -> None:
    cluster = make_cluster(page_size=p, **POOLS)
    cold = serve(cluster, prompt(10 * p + 3), 6)
    assert pages_moved(cluster, cold) == -(-(10 * p + 2) // p)
    assert stats(cold).decode_prefix_len == 0
    settle(cluster)
    assert pages(cluster).cached == (10 * p + 3 + 6 - 1) // p


@PAGE_SIZES
@pytest.mark.behaviour("2", "C7")
def test_the_same_prompt_again_moves_at_most_its_partial_page(p: int) -> None:
    cluster = make_cluster(page_size=p, **POOLS)
    first, again = serve(cluster, prompt(10 * p + 3)), serve(cluster, prompt(10 * p + 3))
    assert first.tokens == again.tokens
    hit = (10 * p + 2) // p * p
    assert stats(again).decode_prefix_len == hit
    assert pages_moved(cluster, again) == (0 if hit == 10 * p + 2 else 1)


@PAGE_SIZES
@pytest.mark.behaviour("3")
def test_whole_pages_repeated_hit_all_but_the_last_and_one_more_token_moves_nothing(p: int) -> None:
    cluster = make_cluster(page_size=p, **POOLS)
    serve(cluster, prompt(10 * p))
    again = serve(cluster, prompt(10 * p))
    assert stats(again).decode_prefix_len == 9 * p
    assert pages_moved(cluster, again) == (0 if p == 1 else 1)
    calls = cluster.load("prefill-0")["calls"]
    full = serve(cluster, prompt(10 * p) + again.tokens[:1])
    assert (stats(full).decode_prefix_len, pages_moved(cluster, full)) == (10 * p, 0)
    assert cluster.load("prefill-0")["calls"] == calls


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.behaviour("4")
def test_a_prompt_below_a_page_never_hits(length: int) -> None:
    cluster = make_cluster(page_size=4)
    for _ in range(3):
        short = serve(cluster, prompt(length), 1)
        assert stats(short).decode_prefix_len == 0
        assert pages_moved(cluster, short) == (1 if length > 1 else 0)
    settle(cluster)
    assert pages(cluster).cached == 0


@PAGE_SIZES
@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.behaviour("5", "6")
def test_a_hit_is_floored_to_whole_pages(p: int, extra: int) -> None:
    cluster = make_cluster(page_size=p, **POOLS)
    shared = prompt(3 * p + min(extra, p - 1))
    serve(cluster, [*shared, 91, 92, 93])
    other = serve(cluster, [*shared, 81, 82, 83])
    assert stats(other).decode_prefix_len == 3 * p


@PAGE_SIZES
@pytest.mark.behaviour("7", "C13")
def test_a_conversation_hits_prompt_and_output_of_the_turns_before(p: int) -> None:
    cluster = make_cluster(page_size=p, **POOLS)
    tokens: list[int] = []
    held = 0
    for turn in range(6):
        tokens += prompt(11, first=turn)
        answer = serve(cluster, tokens, 7)
        assert stats(answer).decode_prefix_len == held // p * p
        assert pages_moved(cluster, answer) == -(-(len(tokens) - 1 - held // p * p) // p)
        tokens += answer.tokens
        held = len(tokens) - 1


@pytest.mark.behaviour("8", "C10")
def test_a_decode_hit_longer_than_prefills_moves_only_the_delta() -> None:
    cluster = make_cluster()
    serve(cluster, prompt(60))
    cluster.kill("prefill-0")
    cluster.run_for(0.2)
    cluster.restart("prefill-0")
    cluster.run_for(1.0)
    longer = serve(cluster, prompt(80))
    assert stats(longer).decode_prefix_len == 60
    assert pages_moved(cluster, longer) == 5
    assert cluster.load("prefill-0")["recomputed_tokens"] == 60


@pytest.mark.behaviour("9")
def test_a_prefill_hit_longer_than_decodes_moves_from_decodes_hit_on() -> None:
    cluster = make_cluster()
    serve(cluster, prompt(20))
    serve(cluster, prompt(60))
    cluster.kill("decode-0")
    cluster.run_for(0.2)
    cluster.restart("decode-0")
    cluster.run_for(1.0)
    serve(cluster, prompt(20), 1)
    longer = serve(cluster, prompt(61))
    assert stats(longer).decode_prefix_len == 20
    assert stats(longer).prefill_prefix_len >= 56
    assert pages_moved(cluster, longer) == 10


@pytest.mark.parametrize("held", [0, 8, 10, 16, 24, 40])
@pytest.mark.parametrize("chunk", [5, 8, 16])
@pytest.mark.behaviour("10", "11")
def test_pages_sent_add_up_wherever_the_hit_falls_within_a_chunk(held: int, chunk: int) -> None:
    cluster = make_cluster(prefill={"chunked_prefill_size": chunk})
    if held:
        serve(cluster, prompt(held), 1)
    whole = serve(cluster, prompt(45))
    assert stats(whole).decode_prefix_len == held // 4 * 4
    assert pages_moved(cluster, whole) == -(-(44 - stats(whole).decode_prefix_len) // 4)


@pytest.mark.behaviour("14", "K2", "K3", "K8")
def test_other_salts_and_adapters_share_nothing_on_either_side() -> None:
    cluster = make_cluster()
    names = [cache_namespace(), cache_namespace(tenant_salt=b"a"), cache_namespace("a"), cache_namespace("b")]
    for name in names:
        cold = serve(cluster, prompt(41), namespace=name)
        assert (stats(cold).decode_prefix_len, stats(cold).prefill_prefix_len) == (0, 0)
    for name in names:
        assert stats(serve(cluster, prompt(41), namespace=name)).decode_prefix_len == 40
    settle(cluster)


@pytest.mark.behaviour("K4")
def test_decode_and_prefill_match_under_the_same_name() -> None:
    cluster = make_cluster()
    name = cache_namespace(tenant_salt=b"a")
    serve(cluster, prompt(41), namespace=name)
    again = serve(cluster, [*prompt(41), 5, 6, 7, 8], namespace=name)
    assert stats(again).decode_prefix_len == stats(again).prefill_prefix_len == 40


def turns() -> Iterator[list[int]]:
    for first in range(3):
        for length in (1, 3, 4, 5, 17, 40, 41):
            yield prompt(length, first)


@pytest.mark.parametrize("local", [0, 4])
@pytest.mark.behaviour("15")
def test_cached_tokens_never_exceed_the_prompt(local: int) -> None:
    cluster = make_cluster(decode={"local_prefill_tokens": local})
    for tokens in [*turns(), *turns()]:
        answer = serve(cluster, tokens)
        assert 0 <= stats(answer).cached_tokens < len(tokens)


@pytest.mark.behaviour("16", "C1")
def test_the_delta_lands_behind_the_prefix() -> None:
    """The executor checks every position of every page that a row reads."""
    cluster = make_cluster(page_size=16, prefill_pages=40, decode_pages=40)
    serve(cluster, prompt(32))
    assert stats(serve(cluster, prompt(102))).decode_prefix_len == 32


@pytest.mark.behaviour("C4")
def test_a_prompt_of_whole_pages_and_one_token_needs_no_block_that_prefill_lacks() -> None:
    cluster = make_cluster()
    assert pages_moved(cluster, serve(cluster, prompt(17))) == 4


@pytest.mark.behaviour("32", "M1")
def test_warm_up_requests_are_never_cached_not_even_while_they_run() -> None:
    cluster = make_cluster()
    warm_up = submit(cluster, prompt(41), 8, cacheable=False)
    cluster.run_for(0.02)
    real = submit(cluster, prompt(41), 8)
    cluster.finish()
    assert_right(warm_up, real)
    assert stats(real).decode_prefix_len == 0
    again = serve(cluster, prompt(41), 8, cacheable=False)
    assert stats(again).decode_prefix_len == 0
    settle(cluster)
    assert pages(cluster).cached == (41 + 8 - 1) // 4


@pytest.mark.behaviour("62")
def test_output_is_the_same_with_the_cache_without_it_and_without_prefill_workers() -> None:
    split, unified = make_cluster(), make_cluster(num_prefill=0)
    local = make_cluster(decode={"local_prefill_tokens": 4})
    for tokens in [*turns(), *turns()]:
        answers = [serve(cluster, tokens, 6).tokens for cluster in (split, unified, local)]
        answers.append(serve(split, tokens, 6, cacheable=False).tokens)
        assert answers.count(answers[0]) == 4
    for cluster in (split, unified, local):
        settle(cluster)
    assert "calls" in split.load("prefill-0")


@pytest.mark.behaviour("C11")
def test_both_sides_remember_a_prompt_and_count_its_hits_once() -> None:
    cluster = make_cluster(num_decode=2)
    for choice in range(3):
        serve(cluster, prompt(200), 1, ref=ChoiceRef(f"x{choice}"))
    load = cluster.load("prefill-0")
    assert load["hit_tokens"] <= load["prompt_tokens"]
    assert load["tokens_computed"] + load["hit_tokens"] == load["prompt_tokens"]
    cluster.kill("decode-0")
    cluster.kill("decode-1")
    cluster.run_for(0.2)
    cluster.restart("decode-0")
    cluster.run_for(1.0)
    cold = serve(cluster, prompt(200), 1)
    assert stats(cold).decode_prefix_len == 0
    assert stats(cold).prefill_prefix_len >= 0.95 * 196
