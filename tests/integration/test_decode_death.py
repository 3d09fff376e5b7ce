"""Decode workers die under streams of every kind, and each goes on with the bytes of an undisturbed run."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random

import pytest
from cluster import PAIRS_FLAGS, PATIENCE_S, START_S, Cluster, Worker, running, until
from load import Ask, Heard, greedy, listen, some

pytestmark = pytest.mark.full
NUM_NEW = 150
STRUCK_AT = 20
"""Tokens that each stream has brought when the worker dies."""
SAMPLED = {"temperature": 0.03, "top_p": 0.95}
"""Random weights spread their probability evenly over the vocabulary. So cold, a few dozen tokens have nearly all of it;
else the last bit of a sum decides which of two neighbours is drawn."""
KINDS = {
    "greedy, two choices": {"n": 2, "temperature": 0},
    "seeded, three choices": {"n": 3, "seed": 7, **SAMPLED},
    "penalties": {"seed": 11, "presence_penalty": 0.6, "frequency_penalty": 0.4, **SAMPLED},
    "penalties, greedy, two choices": {"n": 2, "temperature": 0, "frequency_penalty": 0.5},
    "stop string": {"seed": 13, "stop": [], "frequency_penalty": 0.3, **SAMPLED},
    "stop string, two choices": {"n": 2, "seed": 17, "stop": [], "presence_penalty": 0.3, **SAMPLED},
}
Streams = dict[str, Future[Heard]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of its own: a worker that others have killed before is started again after half a minute only."""
    yield from running(tmp_path_factory.mktemp("mortals"), *PAIRS_FLAGS)


@pytest.fixture(scope="module")
def asks(pairs: Cluster) -> dict[str, Ask]:
    """What each kind of request is answered while nothing dies."""
    pairs.wait_for_workers(2, 2)
    rng = Random(90)
    found = {}
    for kind, fields in KINDS.items():
        body = greedy(some(rng, 60), NUM_NEW, **fields)
        if "stop" in fields:
            text = Ask.quietly(pairs, {**body, "stop": None}).quiet["choices"][0]["text"]
            body["stop"] = [late_piece(text)]
        found[kind] = Ask.quietly(pairs, body)
    return found


def late_piece(text: str) -> str:
    """A few characters that the text's second half has and its first has not."""
    pieces = (text[at : at + 5] for at in range(len(text) // 2, len(text) - 5))
    return next(piece for piece in pieces if piece.isprintable() and text.find(piece) >= len(text) // 2)


def start(pool: ThreadPoolExecutor, cluster: Cluster, asks: dict[str, Ask]) -> Streams:
    """Open every stream; returns once each has brought some tokens."""
    running = {kind: threading.Event() for kind in asks}

    def follow(kind: str) -> Heard:
        def on_event(heard: Heard) -> None:
            if all(len(choice.token_ids) >= STRUCK_AT or choice.finish_reason for choice in heard.choices.values()):
                running[kind].set()

        return listen(cluster, asks[kind].body, on_event)

    streams = {kind: pool.submit(follow, kind) for kind in asks}
    for kind, event in running.items():
        assert event.wait(PATIENCE_S), f"{kind}: {streams[kind]}"
    return streams


def start_and_catch(pool: ThreadPoolExecutor, cluster: Cluster, asks: dict[str, Ask]) -> tuple[Streams, Worker]:
    """Streams, and the decode worker that has most of them. Where we were held up they may have ended: then anew."""

    def caught() -> tuple[Streams, Worker] | None:
        streams = start(pool, cluster, asks)
        owner = max(cluster.workers("decode"), key=lambda worker: worker["open_choices"])
        if owner["open_choices"]:
            return streams, owner
        assert wrong_ones(asks, streams) == []
        return None

    streams, owner = until(caught, "streams that are still open")
    return streams, owner


def wrong_ones(asks: dict[str, Ask], streams: Streams) -> list[str]:
    return [
        f"{kind}: {asks[kind].difference(index, choice)}"
        for kind, stream in streams.items()
        for index, choice in stream.result(timeout=120).choices.items()
        if not asks[kind].is_answered_by(index, choice)
    ]


@pytest.mark.behaviour("E18")
def test_streams_of_a_dead_decode_worker_go_on_with_the_same_bytes_on_the_other(
    pairs: Cluster, asks: dict[str, Ask]
) -> None:
    with ThreadPoolExecutor(len(asks)) as pool:
        streams, owner = start_and_catch(pool, pairs, asks)
        pairs.kill(owner["name"])
        assert wrong_ones(asks, streams) == []
    longest = max(stream.result().longest_wait_s for stream in streams.values())
    print(f"\n{owner['open_choices']} choices moved, longest wait for a token {longest:.2f} s")
    pairs.wait_for_workers(2, 2)
    pairs.wait_until_free()


@pytest.mark.behaviour("E7")
def test_streams_go_on_with_the_same_bytes_when_every_decode_worker_died_and_came_back(
    pairs: Cluster, asks: dict[str, Ask]
) -> None:
    prefill = {worker["name"]: worker["incarnation"] for worker in pairs.alive("prefill")}
    with ThreadPoolExecutor(len(asks)) as pool:
        streams, _ = start_and_catch(pool, pairs, asks)
        moved = [pairs.kill(name) for name in ("decode-0", "decode-1")]
        assert wrong_ones(asks, streams) == []
    until(lambda: len(pairs.alive("decode")) == len(moved), "both decode workers back", START_S)
    assert {worker["name"]: worker["incarnation"] for worker in pairs.alive("prefill")} == prefill
    pairs.wait_until_free()
