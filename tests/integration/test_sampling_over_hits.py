"""Behaviours 55 and 58: where a prompt's KV came from shows in no token and in no logprob, over real processes."""

import math
from random import Random

import pytest
from cluster import Cluster

CLOSE = 2e-2
"""Natural logs of one token under two orders of summation."""


def prompt(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(70)]


@pytest.mark.behaviour("55", "I4")
def test_logprobs_are_as_many_and_the_same_with_and_without_a_hit(remote: Cluster) -> None:
    answers = [remote.complete(prompt(301), 6, logprobs=3) for _ in range(2)]
    cold, hit = (answer["usage"]["headstart"]["decode_prefix_len"] for answer in answers)
    assert (cold, hit) == (0, 64)
    first, second = (answer["choices"][0]["logprobs"] for answer in answers)
    assert len(first["token_logprobs"]) == len(second["token_logprobs"]) == 6
    assert all(len(top) == 3 for logprobs in (first, second) for top in logprobs["top_logprobs"])
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
    pairs = zip(first["token_logprobs"], second["token_logprobs"], strict=True)
    assert all(math.isclose(one, other, abs_tol=CLOSE) for one, other in pairs)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "top_k": 5, "seed": 11},
        {"logit_bias": {"500": 100}},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.behaviour("58")
def test_sampling_is_the_same_after_a_remote_prefill_and_after_a_hit(remote: Cluster, fields: dict) -> None:
    asked = prompt(302 + len(str(fields)))
    cold, hit = (remote.complete(asked, 8, **fields) for _ in range(2))
    assert cold["usage"]["headstart"]["bytes_moved"] > 0
    assert hit["usage"]["headstart"]["decode_prefix_len"] == 64
    assert cold["choices"][0]["token_ids"] == hit["choices"][0]["token_ids"]
    if "logit_bias" in fields:
        assert set(cold["choices"][0]["token_ids"]) == {500}


@pytest.mark.behaviour("58")
def test_lengths_and_stops_hold_after_a_remote_prefill_and_after_a_hit(remote: Cluster) -> None:
    asked = prompt(400)
    free = remote.complete(asked, 8)["choices"][0]["token_ids"]
    stopped = remote.complete(asked, 8, stop_token_ids=free[:1])["choices"][0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (free[:1], "stop")
    longer = remote.complete(asked, 8, stop_token_ids=free[:1], min_tokens=3)["choices"][0]["token_ids"]
    assert len(longer) >= 3
    assert free[0] not in longer[:3]


@pytest.mark.behaviour("64")
def test_bytes_moved_for_requests_are_in_the_metrics(remote: Cluster) -> None:
    def moved() -> float:
        lines = remote.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("headstart_bytes_moved_total "))

    before = moved()
    answer = remote.complete(prompt(500), 2)["usage"]["headstart"]
    assert answer["bytes_moved"] == 5 * remote.page_bytes
    assert moved() - before == answer["bytes_moved"]
