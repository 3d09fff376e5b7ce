"""One request: when its tokens arrived, and what each kind of server says."""

import asyncio

import pytest

from headstart.bench.api_backends import OpenAICompletions, SGLangGenerate
from headstart.bench.client import Client, _with_waits
from headstart.bench.sse import EventParser
from tests.support.bench_targets import Script, VirtualTime, events, token, usage

DONE = b"[DONE]"


def asked(*reads, backend=None):
    time = VirtualTime(0.0)
    client = Client(Script(time, *reads), backend or OpenAICompletions("m", True), time)
    return asyncio.run(client.generate([1, 2, 3], 3))


def test_events_come_whole_out_of_bytes_cut_anywhere():
    data = events({"a": 1}, {"b": "é"}, DONE).replace(b"\n", b"\r\n") + b": a comment\n\n"
    for cut in range(len(data)):
        parser = EventParser()
        assert [*parser.feed(data[:cut]), *parser.feed(data[cut:])] == [b'{"a": 1}', b'{"b": "\\u00e9"}', DONE]


def test_each_read_with_tokens_is_an_arrival_at_its_time():
    answer = asked(
        (0.5, events(token(7)), True), (0.1, events(token(8)), True), (0.2, events(token(9), usage(3, 3), DONE), True)
    )
    assert [(round(a.at_s, 3), a.num_tokens) for a in answer.arrivals] == [(0.5, 1), (0.6, 1), (0.8, 1)]
    assert answer.token_ids == (7, 8, 9)
    assert answer.usage.completion_tokens == 3
    assert answer.error == ""


def test_tokens_of_one_read_are_one_arrival_even_if_handed_out_piece_by_piece():
    answer = asked((0.5, events(token(7), token(8)), True), (0.001, events(token(9)), False), (0, events(DONE), False))
    assert [(a.at_s, a.num_tokens) for a in answer.arrivals] == [(0.5, 3)]


def test_an_event_cut_in_two_arrives_when_it_is_complete():
    data = events(token(7))
    answer = asked((0.5, data[:20], True), (0.5, data[20:] + events(DONE), True))
    assert [a.at_s for a in answer.arrivals] == [1.0]


def test_chunks_without_a_turn_of_the_event_loop_count_as_one_read():
    async def chunks():
        yield b"a"
        yield b"b"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        yield b"c"

    async def go():
        return [(read.data, read.waited) async for read in _with_waits(chunks())]

    assert asyncio.run(go()) == [(b"a", True), (b"b", False), (b"c", True)]


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (((0.1, events(token(7)), True),), "without"),
        (((0.1, events({"error": {"message": "deadline"}}, DONE), True),), "deadline"),
        (((0.1, b"data: {not json\n\n", True),), "Expecting"),
    ],
)
def test_an_answer_that_breaks_off_says_why(reads, reason):
    assert reason in asked(*reads).error


def test_a_server_without_token_ids_counts_an_event_with_text_as_a_token():
    body = {"choices": [{"index": 0, "text": "x"}]}
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    answer = asked((0.1, events(body), True), (0.1, events(body), True), (0.1, events(end, DONE), True))
    assert sum(a.num_tokens for a in answer.arrivals) == 2
    assert answer.token_ids == ()


def test_our_usage_is_read_whole():
    answer = asked((0.1, events(token(7), usage(30, 1, cached=16, decode_prefix_len=20, bytes_moved=400), DONE), True))
    said = answer.usage
    assert (said.prompt_tokens, said.cached_tokens, said.decode_prefix_len, said.bytes_moved) == (30, 16, 20, 400)


def test_the_two_apis_are_asked_for_equal_work():
    completions = OpenAICompletions("m", True).body([1, 2], 5)
    assert completions["ignore_eos"] is True
    assert (completions["max_tokens"], completions["prompt"], completions["return_token_ids"]) == (5, [1, 2], True)
    assert "return_token_ids" not in OpenAICompletions("m", False).body([1], 5)
    generate = SGLangGenerate().body([1, 2], 5)
    assert generate["input_ids"] == [1, 2]
    assert generate["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    assert SGLangGenerate().body("hi", 5)["text"] == "hi"


@pytest.mark.parametrize("cumulative", [True, False])
def test_generate_streams_cumulative_text_and_ids_of_either_kind(cumulative):
    def chunk(total, text, ids):
        meta = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 2}
        return events({"text": text, "output_ids": ids, "meta_info": meta})

    ids = [[5], [5, 6, 7]] if cumulative else [[5], [6, 7]]
    answer = asked(
        (0.1, chunk(1, "a", ids[0]), True),
        (0.1, chunk(3, "abc", ids[1]), True),
        (0, events(DONE), False),
        backend=SGLangGenerate(),
    )
    assert [a.num_tokens for a in answer.arrivals] == [1, 2]
    assert answer.token_ids == (5, 6, 7)
    assert answer.text == "abc"
    assert (answer.usage.completion_tokens, answer.usage.cached_tokens) == (3, 2)
