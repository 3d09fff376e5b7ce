"""The OpenAI client and plain HTTP against the real processes."""

import re

import openai
import pytest
from cluster import DEMO, Cluster, until

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def test_the_openai_client_chats(demo: Cluster) -> None:
    answer = demo.openai.chat.completions.create(model=DEMO, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_and_ends_with_its_usage(demo: Cluster) -> None:
    whole = demo.openai.chat.completions.create(model=DEMO, messages=QUESTION, temperature=0, max_tokens=32)
    stream = demo.openai.chat.completions.create(
        model=DEMO,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_completions_take_text_or_token_ids_and_return_ids_when_asked(demo: Cluster) -> None:
    text = "Once upon a time"
    ids = demo.http.post("/tokenize", json={"model": DEMO, "prompt": text}).json()["tokens"]
    by_text = demo.complete(text, 12)
    by_ids = demo.complete(ids, 12)
    assert len(by_ids["choices"][0]["token_ids"]) == 12
    assert by_text["choices"][0]["token_ids"] == by_ids["choices"][0]["token_ids"]


@pytest.mark.behaviour("54")
def test_a_streamed_completion_and_a_whole_one_agree(demo: Cluster) -> None:
    fields = {"model": DEMO, "prompt": "Count: one, two,", "max_tokens": 12, "temperature": 0.0}
    whole = demo.openai.completions.create(**fields)
    streamed = demo.openai.completions.create(stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole.choices[0].text


def test_a_seed_gives_the_same_choices_again(demo: Cluster) -> None:
    fields = {"model": DEMO, "prompt": "My favourite colour is", "max_tokens": 8, "n": 3, "seed": 7, "temperature": 1.0}
    first, second = (demo.openai.completions.create(**fields) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert len({choice.text for choice in first.choices}) > 1


def test_log_probabilities_come_with_their_alternatives(demo: Cluster) -> None:
    answer = demo.openai.chat.completions.create(
        model=DEMO, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert len(tokens) == 4
    assert all(len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob for token in tokens)


def test_a_stop_string_ends_the_text_before_it(demo: Cluster) -> None:
    fields = {"model": DEMO, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "temperature": 0.0}
    whole = demo.openai.completions.create(**fields).choices[0].text
    stop = whole[6:9]
    stopped = demo.openai.completions.create(stop=[stop], **fields)
    assert stopped.choices[0].text == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_second_chat_turn_finds_the_first_through_the_token_memory(demo: Cluster) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse."}]
    first = demo.openai.chat.completions.create(model=DEMO, messages=messages, temperature=1.0, seed=3, max_tokens=60)
    assert first.usage is not None
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And then?"},
    ]
    second = demo.http.post(
        "/v1/chat/completions", json={"model": DEMO, "messages": messages, "max_tokens": 8, "temperature": 0}
    ).json()
    page_size = demo.page_size
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    if first.choices[0].finish_reason == "stop":
        known -= 1  # the end token's KV is never computed; it is part of the template's text
    held = second["usage"]["headstart"]["decode_prefix_len"]
    assert held >= page_size * ((known - 1) // page_size)


def test_models_are_listed(demo: Cluster) -> None:
    assert [model.id for model in demo.openai.models.list().data] == [DEMO]
    assert demo.openai.models.retrieve(DEMO).id == DEMO


def test_an_unknown_model_is_a_404_in_openais_shape(demo: Cluster) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        demo.openai.completions.create(model="nope", prompt="x")
    assert isinstance(refusal.value.body, dict)
    assert refusal.value.body["code"] == "model_not_found"


def test_health_ready_metrics_and_cluster_answer(demo: Cluster) -> None:
    assert demo.http.get("/health").status_code == 200
    assert demo.http.get("/ready").json() == {"ready": True}
    demo.complete("Hello", 2)
    metrics = demo.http.get("/metrics").text
    assert re.search(r'headstart_worker_up\{role="decode",worker="decode-0"\} 1\.0', metrics)
    assert re.search(r"^headstart_output_tokens_total [1-9]", metrics, re.MULTILINE)
    state = demo.state()
    assert {worker["name"] for worker in state["workers"]} == {"decode-0", "prefill-0"}


@pytest.mark.behaviour("27")
def test_a_flush_empties_both_caches(demo: Cluster) -> None:
    prompt = "A prompt long enough to fill a page or two, whatever the tokenizer makes of these words." * 2
    demo.complete(prompt, 4)
    demo.wait_until_free()
    until(lambda: demo.http.post("/flush_cache").json().get("flushed"), "a flush of both within the gateway's patience")
    demo.wait_until_free()
    assert demo.complete(prompt, 4)["usage"]["headstart"]["decode_prefix_len"] == 0
