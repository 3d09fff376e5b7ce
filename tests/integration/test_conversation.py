"""Turn two moves only the delta: what the decode worker finds, and what it fetches, to the page and to the byte."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import pytest
from cluster import DEMO, Cluster

NUM_TURNS = 6


def talk(cluster: Cluster, rng: Random, first: int, reply: int, then: int) -> list[dict]:
    """A conversation as token ids: `first` tokens, then each answer of `reply` tokens and `then` new ones."""
    prompt = [rng.randrange(100, 40_000) for _ in range(first)]
    turns = []
    for _ in range(NUM_TURNS):
        answer = cluster.complete(prompt, reply)
        output = answer["choices"][0]["token_ids"]
        turns.append({"prompt_len": len(prompt), "output_len": len(output), **answer["usage"]})
        prompt = prompt + output + [rng.randrange(100, 40_000) for _ in range(then)]
    return turns


def expected_prefix_len(previous: dict, page_size: int) -> int:
    """Every whole page of the previous turn's prompt and output, whose last token's KV was never computed."""
    return page_size * ((previous["prompt_len"] + previous["output_len"] - 1) // page_size)


def delta_pages(turn: dict, prefix_len: int, page_size: int) -> int:
    return -(-(turn["prompt_len"] - 1 - prefix_len) // page_size)


@pytest.mark.behaviour("7")
def test_six_turns_move_exactly_the_whole_pages_of_each_delta(remote: Cluster) -> None:
    page_size = remote.page_size
    turns = talk(remote, Random(1), first=100, reply=21, then=40)
    assert turns[0]["headstart"]["decode_prefix_len"] == 0
    assert turns[0]["headstart"]["bytes_moved"] == delta_pages(turns[0], 0, page_size) * remote.page_bytes
    for previous, turn in pairwise(turns):
        prefix_len = expected_prefix_len(previous, page_size)
        assert turn["headstart"]["decode_prefix_len"] == prefix_len
        assert turn["headstart"]["bytes_moved"] == delta_pages(turn, prefix_len, page_size) * remote.page_bytes


def test_with_default_settings_a_short_delta_is_found_the_same_and_moves_nothing(demo: Cluster) -> None:
    page_size = demo.page_size
    turns = talk(demo, Random(2), first=60, reply=14, then=2)
    for previous, turn in pairwise(turns):
        prefix_len = expected_prefix_len(previous, page_size)
        assert turn["headstart"]["decode_prefix_len"] == prefix_len
        assert turn["headstart"]["bytes_moved"] == (
            0 if turn["prompt_len"] - 1 - prefix_len <= page_size else delta_pages(turn, prefix_len, page_size)
        )


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.behaviour("3")
def test_a_repeated_prompt_moves_no_page_and_calls_no_prefill_worker(remote: Cluster, extra: int) -> None:
    """A prompt of k pages and one token hits all k; of exactly k pages, k - 1, and the rest is one page's delta."""
    page_size = remote.page_size
    rng = Random(10 + extra)
    prompt = [rng.randrange(100, 40_000) for _ in range(4 * page_size + extra)]
    remote.complete(prompt, 4)
    calls = remote.total("prefill-0", "calls")
    again = remote.complete(prompt, 4)["usage"]["headstart"]
    assert again["decode_prefix_len"] == (len(prompt) - 1) // page_size * page_size
    if extra:
        assert again["bytes_moved"] == 0
        assert remote.total("prefill-0", "calls") == calls
    else:
        assert again["bytes_moved"] == remote.page_bytes


def test_a_repeated_prompt_calls_no_prefill_worker_with_default_settings(demo: Cluster) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    demo.complete(prompt, 8)
    calls = demo.total("prefill-0", "calls")
    again = demo.complete(prompt, 8)["usage"]["headstart"]
    assert again["bytes_moved"] == 0
    assert again["decode_prefix_len"] > 0
    assert demo.total("prefill-0", "calls") == calls


@pytest.mark.full
@pytest.mark.behaviour("7")
def test_twenty_chats_at_temperature_one_find_all_of_their_last_turn_through_the_token_memory(demo: Cluster) -> None:
    """Text goes out and comes back: without the exact ids behind it, some answers would be read as other tokens."""
    with ThreadPoolExecutor(8) as pool:
        chats = list(pool.map(lambda seed: chat(demo, seed), range(20)))
    for turns in chats:
        for previous, turn in pairwise(turns):
            known = previous["prompt_tokens"] + previous["completion_tokens"] - 1
            assert turn["headstart"]["decode_prefix_len"] == known // demo.page_size * demo.page_size


def chat(cluster: Cluster, seed: int) -> list[dict]:
    """Six turns of text; the usage of each."""
    subjects = ["lighthouses", "bread", "volcanoes", "chess", "rivers", "clouds", "glass", "bees", "maps", "bridges"]
    questions = [
        "Tell me about",
        "What is hard about",
        "Why do people like",
        "Write a line on",
        "Who studies",
        "Sum up",
    ]
    messages: list[dict] = []
    turns = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"{questions[turn]} {subjects[(seed + turn) % len(subjects)]}."})
        body = {"model": DEMO, "messages": messages, "temperature": 1.0, "seed": seed, "max_tokens": 16}
        answer = cluster.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        turns.append(answer["usage"])
    return turns
