"""Bad input gets a clear 4xx in OpenAI's format that names the field, leaks nothing, and reaches no worker."""

import json

import pytest

from headstart.gateway.api.request_bodies import MAX_MESSAGES
from tests.support.scripted_gateway import CONTEXT, ScriptedWorld, chat_body, completion_body, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(path, **kwargs):
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            reply = await http.post(path, **kwargs)
        return reply, world

    return run(go())


def assert_refused(reply, world, status=400, param=None):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    assert "headstart/" not in reply.text
    if param is not None:
        assert error["param"] == param
        assert param.split("[")[0].split(".")[0] in error["message"]
    assert world.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field, values in {
            "temperature": [-1, "hot", True, [1], 1e400, 3],
            "top_p": [-0.1, 0, 1.1, "1", {}],
            "top_k": [-2, 1.5, "3", True],
            "min_p": [-0.1, 2, "0"],
            "presence_penalty": [-3, 3, "x"],
            "frequency_penalty": [-3, 3, None.__class__.__name__],
            "repetition_penalty": [0, -1, "x"],
            "n": [0, -1, 1.5, "2", 100000, True],
            "max_tokens": [0, -5, "ten", 1.5, 10**30, True, CONTEXT],
            "min_tokens": [-1, "x", CONTEXT + 1],
            "seed": ["x", 1.5, True, 10**30],
            "stop": ["", ["ok", ""], 5, [5], {}, ["x"] * 99, "y" * 5000],
            "stop_token_ids": [5, ["x"], [-1], [380], [True], [1.0]],
            "ignore_eos": ["yes", 1],
            "stream": ["yes", 1],
            "stream_options": ["x", {"include_usage": True}],
            "logit_bias": ["x", {"a": 1}, {"-1": 1}, {"380": 1}, {"5": 101}, {"5": "x"}, {"²": 1}],
            "return_token_ids": ["x"],
            "cache_salt": [5, "x" * 5000],
            "deadline_s": [0, -1, "x", 1e9],
            "skip_special_tokens": [3],
        }.items()
        for value in values
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_wrong_parameter_is_named(path, field, value):
    body = (chat_body() if path == CHAT else completion_body()) | {field: value}
    content = json.dumps(body).replace("Infinity", "1e400")
    reply, world = post(path, content=content)
    assert_refused(reply, world)
    assert reply.json()["error"]["code"] == "invalid_json" or field in str(reply.json()["error"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("best_of", 2),
        ("suffix", "x"),
        ("chat_template", "{{ 1 }}"),
        ("guided_json", {}),
        ("modalities", ["audio"]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.behaviour("57")
def test_what_is_not_built_is_refused_by_name(path, field, value):
    body = chat_body() if path == CHAT else completion_body()
    reply, world = post(path, json=body | {field: value})
    assert_refused(reply, world, param=field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.behaviour("59")
def test_neutral_values_of_what_is_not_built_and_unknown_fields_are_tolerated(path):
    body = chat_body() if path == CHAT else completion_body()
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "functions": None,
        "response_format": {"type": "text"},
        "echo": False,
        "prompt_logprobs": None,
        "best_of": 1,
        "suffix": None,
        "parallel_tool_calls": True,
        "user": "me",
        "store": False,
        "bootstrap_host": "10.0.0.1",
        "bootstrap_room": 7,
        "return_hidden_states": False,
        "something": {"new": [1]},
        "model": None,
        "temperature": None,
        "stop": None,
        "n": None,
        "logprobs": None,
        "stream_options": None,
    }
    reply, _ = post(path, json=body | neutral)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "body", [chat_body(logprobs=1), chat_body(top_logprobs=3), chat_body(logprobs=True, top_logprobs=21)]
)
@pytest.mark.behaviour("56")
def test_wrong_chat_logprobs_are_refused(body):
    assert_refused(*post(CHAT, json=body))


@pytest.mark.parametrize("value", [-1, 21, 129, "x", True, 1.5])
@pytest.mark.behaviour("56")
def test_wrong_completion_logprobs_are_refused(value):
    assert_refused(*post(COMPLETIONS, json=completion_body(logprobs=value)), param="logprobs")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt[0]"),
        (["a", 5], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 380], "prompt[1]"),
        ([1, 2**40], "prompt[1]"),
        ([1, 1.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1, 380]], "prompt[0][1]"),
        (["a"] * 200, "prompt"),
    ],
)
@pytest.mark.behaviour("G16")
def test_a_wrong_prompt_is_named(prompt, param):
    assert_refused(*post(COMPLETIONS, json=completion_body(prompt)), param=param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ],
)
def test_a_wrong_conversation_is_named(messages, param):
    assert_refused(*post(CHAT, json={"messages": messages}), param=param)


def test_an_unknown_model_is_404():
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, completion_body())):
        reply, world = post(path, json=body | {"model": "gpt-17"})
        assert_refused(reply, world, 404, "model")
        assert reply.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("over", "status"), [(0, 400), (-1, 200), (1, 400)])
@pytest.mark.behaviour("51", "G1")
def test_a_prompt_is_judged_at_the_very_limit(over, status):
    reply, world = post(COMPLETIONS, json=completion_body([5] * (CONTEXT + over), max_tokens=1))
    assert reply.status_code == status
    if status == 400:
        assert_refused(reply, world, param="prompt")
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_ids_beyond_the_context_are_refused_for_their_number_unread():
    reply, world = post(COMPLETIONS, json=completion_body(prompt=[1, *["no id"] * CONTEXT]))
    assert_refused(reply, world)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_more_messages_than_any_context_holds_are_refused_unread():
    reply, world = post(CHAT, json=chat_body() | {"messages": [None] * (MAX_MESSAGES + 1)})
    assert_refused(reply, world, param="messages")


def test_a_conversation_beyond_the_context_is_refused():
    reply, world = post(CHAT, json=chat_body("fox " * 600))
    assert_refused(reply, world, param="messages")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_beyond_what_the_prompt_leaves_is_refused(name):
    reply, world = post(CHAT, json=chat_body() | {name: CONTEXT - 1})
    assert_refused(reply, world, param=name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"5",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'\xff\xfe{"a": 1}',
        b'{"temperature": NaN, "prompt": "x"}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "x"} trailing',
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_a_body_that_is_no_json_object_is_refused(path, content):
    reply, world = post(path, content=content)
    assert_refused(reply, world)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_lone_surrogates_are_refused(path):
    body = b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}'
    reply, world = post(path, content=body)
    assert_refused(reply, world)


@pytest.mark.parametrize("stated", [True, False])
def test_a_body_of_fifty_megabytes_is_refused_without_being_kept(stated):
    taken = 0

    async def chunks():
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield b"x" * (1 << 20)

    headers = {"content-length": str(50 << 20)} if stated else {}
    reply, world = post(CHAT, content=chunks(), headers=headers)
    assert_refused(reply, world, 413)
    assert reply.headers["connection"] == "close"


def test_unknown_paths_and_methods_have_the_same_shape():
    async def go():
        world = ScriptedWorld()
        async with world.client() as http:
            for reply, status in (
                (await http.get("/nowhere"), 404),
                (await http.get(CHAT), 405),
                (await http.get("/v1/models/other"), 404),
                (await http.post("/tokenize", json={"prompt": 5}), 400),
            ):
                assert_refused(reply, world, status)

    run(go())


def test_a_bug_of_ours_is_a_500_that_tells_nothing():
    async def go():
        world = ScriptedWorld()
        world.script = lambda request: None
        world.state.dispatcher.registry.judge(0.0)
        world.app.add_api_route("/bug", lambda: 1 / 0)
        async with world.client() as http:
            reply = await http.get("/bug")
        assert reply.status_code == 500
        assert "ZeroDivision" not in reply.text
        assert reply.json()["error"]["code"] == "internal"

    run(go())
