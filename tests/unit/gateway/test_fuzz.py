"""Whatever JSON comes in, the answer is a success or a 4xx in OpenAI's format, and nothing is left behind."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scripted_gateway import ScriptedWorld, chat_body, completion_body, run

FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "stop",
    "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "logit_bias",
    "min_tokens", "ignore_eos", "tools", "tool_choice", "response_format", "echo", "deadline_s", "cache_salt",
    "return_token_ids", "chat_template_kwargs", "add_generation_prompt", "presence_penalty", "repetition_penalty",
]  # fmt: skip
EDGES = st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, 0.5, "", "0", "\x00", "🙂", [], {}, [[]]])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
JSON = st.one_of(
    EDGES,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
)
MESSAGE = st.fixed_dictionaries({"role": JSON, "content": JSON})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3), st.lists(MESSAGE, max_size=2))
@pytest.mark.behaviour("59")
def test_any_json_is_answered_or_refused_in_words(path, fields, messages):
    async def go():
        world = ScriptedWorld()
        body = (completion_body() if path == "/v1/completions" else chat_body()) | fields
        if messages:
            body["messages"] = messages
        async with world.client() as http:
            reply = await http.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
        is_late = reply.status_code == 504 and "deadline_s" in fields  # which may be a microsecond
        assert is_late or reply.status_code < 500, reply.text
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert world.dispatcher.num_unfinished == 0
        assert not world.state.generations.open

    run(go())
