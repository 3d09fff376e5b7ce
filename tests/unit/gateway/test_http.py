"""The OpenAI API as its own client and plain HTTP see it."""

import asyncio
import json

import openai
import pytest
from text.small import END, byte_level

from headstart.core.errors import ErrorCode
from tests.unit.steady import PATIENCE_S

from .scripted import MODEL, STATS, Script, ScriptedWorld, chat_body, completion_body, run, saying


def openai_client(http, key="none"):
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, http_client=http, max_retries=0)


def sse_events(text):
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_the_openai_client_chats():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            answer = await openai_client(http).chat.completions.create(**chat_body())
        assert answer.choices[0].message.content == "Hello world."
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(world.requests[0].prompt)
        assert answer.usage.completion_tokens == len(byte_level().encode("Hello world.")) + 1
        assert answer.usage.prompt_tokens_details.cached_tokens == STATS.cached_tokens
        assert answer.usage.headstart["decode_prefix_len"] == 16
        assert answer.usage.headstart["bytes_moved"] == 4096
        assert answer.usage.headstart["miss_reason"] == "diverged"

    run(go())


def test_the_openai_client_streams_a_chat_with_usage():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            stream = await openai_client(http).chat.completions.create(
                **chat_body(stream=True, stream_options={"include_usage": True})
            )
            chunks = [chunk async for chunk in stream]
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == "Hello world."
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens > 2
        assert all(chunk.usage is None for chunk in chunks[:-1])

    run(go())


def test_the_openai_client_completes_and_streams_a_completion():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            client = openai_client(http)
            whole = await client.completions.create(**completion_body())
            stream = await client.completions.create(**completion_body(stream=True))
            pieces = [chunk.choices[0].text async for chunk in stream]
        assert whole.choices[0].text == "Hello world." == "".join(pieces)

    run(go())


def test_the_openai_client_lists_models():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            client = openai_client(http)
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL

    run(go())


def test_max_tokens_of_one_gives_one_token_and_length():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            for wanted in (1, 2, 3):
                reply = (await http.post("/v1/chat/completions", json=chat_body(max_tokens=wanted))).json()
                assert reply["usage"]["completion_tokens"] == wanted
                assert reply["choices"][0]["finish_reason"] == "length"

    run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_text_before_it(stream):
    async def go():
        world = ScriptedWorld()
        world.script = saying("One two STOP three four")
        async with world.client() as http:
            body = chat_body(
                stop=["xyz", "STOP"], stream=stream, stream_options={"include_usage": True} if stream else None
            )
            reply = await http.post("/v1/chat/completions", json=body)
        if stream:
            events = [json.loads(event) for event in sse_events(reply.text)[:-1]]
            choices = [choice for event in events for choice in event["choices"]]
            text, end = "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]
            usage = events[-1]["usage"]
        else:
            (end,) = reply.json()["choices"]
            text, usage = end["message"]["content"], reply.json()["usage"]
        assert text == "One two "
        assert end["finish_reason"] == "stop"
        assert end["stop_reason"] == "STOP"
        assert usage["completion_tokens"] == len(byte_level().encode("One two STOP"))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16  # the worker's account came with its last word
        assert world.dispatcher.num_unfinished == 0
        assert world.cancelled

    run(go())


def test_stop_token_ids_and_ignore_eos_travel_to_the_worker():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            await http.post("/v1/completions", json=completion_body(stop_token_ids=[50], min_tokens=3))
            await http.post("/v1/completions", json=completion_body(ignore_eos=True, stop_token_ids=[50]))
        first, second = world.requests
        assert set(first.stop.stop_token_ids) == {END, 50}
        assert first.stop.min_new_tokens == 3
        assert set(second.stop.stop_token_ids) == {50}

    run(go())


def test_the_text_of_a_stop_token_is_not_shown_but_billed():
    async def go():
        world = ScriptedWorld()
        dot = byte_level().encode(".")[0]
        world.script = Script([*byte_level().encode("fox"), dot], ends_with_eos=False)
        async with world.client() as http:
            reply = (await http.post("/v1/completions", json=completion_body(stop_token_ids=[dot]))).json()
        assert reply["choices"][0]["text"] == "fox"
        assert reply["choices"][0]["stop_reason"] == dot
        assert reply["usage"]["completion_tokens"] == len(byte_level().encode("fox")) + 1

    run(go())


def test_several_choices_come_numbered_and_are_submitted_together():
    async def go():
        world = ScriptedWorld()
        world.script = lambda request: saying(f"choice {request.ref.choice}")
        async with world.client() as http:
            reply = (await http.post("/v1/chat/completions", json=chat_body(n=3, seed=5))).json()
            stream = await http.post("/v1/chat/completions", json=chat_body(n=3, stream=True))
        assert [choice["message"]["content"] for choice in reply["choices"]] == ["choice 0", "choice 1", "choice 2"]
        assert len({request.ref.request_id for request in world.requests[:3]}) == 1
        assert {request.sampling.seed for request in world.requests[:3]} == {5}
        assert reply["usage"]["prompt_tokens"] == len(world.requests[0].prompt)
        texts = {0: "", 1: "", 2: ""}
        for event in sse_events(stream.text)[:-1]:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == {0: "choice 0", 1: "choice 1", 2: "choice 2"}

    run(go())


def test_a_list_of_prompts_is_answered_in_order():
    async def go():
        world = ScriptedWorld()
        world.script = lambda request: Script(list(request.prompt))
        async with world.client() as http:
            body = completion_body(["ab", "fox"], n=2)
            reply = (await http.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in reply["choices"]] == ["ab", "ab", "fox", "fox"]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]

    run(go())


def test_token_ids_go_in_and_come_back_exactly():
    async def go():
        world = ScriptedWorld()
        world.script = Script([10, 300, 11], ends_with_eos=True)
        async with world.client() as http:
            body = completion_body([5, 6, 7], return_token_ids=True)
            reply = (await http.post("/v1/completions", json=body)).json()
            stream = await http.post("/v1/completions", json=body | {"stream": True})
        assert list(world.requests[0].prompt) == [5, 6, 7]
        assert reply["choices"][0]["token_ids"] == [10, 300, 11, END]
        assert reply["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        choices = [json.loads(event)["choices"][0] for event in sse_events(stream.text)[:-1]]
        assert [i for choice in choices for i in choice.get("token_ids", [])] == [10, 300, 11, END]
        assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [[5, 6, 7]]

    run(go())


def test_logprobs_have_one_entry_a_token_in_both_shapes_but_none_for_a_chats_end_token():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            client = openai_client(http)
            chat = await client.chat.completions.create(**chat_body(logprobs=True, top_logprobs=3))
            plain = await client.completions.create(**completion_body(logprobs=2))
            none = await client.completions.create(**completion_body(logprobs=0))
        content = chat.choices[0].logprobs.content
        assert len(content) == chat.usage.completion_tokens - 1
        assert [len(entry.top_logprobs) for entry in content] == [3] * len(content)
        assert b"".join(bytes(entry.bytes) for entry in content) == b"Hello world."
        logprobs = plain.choices[0].logprobs
        assert (
            len(logprobs.tokens)
            == len(logprobs.token_logprobs)
            == len(logprobs.text_offset)
            == plain.usage.completion_tokens
        )
        assert logprobs.token_logprobs[0] == -0.5
        assert logprobs.text_offset[1] == len(logprobs.tokens[0])
        assert len(none.choices[0].logprobs.top_logprobs) == none.usage.completion_tokens

    run(go())


def test_a_character_over_several_tokens_is_streamed_whole():
    async def go():
        world = ScriptedWorld()
        world.script = saying("🦊 and 你好")
        async with world.client() as http:
            reply = await http.post("/v1/chat/completions", json=chat_body(stream=True))
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in sse_events(reply.text)[:-1]]
        assert "".join(deltas) == "🦊 and 你好"
        assert not any("\ufffd" in delta for delta in deltas)

    run(go())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID, 400),
        (ErrorCode.TOO_LONG, 400),
        (ErrorCode.BUSY, 429),
        (ErrorCode.UNAVAILABLE, 503),
        (ErrorCode.DEADLINE, 504),
        (ErrorCode.MISMATCH, 503),
        (ErrorCode.INTERNAL, 500),
    ],
)
def test_a_refusal_before_the_first_byte_has_its_own_status_also_for_streams(code, status, stream):
    async def go():
        world = ScriptedWorld()
        world.script = Script(reject=code)
        async with world.client() as http:
            reply = await http.post("/v1/chat/completions", json=chat_body(stream=stream))
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert world.dispatcher.num_unfinished == 0

    run(go())


def test_a_failure_in_mid_stream_is_an_error_event_that_leaks_nothing_and_the_stream_ends():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world.", fail_after=2)
        async with world.client() as http:
            reply = await http.post("/v1/chat/completions", json=chat_body(stream=True))
            assert reply.status_code == 200
            events = sse_events(reply.text)
            assert set(json.loads(events[-1])["error"]) == {"message", "type", "param", "code"}
            assert "secret" not in reply.text
            with pytest.raises(openai.APIError):
                async for _ in await openai_client(http).chat.completions.create(**chat_body(stream=True)):
                    pass
            whole = await http.post("/v1/chat/completions", json=chat_body())
            assert whole.status_code == 500
            assert "secret" not in whole.text
            metrics = (await http.get("/metrics")).text
        assert 'outcome="internal"' in metrics

    run(go())


def test_one_failing_choice_fails_the_request_once_and_cancels_its_siblings():
    async def go():
        world = ScriptedWorld()
        world.script = lambda request: saying(
            "Hello world.", **({"fail_after": 1} if request.ref.choice == 2 else {"hold_after": 1})
        )
        async with world.client() as http:
            reply = await http.post("/v1/chat/completions", json=chat_body(n=4))
        assert reply.status_code == 500
        assert world.dispatcher.num_unfinished == 0
        assert {cancel.ref.choice for cancel in world.cancelled} == {0, 1, 3}

    run(go())


def test_the_deadline_ends_a_request_with_504_and_in_mid_stream_with_an_event():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world.", hold_after=0)
        async with world.client() as http:
            silent = await http.post("/v1/chat/completions", json=chat_body(deadline_s=0.1))
            world.script = saying("Hello world.", hold_after=2)
            started = await http.post("/v1/chat/completions", json=chat_body(deadline_s=0.1, stream=True))
        assert silent.status_code == 504
        assert json.loads(sse_events(started.text)[-1])["error"]["code"] == "deadline"
        assert world.dispatcher.num_unfinished == 0

    run(go())


async def call_and_leave(world, body, leave_when):
    """Speak ASGI by hand: send `body`, hang up once `leave_when()`; returns what was sent back."""
    sent, asked = [], False

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not leave_when(sent):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("gateway", 80),
        "client": ("here", 1),
    }
    await asyncio.wait_for(world.app(scope, receive, send), PATIENCE_S)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_client_that_leaves_cancels_its_choices(stream, tokens):
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world, how are you?", hold_after=tokens)

        def seen(_):
            return len(world.requests) == 2 and all(len(c.tokens) == tokens for c in world.dispatcher.iter_choices())

        await call_and_leave(world, chat_body(stream=stream, n=2), seen)
        assert world.dispatcher.num_unfinished == 0
        assert len(world.cancelled) == 2
        assert not world.state.generations.open

    run(go())


def test_a_client_that_does_not_read_is_cancelled_at_a_bounded_buffer():
    async def go():
        from headstart.gateway.state import HttpLimits

        world = ScriptedWorld(limits=HttpLimits(max_buffered_events=8))
        world.script = Script(list(byte_level().encode("a")) * 300, ends_with_eos=False)
        blocked = asyncio.Event()

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body" and len(sent) == 3:
                await blocked.wait()

        sent, asked = [], False

        async def receive():
            nonlocal asked
            if not asked:
                asked = True
                body = json.dumps(chat_body(stream=True, max_tokens=300)).encode()
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "headers": []}
        scope |= {"path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "scheme": "http"}
        serving = asyncio.create_task(world.app(scope, receive, send))
        while not world.cancelled:
            await asyncio.sleep(0)
        assert world.dispatcher.num_unfinished == 0
        blocked.set()
        await asyncio.wait_for(serving, PATIENCE_S)
        assert b"too slowly" in b"".join(message.get("body", b"") for message in sent)

    run(go())


def test_a_key_is_asked_for_and_divides_the_cache_between_tenants():
    async def go():
        world = ScriptedWorld(keys=("alpha", "beta"))
        async with world.client() as http:
            for headers in ({}, {"Authorization": "Bearer gamma"}, {"Authorization": "Basic alpha"}):
                reply = await http.post("/v1/chat/completions", json=chat_body(), headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
                assert (await http.get("/v1/models", headers=headers)).status_code == 401
            assert (await http.get("/health")).status_code == 200
            for key in ("alpha", "beta", "alpha"):
                await openai_client(http, key).chat.completions.create(**chat_body())
            await openai_client(http, "alpha").chat.completions.create(**chat_body(), extra_body={"cache_salt": "x"})
        alpha, beta, again, salted = (request.namespace for request in world.requests)
        assert alpha == again
        assert len({alpha, beta, salted}) == 3

    run(go())


def test_health_and_readiness_follow_the_workers_and_take_no_slot():
    async def go():
        world = ScriptedWorld(with_worker=False)
        async with world.client() as http:
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/ready")).status_code == 503
            assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 503
        world = ScriptedWorld()
        async with world.client() as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            world.state.generations.is_draining = True
            assert (await http.get("/ready")).status_code == 503
            assert (await http.post("/v1/chat/completions", json=chat_body())).status_code == 503
        assert world.requests == []

    run(go())


def test_flush_empties_the_workers_and_is_refused_while_busy():
    async def go():
        world = ScriptedWorld()
        world.script = saying("Hello world.", hold_after=1)
        async with world.client() as http:
            assert (await http.post("/flush_cache")).json() == {"flushed": True, "num_pages": 7}
            assert (await http.get("/flush_cache?timeout=60")).status_code == 200
            running = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
            while not any(choice.tokens for choice in world.dispatcher.iter_choices()):
                await asyncio.sleep(0)
            assert (await http.post("/flush_cache")).status_code == 400
            world.say_finished(world.requests[0])
            await running
        assert world.flushes == 2

    run(go())


def test_the_cluster_and_the_metrics_tell_of_every_worker():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            await http.post("/v1/chat/completions", json=chat_body())
            await asyncio.sleep(0.05)
            cluster = (await http.get("/cluster")).json()
            metrics = (await http.get("/metrics")).text
        (worker,) = cluster["workers"]
        assert (worker["name"], worker["role"], worker["state"]) == ("decode-0", "decode", "alive")
        assert worker["load"]["free_pages"] == 9
        assert cluster["counters"]["finished"] == 1
        assert 'headstart_requests_total{endpoint="chat",outcome="stop"} 1.0' in metrics
        assert 'headstart_dispatch_events_total{event="finished"} 1.0' in metrics
        assert 'headstart_worker_pages{role="decode",state="free",worker="decode-0"} 9.0' in metrics

    run(go())


def test_tokenize_counts_text_and_conversations_alike():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            text = (await http.post("/tokenize", json={"prompt": "the fox"})).json()
            chat = (await http.post("/tokenize", json={"messages": chat_body()["messages"]})).json()
            await http.post("/v1/chat/completions", json=chat_body())
        assert text["tokens"] == byte_level().encode("the fox")
        assert text["count"] == len(text["tokens"])
        assert chat["tokens"] == list(world.requests[0].prompt)

    run(go())


def test_content_may_come_in_text_parts_and_a_developer_speaks_as_system():
    async def go():
        world = ScriptedWorld()
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
        async with world.client() as http:
            body = {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        prompt = byte_level().decode(world.requests[0].prompt.tolist(), skip_special_tokens=False)
        assert prompt == "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"

    run(go())
