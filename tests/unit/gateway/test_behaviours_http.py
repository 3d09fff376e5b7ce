"""Listed behaviours and failure cases as an HTTP client sees them: health, ends at the first token, logprobs, metrics."""

import asyncio
import json

import pytest

from headstart.core.errors import ErrorCode
from tests.support.scripted_gateway import Script, ScriptedWorld, chat_body, completion_body, run, saying
from tests.support.small_tokenizers import END, byte_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CODES = (
    ErrorCode.INVALID,
    ErrorCode.TOO_LONG,
    ErrorCode.BUSY,
    ErrorCode.UNAVAILABLE,
    ErrorCode.DEADLINE,
    ErrorCode.MISMATCH,
    ErrorCode.WORKER_LOST,
    ErrorCode.INTERNAL,
)


def events_of(reply):
    return [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]


async def complete(http, stream, **fields):
    """(text, last choice, usage) of a completion, however it is sent."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await http.post(COMPLETIONS, json=completion_body(**fields) | options)
    assert reply.status_code == 200, reply.text
    if not stream:
        (choice,) = reply.json()["choices"]
        return choice["text"], choice, reply.json()["usage"]
    events = events_of(reply)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1], chunks[-1]["usage"]


async def until(claim):
    while not claim():
        await asyncio.sleep(0)


def first_two_tokens(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode(ids[:1]), tokenizer.decode(ids[1:2])


# ---- health and format ------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("33")
def test_health_answers_while_every_place_is_taken_and_takes_none():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            held = [asyncio.create_task(http.post(CHAT, json=chat_body())) for _ in range(8)]
            await until(lambda: len(world.requests) == 8)
            await until(lambda: all(choice.tokens for choice in world.dispatcher.iter_choices()))
            for _ in range(20):
                assert (await http.get("/health")).status_code == 200
                assert (await http.get("/ready")).status_code == 200
            assert world.dispatcher.num_unfinished == 8
            for request in world.requests:
                world.say_finished(request)
            await asyncio.gather(*held)
        assert len(world.requests) == 8
        assert world.dispatcher.num_unfinished == 0

    run(go())


@pytest.mark.behaviour("M2")
def test_health_is_bad_once_every_decode_worker_is_wedged_although_it_beats():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            assert (await http.get("/health")).status_code == 200
            world.loop_age_s = 31.0
            await until(lambda: not any(record.may_return for record in world.dispatcher.registry.of_role("decode")))
            assert (await http.get("/health")).status_code == 503

    run(go())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.behaviour("54")
def test_a_stream_adds_up_to_the_whole_answer_and_ends_with_one_done(path):
    async def go():
        world = ScriptedWorld()
        world.script = saying("The quick brown fox 🦊 jumps.")
        body = chat_body(return_token_ids=True) if path == CHAT else completion_body(return_token_ids=True)
        async with world.client() as http:
            whole = (await http.post(path, json=body)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = events_of(await http.post(path, json=body | options))
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        chunks = [json.loads(event) for event in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
        assert ids == whole["choices"][0]["token_ids"]
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(ids)
        text = "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)
        first = whole["choices"][0]
        assert text == (first["message"]["content"] if path == CHAT else first["text"])
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]

    run(go())


# ---- where a choice ends ---------------------------------------------------------------------------------------------


@STREAM
@pytest.mark.parametrize("wanted", [1, 2, 3])
@pytest.mark.behaviour("I1")
def test_exactly_as_many_tokens_as_asked_whole_and_streamed(stream, wanted):
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            _, choice, usage = await complete(http, stream, max_tokens=wanted)
        assert usage["completion_tokens"] == wanted
        assert choice["finish_reason"] == "length"

    run(go())


@STREAM
@pytest.mark.parametrize("by", ["eos", "stop id", "stop string"])
@pytest.mark.behaviour("I2")
def test_a_choice_may_end_at_its_first_token(stream, by):
    async def go():
        world = ScriptedWorld()
        ids = byte_level().encode("Hello world.", add_special_tokens=False)
        world.script = Script([], ends_with_eos=True) if by == "eos" else Script(ids)
        first, _ = first_two_tokens("Hello world.")
        asked = {"eos": {}, "stop id": {"stop_token_ids": [ids[0]]}, "stop string": {"stop": first}}[by]
        if by == "stop id":
            world.script = Script(ids[:1], ends_with_eos=False)
        async with world.client() as http:
            text, choice, usage = await complete(http, stream, **asked)
        assert (text, choice["finish_reason"], usage["completion_tokens"]) == ("", "stop", 1)
        assert choice.get("stop_reason") == {"eos": None, "stop id": ids[0], "stop string": first}[by]
        assert bool(world.cancelled) == (by == "stop string")
        assert world.dispatcher.num_unfinished == 0

    run(go())


@STREAM
@pytest.mark.behaviour("I3")
def test_ignored_eos_never_ends_a_choice(stream):
    async def go():
        world = ScriptedWorld()
        world.script = lambda request: Script([END] * 5 if END not in request.stop.stop_token_ids else [])
        async with world.client() as http:
            _, choice, usage = await complete(http, stream, ignore_eos=True, max_tokens=5)
        assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 5)

    run(go())


@STREAM
@pytest.mark.behaviour("I11")
def test_a_stop_string_that_begins_in_the_first_token_and_ends_in_the_second(stream):
    async def go():
        first, second = first_two_tokens("Hello world.")
        stop = first[-1:] + second[:1]
        world = ScriptedWorld()
        async with world.client() as http:
            text, choice, usage = await complete(http, stream, stop=[stop])
        assert text == first[:-1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert usage["completion_tokens"] == 2

    run(go())


@STREAM
@pytest.mark.parametrize("stop", ["🦊", "!🦊", "🦊?"])
@pytest.mark.behaviour("I11")
def test_a_stop_string_over_the_bytes_of_one_character(stream, stop):
    async def go():
        world = ScriptedWorld()
        world.script = saying("é!🦊? end")
        async with world.client() as http:
            text, _, _ = await complete(http, stream, stop=[stop])
        assert text == "é!🦊? end".partition(stop)[0]

    run(go())


@STREAM
@pytest.mark.behaviour("I11")
def test_a_character_that_never_gets_all_its_bytes_is_shown_once_at_the_end(stream):
    async def go():
        world = ScriptedWorld()
        fox = byte_level().encode("🦊", add_special_tokens=False)
        assert len(fox) > 1
        world.script = Script(fox[:-1])
        async with world.client() as http:
            text, _, usage = await complete(http, stream, max_tokens=len(fox) - 1)
        assert set(text) == {"\ufffd"}
        assert usage["completion_tokens"] == len(fox) - 1

    run(go())


# ---- logprobs --------------------------------------------------------------------------------------------------------


@STREAM
@pytest.mark.behaviour("55", "I4")
def test_every_token_has_its_logprob_also_when_several_make_one_character(stream):
    async def go():
        world = ScriptedWorld()
        world.script = saying("a 🦊 b")
        body = completion_body(logprobs=2, **({"stream": True} if stream else {}))
        async with world.client() as http:
            reply = await http.post(COMPLETIONS, json=body)
        if stream:
            choices = [choice for event in events_of(reply)[:-1] for choice in json.loads(event)["choices"]]
        else:
            choices = reply.json()["choices"]
        logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        num_tokens = len(byte_level().encode("a 🦊 b", add_special_tokens=False)) + 1
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum(len(part[name]) for part in logprobs) == num_tokens

    run(go())


@pytest.mark.parametrize("num_top", [21, 129, 10**9])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.behaviour("56", "I4")
def test_more_alternatives_than_there_is_room_for_are_a_400_and_no_crash(path, num_top):
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            body = chat_body(logprobs=True, top_logprobs=num_top) if path == CHAT else completion_body(logprobs=num_top)
            assert (await http.post(path, json=body)).status_code == 400
            assert (await http.post(path, json=chat_body() if path == CHAT else completion_body())).status_code == 200
        assert len(world.requests) == 1

    run(go())


# ---- what is not built -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("best_of", 4),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("structured_outputs", {"json": {}}),
        ("guided_regex", "a+"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "root ::= 'a'"),
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("ebnf", "root ::= 'a'"),
        ("lora_path", "adapter"),
        ("input_logprobs", True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.behaviour("57", "I4", "I6", "I7", "K2")
def test_beams_grammars_adapters_and_prompt_logprobs_are_refused(path, field, value):
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            body = chat_body() if path == CHAT else completion_body()
            reply = await http.post(path, json=body | {field: value})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
        assert world.requests == []

    run(go())


# ---- failures --------------------------------------------------------------------------------------------------------


def outcomes(metrics):
    """outcome -> choices, over both endpoints."""
    counts = {}
    for line in metrics.splitlines():
        if line.startswith("headstart_requests_total"):
            outcome = line.partition('outcome="')[2].partition('"')[0]
            counts[outcome] = counts.get(outcome, 0) + int(float(line.rsplit(" ", 1)[1]))
    return counts


@pytest.mark.behaviour("M6")
def test_every_way_to_fail_is_counted_and_none_fails_in_the_counting():
    async def go():
        world = ScriptedWorld()
        sent = 0
        async with world.client() as http:
            for code in CODES:
                for stream in (False, True):
                    world.script = Script(reject=code)
                    reply = await http.post(CHAT, json=chat_body(stream=stream))
                    assert reply.status_code >= 400
                    assert reply.json()["error"]["message"]
                    sent += 1
            for endpoint, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
                for stream in (False, True):
                    world.script = saying("Hello world.", fail_after=1)
                    failed = await http.post(endpoint, json=body(stream=stream))
                    assert failed.status_code == (200 if stream else 500)
                    assert '"error"' in failed.text
                    world.script = saying("Hello world.", hold_after=1)
                    late = await http.post(endpoint, json=body(stream=stream, deadline_s=0.5))
                    assert late.status_code == (200 if stream else 504)
                    sent += 2
            for content in (b"{", b"[]", json.dumps(chat_body(temperature=-1)).encode()):
                assert (await http.post(CHAT, content=content)).status_code == 400
            assert (await http.post(CHAT, json=chat_body(model="other"))).status_code == 404
            assert (await http.get("/nowhere")).status_code == 404
            world.script = saying("Hello world.")
            assert (await http.post(CHAT, json=chat_body())).status_code == 200
            reply = await http.get("/metrics")
        assert reply.status_code == 200
        counts = outcomes(reply.text)
        assert sum(counts.values()) == sent + 1
        assert {code.value for code in CODES} <= set(counts)
        assert (counts["stop"], counts["internal"], counts["deadline"]) == (1, 2 + 4, 2 + 4)
        assert "headstart_unfinished_requests 0.0" in reply.text

    run(go())


@pytest.mark.behaviour("I9")
def test_a_stream_that_fails_ends_with_its_error_and_nothing_after_it():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world.", fail_after=1)
        async with world.client() as http:
            for path, body in ((CHAT, chat_body(stream=True)), (COMPLETIONS, completion_body(stream=True))):
                events = events_of(await http.post(path, json=body))
                assert "error" in json.loads(events[-1])
                chunks = [json.loads(event) for event in events[:-1]]
                assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])

    run(go())


@pytest.mark.behaviour("64")
def test_the_metrics_add_up_to_what_the_answers_say_was_moved():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            body = completion_body([5] * 40)
            replies = [(await http.post(COMPLETIONS, json=body)).json() for _ in range(3)]
            metrics = (await http.get("/metrics")).text
        moved = sum(reply["usage"]["headstart"]["bytes_moved"] for reply in replies)
        cached = sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)
        assert moved > 0
        assert f"headstart_bytes_moved_total {moved}.0" in metrics
        assert f"headstart_cached_tokens_total {cached}.0" in metrics

    run(go())
