"""What becomes of every field that a client may send: built, accepted, refused, a typo, or ignored and named."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.gateway.api.fields_doc import tables
from headstart.gateway.api.known_fields import ACCEPTED, REFUSED, built, letters_apart, typo_of
from headstart.gateway.api.request_bodies import ChatBody, CompletionBody, TokenizeBody
from headstart.gateway.state import HttpLimits

from .scripted import CONTEXT, MODEL, Script, ScriptedWorld, chat_body, completion_body, run, saying

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
BODIES = {CHAT: chat_body(), COMPLETIONS: completion_body(), TOKENIZE: {"prompt": "Hi"}}
DOC = Path(__file__).parents[3] / "docs" / "http-api.md"
FOREIGN = ({"some": "value"}, "some value", 17, True)


def post(path, body, **limits):
    world = ScriptedWorld(limits=HttpLimits(**limits))

    async def go():
        async with world.client() as http:
            return await http.post(path, json=body)

    return run(go()), world


def error_of(reply):
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


# ---- the table -----------------------------------------------------------------------------------------------------------


def test_the_documentation_has_the_tables_that_the_source_makes():
    text = DOC.read_text()
    found = text[text.index("<!-- fields -->") : text.index("<!-- end of fields -->")]
    assert found.removeprefix("<!-- fields -->").strip() == tables().strip()


def test_every_known_field_is_in_one_place():
    names = [known.name for known in (*ACCEPTED, *REFUSED)]
    assert len(names) == len(set(names))
    for kind in (ChatBody, CompletionBody, TokenizeBody):
        assert not built(kind) & set(names)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_has_no_effect_is_accepted_whatever_it_holds(path):
    for value in FOREIGN:
        reply, _ = post(path, BODIES[path] | {known.name: value for known in ACCEPTED})
        assert reply.status_code == 200, reply.text
        assert "x-headstart-ignored-fields" not in reply.headers


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
@pytest.mark.parametrize("known", REFUSED, ids=lambda known: known.name)
def test_what_would_change_the_answer_and_is_not_built_is_refused_by_name(path, known):
    value = next(value for value in FOREIGN if not any(value is other or value == other for other in known.neutral))
    reply, world = post(path, BODIES[path] | {known.name: value})
    error = error_of(reply)
    assert error["param"] == known.name
    assert error["code"] == "unsupported_parameter"
    assert known.name in error["message"]
    assert not world.requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
def test_values_that_mean_the_same_as_leaving_a_field_out_are_served(path):
    most = max(len(known.neutral) for known in REFUSED)
    for index in range(most):
        neutral = {known.name: known.neutral[index] for known in REFUSED if index < len(known.neutral)}
        reply, _ = post(path, BODIES[path] | neutral)
        assert reply.status_code == 200, reply.text
    reply, _ = post(path, BODIES[path] | {known.name: None for known in REFUSED})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "prompt", "Hi"),
        (COMPLETIONS, "messages", [{"role": "user", "content": "Hi"}]),
        (COMPLETIONS, "max_completion_tokens", 5),
        (COMPLETIONS, "chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_field_of_the_other_route_is_refused_unless_it_is_empty(path, name, value):
    reply, _ = post(path, BODIES[path] | {name: value})
    assert error_of(reply)["param"] == name
    assert post(path, BODIES[path] | {name: type(value)() if value != 5 else None})[0].status_code == 200


def test_tokenize_takes_the_body_of_a_chat_and_counts_its_prompt():
    reply, _ = post(TOKENIZE, chat_body(temperature=0.5, max_tokens=7, stream=True))
    assert reply.status_code == 200, reply.text
    assert reply.json()["count"] == len(reply.json()["tokens"]) > 0


# ---- names that nobody knows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("temprature", "temperature"),
        ("tempertaure", "temperature"),
        ("top-p", "top_p"),
        ("stpo", "stop"),
        ("repetition_penalties", None),
        ("ignore_eso", "ignore_eos"),
        ("response_fromat", "response_format"),
        ("xyz", None),
        ("zz", None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_name_within_a_letter_or_two_of_a_known_one_is_a_typo(path, name, meant):
    reply, world = post(path, BODIES[path] | {name: 5})
    if meant is None:
        assert reply.status_code == 200, reply.text
        return
    error = error_of(reply)
    assert f"did you mean '{meant}'?" in error["message"]
    assert error["param"] == name
    assert not world.requests


def test_a_typo_among_the_stream_options_is_found():
    reply, _ = post(CHAT, chat_body(stream=True, stream_options={"include_usages": True}))
    assert error_of(reply)["param"] == "stream_options.include_usages"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
def test_other_unknown_names_are_served_and_named(path, caplog):
    caplog.set_level("INFO", logger="headstart.gateway")
    reply, _ = post(path, BODIES[path] | {"my_own_field": 1, "other\r\nInjected: header": 2, "": 3, "ünï": 4})
    assert reply.status_code == 200, reply.text
    named = reply.headers["x-headstart-ignored-fields"].split(", ")
    assert named[0] == "my_own_field"
    assert len(named) == 4
    assert "injected" not in reply.headers
    assert any("fields ignored" in record.message for record in caplog.records)


def test_unknown_names_inside_messages_and_stream_options_are_named_too():
    messages = [{"role": "user", "content": "Hi", "mood": "good", "annotations": []}]
    body = chat_body(stream=True, stream_options={"something_else": 1}) | {"messages": messages}
    reply, _ = post(CHAT, body)
    assert reply.headers["x-headstart-ignored-fields"] == "stream_options.something_else, messages[0].mood"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
def test_strict_fields_makes_every_unknown_name_a_400(path):
    reply, world = post(path, BODIES[path] | {"my_own_field": 1, "another_one": 2}, strict_fields=True)
    error = error_of(reply)
    assert error["param"] == "my_own_field"
    assert "another_one" in error["message"]
    assert not world.requests
    assert post(path, BODIES[path], strict_fields=True)[0].status_code == 200


def test_many_unknown_names_cost_little_and_are_not_all_named():
    reply, _ = post(CHAT, chat_body() | {f"unknown_{index:05}": 1 for index in range(20_000)})
    assert reply.status_code == 200
    assert len(reply.headers["x-headstart-ignored-fields"]) < 1000


WORDS = st.text("abc_", max_size=8)


def naive_distance(one, other):
    """Optimal string alignment by its definition."""
    if not one or not other:
        return len(one) + len(other)
    best = min(
        naive_distance(one[:-1], other) + 1,
        naive_distance(one, other[:-1]) + 1,
        naive_distance(one[:-1], other[:-1]) + (one[-1] != other[-1]),
    )
    if len(one) > 1 and len(other) > 1 and one[-1] == other[-2] and one[-2] == other[-1]:
        best = min(best, naive_distance(one[:-2], other[:-2]) + 1)
    return best


@given(one=st.text("ab_", max_size=5), other=st.text("ab_", max_size=5), most=st.integers(0, 3))
def test_letters_apart_is_the_distance_as_far_as_it_is_asked_for(one, other, most):
    distance = naive_distance(one, other)
    found = letters_apart(one, other, most)
    assert found == distance if distance <= most else found > most


@given(name=WORDS, known=st.lists(WORDS, max_size=4))
def test_a_typo_is_always_near_what_was_meant(name, known):
    if (meant := typo_of(name, known)) is not None:
        assert naive_distance(name, meant) <= 2


# ---- what is wrong, all at once --------------------------------------------------------------------------------------------


def test_every_field_that_is_out_of_range_is_named_with_what_it_was():
    reply, _ = post(CHAT, chat_body(temperature=3, top_p=0, n="two", stop=["x"] * 99, max_token=5))
    message = error_of(reply)["message"]
    for part in (
        "did you mean 'max_tokens'?",
        "'n' must be an integer from 1 to 128, got \"two\"",
        "'temperature' must be a number from 0 to 2, got 3",
        "'top_p' must be a number above 0 up to 1, got 0",
        "'stop' must be",
        "got a list of 99",
    ):
        assert part in message


def test_what_depends_on_the_model_is_named_all_at_once_too():
    body = completion_body(stop_token_ids=[380], allowed_token_ids=[5, 381], min_tokens=CONTEXT + 1, deadline_s=1e9)
    message = error_of(post(COMPLETIONS, body)[0])["message"]
    for name in ("stop_token_ids[0]", "allowed_token_ids[1]", "min_tokens", "deadline_s"):
        assert f"'{name}' must be" in message


# ---- what is built ---------------------------------------------------------------------------------------------------------


def test_allowed_and_banned_tokens_reach_the_worker():
    _, world = post(COMPLETIONS, completion_body(allowed_token_ids=[7, 5, 7], bad_words=["a"]))
    sampling = world.requests[0].sampling
    assert sampling.allowed_token_ids == (5, 7)
    tokenizer = world.state.model.tokenizer
    assert tokenizer.encode("a", add_special_tokens=False)[0] in sampling.banned_token_ids
    spaced = tokenizer.encode(" a", add_special_tokens=False)
    assert len(spaced) > 1 or spaced[0] in sampling.banned_token_ids


def test_a_bad_word_of_several_tokens_is_refused_by_name():
    assert (
        error_of(post(COMPLETIONS, completion_body(bad_words=["a", "quick brown fox"]))[0])["param"] == "bad_words[1]"
    )


def test_an_allow_list_of_which_nothing_is_left_is_refused():
    world = ScriptedWorld()
    (letter,) = world.state.model.tokenizer.encode("a", add_special_tokens=False)
    body = completion_body(allowed_token_ids=[letter], bad_words=["a"])
    assert error_of(post(COMPLETIONS, body)[0])["param"] == "allowed_token_ids"
    body = completion_body(allowed_token_ids=[letter], stop_token_ids=[letter], min_tokens=2)
    assert error_of(post(COMPLETIONS, body)[0])["param"] == "allowed_token_ids"


@pytest.mark.parametrize(("include", "text"), [(False, "Hello "), (True, "Hello world")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_part_of_the_answer_only_if_asked_for(include, text, stream):
    body = completion_body(stop="world", include_stop_str_in_output=include, stream=stream)
    reply, _ = post(COMPLETIONS, body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == text
    else:
        assert reply.json()["choices"][0]["text"] == text


def test_special_tokens_are_added_to_a_prompt_only_if_asked_for():
    world = ScriptedWorld()
    asked = []
    encode = world.state.model.tokenizer.encode

    class Tokenizer:
        def __getattr__(self, name):
            return getattr(encode.__self__, name)

        def encode(self, text, add_special_tokens=True):
            asked.append(add_special_tokens)
            return encode(text, add_special_tokens)

    object.__setattr__(world.state.model, "tokenizer", Tokenizer())

    async def go():
        async with world.client() as http:
            for path, own in ((COMPLETIONS, True), (CHAT, False)):
                for value, expected in ((None, own), (True, True), (False, False)):
                    asked.clear()
                    reply = await http.post(path, json=BODIES[path] | {"add_special_tokens": value})
                    assert reply.status_code == 200, reply.text
                    assert asked == [expected]

    run(go())


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
def test_continuous_usage_counts_the_tokens_of_every_chunk(path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply, _ = post(path, body(stream=True, stream_options=options))
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert all(
        event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + n
        for event, n in zip(events, counts, strict=True)
    )
    assert counts[-1] == counts[-2] > counts[0]
    assert "prompt_tokens_details" in events[-1]["usage"]


def test_continuous_usage_needs_usage():
    reply, _ = post(CHAT, chat_body(stream=True, stream_options={"continuous_usage_stats": True}))
    assert error_of(reply)["param"] == "stream_options.continuous_usage_stats"


def test_an_end_token_beyond_the_vocabulary_is_not_sent_to_workers():
    world = ScriptedWorld()
    object.__setattr__(world.state.model.bounds, "eos_token_ids", (world.state.model.bounds.eos_token_ids[0], 99_999))
    world.script = saying("Hello", ends_with_eos=False)

    async def go():
        async with world.client() as http:
            return await http.post(CHAT, json=chat_body(min_tokens=3, max_tokens=5))

    assert run(go()).status_code == 200
    assert 99_999 not in world.requests[0].stop.stop_token_ids
    assert len(world.requests[0].stop.stop_token_ids) == 1


def test_every_parts_text_reaches_the_prompt_of_a_chat_of_parts():
    parts = [{"type": "text", "text": "alpha "}, {"type": "text", "text": "beta"}]
    whole, _ = post(TOKENIZE, {"messages": [{"role": "user", "content": "alpha beta"}]})
    reply, _ = post(TOKENIZE, {"model": MODEL, "messages": [{"role": "user", "content": parts}]})
    assert reply.json()["tokens"] == whole.json()["tokens"]


def test_a_half_character_is_no_event_of_its_own():
    world = ScriptedWorld()
    ids = world.state.model.tokenizer.encode("ö你", add_special_tokens=False)
    world.script = Script(ids, ends_with_eos=False)

    async def go():
        async with world.client() as http:
            return await http.post(COMPLETIONS, json=completion_body(stream=True, max_tokens=len(ids)))

    events = [json.loads(line[6:]) for line in run(go()).text.split("\n\n") if line.startswith("data: {")]
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "ö你"
    assert all(texts)
