"""A prompt that is too long is refused in the words by which clients know an overflow, and which limit it was."""

import re

import pytest

from headstart.core.errors import ErrorCode
from headstart.core.messages import Join, WorkerExited, WorkerRef
from headstart.gateway.api.errors import from_failure
from headstart.gateway.stream import ChoiceFailure
from tests.support.dispatchers import SPEC
from tests.support.scripted_gateway import CONTEXT, Script, ScriptedWorld, chat_body, completion_body, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = [
    (CHAT, chat_body("fox " * 600)),
    (CHAT, chat_body(max_tokens=CONTEXT - 1)),
    (CHAT, chat_body(max_completion_tokens=CONTEXT - 1)),
    (COMPLETIONS, completion_body("fox " * 600)),
    (COMPLETIONS, completion_body(max_tokens=CONTEXT)),
]


def ask(path, body, world=None):
    world = world or ScriptedWorld()

    async def go():
        async with world.client() as http:
            return await http.post(path, json=body), (await http.get("/v1/models")).json()["data"][0]["max_model_len"]

    return run(go())


def offered(world):
    async def go():
        async with world.client() as http:
            return (await http.get("/v1/models")).json()["data"][0]["max_model_len"]

    return run(go())


def assert_known_as_an_overflow(error):
    """LiteLLM looks for the first phrase, LangChain for the code or the second one; others read the number."""
    message = error["message"].lower()
    assert "this model's maximum context length is" in message
    assert "prompt is too long" in message
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_overflow_is_told_in_the_words_that_clients_know(path, body):
    reply, _ = ask(path, body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert_known_as_an_overflow(error)
    assert re.search(r"maximum context length is (\d+) tokens", error["message"]).group(1) == str(CONTEXT)
    assert "pool" not in error["message"]


@pytest.mark.parametrize("message", ["13 pages are more than the pool has", ""])
def test_a_workers_own_words_for_an_overflow_are_put_among_them(message):
    error = from_failure(ChoiceFailure(0, ErrorCode.TOO_LONG, message))
    assert_known_as_an_overflow({"message": error.message, "code": error.code, "type": "invalid_request_error"})
    assert message in error.message


def test_a_worker_that_refuses_a_prompt_as_too_long_is_an_overflow():
    world = ScriptedWorld()
    world.script = Script(reject=ErrorCode.TOO_LONG)
    reply, _ = ask(CHAT, chat_body(), world)
    assert reply.status_code == 400
    assert_known_as_an_overflow(reply.json()["error"])


def world_with_a_small_pool(pool):
    world = ScriptedWorld(with_worker=False)
    world.dispatcher.handle(str(world.worker), Join(world.worker, "decode", SPEC, "", pool))
    return world


def test_the_message_says_when_the_decode_pool_is_the_limit():
    reply, max_model_len = ask(COMPLETIONS, completion_body("fox " * 110), world_with_a_small_pool(100))
    error = reply.json()["error"]
    assert_known_as_an_overflow(error)
    assert max_model_len == 100
    for words in ("100 tokens", "pool", "decode worker", str(CONTEXT)):
        assert words in error["message"]


def test_what_is_offered_does_not_shrink_while_the_largest_worker_restarts():
    world = world_with_a_small_pool(100)
    large = WorkerRef("decode-1", 1)
    world.dispatcher.handle(str(large), Join(large, "decode", SPEC, "", 300))
    before = offered(world)
    world.dispatcher.handle("launcher", WorkerExited(large, -9))
    assert before == offered(world) == 300
