"""Ids of earlier answers come back exactly, whatever ids the model chose, and only where the text is the same."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.gateway.token_memory import MAX_BOUNDARIES, TokenMemory
from headstart.text.chat_template import ChatTemplate
from tests.support.scripted_gateway import Script, ScriptedWorld, run
from tests.support.small_tokenizers import CHATML, END, byte_level

TEMPLATE = ChatTemplate(CHATML, byte_level().named_special_tokens, lambda: None)
NAMESPACE = b"tenant"


def render(messages):
    return TEMPLATE.render(messages)


def recalled_ids(memory, text, namespace=NAMESPACE):
    recalled = memory.recall(namespace, text)
    return recalled, recalled.ids + byte_level().encode(text[recalled.num_chars :], add_special_tokens=False)


def retokenised(text, rng):
    """Ids that decode to `text` but are cut at random places, as sampling at temperature 1 does."""
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text), rng.randrange(1, 8))))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token_id for part in parts for token_id in byte_level().encode(part, add_special_tokens=False)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=6), st.booleans())
def test_every_turn_continues_the_exact_ids_of_the_turn_before(seed, answers, ends_with_eos):
    rng, memory = Random(seed), TokenMemory(byte_level())
    messages, before = [{"role": "user", "content": "Tell me."}], None
    for turn, answer in enumerate(answers):
        text = render(messages)
        recalled, ids = recalled_ids(memory, text)
        if before is not None:
            assert ids[: len(before)] == before
            assert recalled.divergence is None
        assert byte_level().decode(ids, skip_special_tokens=False) == text
        chosen = retokenised(answer, rng)
        kept = memory.remember(NAMESPACE, text, ids, answer, chosen + [END] * ends_with_eos)
        before = ids + chosen if kept else None
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"More, {turn}."}]
        if not kept:
            assert any(special in answer for special in byte_level().special_texts)
            break


def remembered(answer="Once upon a time", namespace=NAMESPACE):
    memory = TokenMemory(byte_level())
    messages = [{"role": "user", "content": "Hi"}]
    text = render(messages)
    prompt = byte_level().encode(text, add_special_tokens=False)
    chosen = [token_id for char in answer for token_id in byte_level().encode(char, add_special_tokens=False)]
    assert memory.remember(namespace, text, prompt, answer, [*chosen, END])
    return memory, messages, [*prompt, *chosen]


def test_an_edited_answer_falls_back_and_says_where_it_diverged():
    memory, messages, _ = remembered()
    edited = render([*messages, {"role": "assistant", "content": "Once upon X time"}, {"role": "user", "content": "?"}])
    recalled, ids = recalled_ids(memory, edited)
    assert recalled.num_chars == 0
    assert edited[recalled.divergence] == "X"
    assert ids == byte_level().encode(edited, add_special_tokens=False)


def test_an_answer_that_goes_on_in_the_same_message_is_not_taken_for_the_one_remembered():
    memory, messages, _ = remembered()
    longer = render([*messages, {"role": "assistant", "content": "Once upon a time there"}])
    recalled, _ = recalled_ids(memory, longer)
    assert recalled.num_chars == 0
    assert longer[recalled.divergence :].startswith(" there")


def test_the_same_question_again_is_no_divergence():
    memory, messages, _ = remembered()
    assert memory.recall(NAMESPACE, render(messages)).divergence is None


def test_a_later_edit_keeps_the_turns_before_it():
    memory, messages, known = remembered()
    messages = [*messages, {"role": "assistant", "content": "Once upon a time"}, {"role": "user", "content": "And?"}]
    text = render(messages)
    _, ids = recalled_ids(memory, text)
    memory.remember(NAMESPACE, text, ids, "The end", [*byte_level().encode("The end"), END])
    edited = render([*messages, {"role": "assistant", "content": "The fox"}, {"role": "user", "content": "?"}])
    recalled, ids = recalled_ids(memory, edited)
    assert ids[: len(known)] == known
    assert edited[recalled.divergence :].startswith("fox")


def test_a_render_of_a_million_special_tokens_is_looked_at_in_part_only():
    memory, messages, ids = remembered()
    later = render([*messages, {"role": "assistant", "content": "Once upon a time"}])
    end = next(
        text for text in byte_level().special_texts if byte_level().encode(text, add_special_tokens=False) == [END]
    )
    recalled = memory.recall(NAMESPACE, later + end * 1_000_000)
    assert recalled.ids == ids
    assert len(list(memory._boundaries(NAMESPACE, end * 1_000_000))) == MAX_BOUNDARIES


def test_tenants_do_not_share_memory():
    memory, messages, _ = remembered()
    text = render([*messages, {"role": "assistant", "content": "Once upon a time"}])
    assert memory.recall(NAMESPACE, text).num_chars > 0
    assert memory.recall(b"other", text).num_chars == 0


def test_only_answers_whose_ids_are_their_text_are_kept():
    memory, prompt = TokenMemory(byte_level()), render([{"role": "user", "content": "Hi"}])
    ids = byte_level().encode("Hello STOP")
    assert not memory.remember(NAMESPACE, prompt, [1], "Hello ", ids)  # cut at a stop string
    assert not memory.remember(
        NAMESPACE, prompt, [1], "Hello", [*byte_level().encode("Hel"), 1, *byte_level().encode("lo")]
    )
    assert not memory.remember(NAMESPACE, prompt, [1], "", [END])
    assert not memory.remember(NAMESPACE, "no special token here", [1], "Hello", byte_level().encode("Hello"))
    assert memory.num_tokens == 0


def test_two_answers_to_one_question_are_both_remembered():
    memory, messages, first = remembered()
    text = render(messages)
    prompt = byte_level().encode(text, add_special_tokens=False)
    memory.remember(NAMESPACE, text, prompt, "No", [*byte_level().encode("No"), END])
    for answer, ids in (("Once upon a time", first), ("No", [*prompt, *byte_level().encode("No")])):
        assert recalled_ids(memory, render([*messages, {"role": "assistant", "content": answer}]))[1][: len(ids)] == ids


def test_memory_is_bounded_and_forgets_the_oldest_conversation():
    memory = TokenMemory(byte_level(), max_tokens=500)
    for i in range(100):
        text = render([{"role": "user", "content": f"Question {i}"}])
        ids = byte_level().encode(text, add_special_tokens=False)
        memory.remember(NAMESPACE, text, ids, "Yes", [*byte_level().encode("Yes"), END])
        assert memory.num_tokens <= 500
    latest = render([{"role": "user", "content": "Question 99"}, {"role": "assistant", "content": "Yes"}])
    oldest = render([{"role": "user", "content": "Question 0"}, {"role": "assistant", "content": "Yes"}])
    assert memory.recall(NAMESPACE, latest).num_chars > 0
    assert memory.recall(NAMESPACE, oldest).num_chars == 0


def test_six_turns_over_http_reuse_the_ids_the_worker_chose():
    async def go():
        world, rng = ScriptedWorld(), Random(3)
        answers = ["Once upon a time, a fox jumped.", "It was lazy 🙂.", "The sea äöü", "No more", "ok", "end."]
        messages, sent = [{"role": "user", "content": "Tell me"}], []
        async with world.client() as http:
            for turn, answer in enumerate(answers):
                world.script = Script(retokenised(answer, rng))
                stream = turn % 2 == 1
                body = {"messages": messages, "stream": stream}
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200
                if turn:
                    earlier = world.requests[turn - 1]
                    held = [*earlier.prompt.tolist(), *sent]
                    assert world.requests[turn].prompt.tolist()[: len(held)] == held
                if not stream:
                    usage = reply.json()["usage"]["headstart"]
                    assert usage["text_divergence"] is None
                    assert (usage["remembered_tokens"] > 0) == (turn > 0)
                sent = [*world.script.token_ids, END]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
            messages[1]["content"] = "Something else"
            usage = (await http.post("/v1/chat/completions", json={"messages": messages})).json()["usage"]["headstart"]
        assert usage["text_divergence"] is not None
        assert usage["remembered_tokens"] == 0

    run(go())
