"""A choice's stream: what its tokens say, where each begins, and what ends it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.small import END, byte_level, piece_level

from headstart.core.messages import Finished, TokenDelta
from headstart.core.request import ChoiceRef, RequestStats
from headstart.gateway.stream import ChoiceOutput, ChoiceStream, StopRules
from headstart.text.detokenizer import make_detokenizer

from .scripted import ScriptedWorld, chat_body, completion_body, run, saying

REF = ChoiceRef("request", 0)
ENDS = frozenset({END})
RULES = StopRules(ENDS, ENDS)


class Reader:
    """Collects one choice, and counts how often the worker was told to stop."""

    def __init__(self, rules=RULES, tokenizer=None, prompt=(), skip=True):
        self.answer, self.num_stops, self._num_sent = ChoiceOutput(), 0, 0
        detokenizer = make_detokenizer(tokenizer or byte_level(), skip, prompt)
        self._stream = ChoiceStream(0, detokenizer, rules, self.answer.add, self._stop)

    def _stop(self):
        self.num_stops += 1

    def send(self, *token_ids, logprobs=False):
        values = tuple(-float(i) for i in range(len(token_ids))) if logprobs else ()
        top = tuple(((0, -0.25),) for _ in token_ids) if logprobs else ()
        self._stream.on_tokens(TokenDelta(REF, self._num_sent, token_ids, values, top))
        self._num_sent += len(token_ids)
        return self

    def finish(self, stop_id=None):
        reason = "length" if stop_id is None else "stop"
        self._stream.on_finished(Finished(REF, reason, self._num_sent, RequestStats(), stop_id))
        return self

    @property
    def text(self):
        return "".join(self.answer.text)


def ids_of(text):
    return byte_level().encode(text, add_special_tokens=False)


def cut(ids, sizes):
    for size in sizes:
        yield ids[:size]
        ids = ids[size:]
    yield ids


def test_each_token_begins_where_the_text_of_those_before_it_ends():
    text = "ö🦊 and 你 x"
    ids = ids_of(text)
    reader = Reader().send(*ids, END, logprobs=True).finish(END)
    offsets = [entry.text_offset for entry in reader.answer.logprobs]
    assert offsets == [len(byte_level().decode(ids[:i]).rstrip("\ufffd")) for i in range(len(ids))] + [len(text)]
    assert [entry.ends for entry in reader.answer.logprobs] == [False] * len(ids) + [True]
    assert len(set(offsets)) < len(offsets) - 1  # there are characters of several tokens


def test_offsets_count_text_that_a_stop_string_holds_back():
    reader = Reader(StopRules(ENDS, ENDS, ("fox jumps",)))
    for token_id in ids_of("The fox x"):
        reader.send(token_id, logprobs=True)
    starts = [entry.text_offset for entry in reader.finish().answer.logprobs]
    assert starts == [len(byte_level().decode(ids_of("The fox x")[:i])) for i in range(len(starts))]


@pytest.mark.parametrize("logprobs", [False, True])
@given(sizes=st.lists(st.integers(1, 4), max_size=12))
def test_a_stop_string_ends_an_answer_at_the_same_token_however_tokens_arrive(logprobs, sizes):
    rules = StopRules(ENDS, ENDS, ("jumps over", "jump", "ump", "lazy"))
    ids = ids_of("The quick brown fox jumps over the lazy dog")
    reader = Reader(rules)
    for part in cut(ids, sizes):
        if part:
            reader.send(*part, logprobs=logprobs)
    end = reader.finish().answer.end
    assert (reader.text, end.stop_reason, end.finish_reason) == ("The quick brown fox ", "jump", "stop")
    assert end.num_tokens == len(reader.answer.token_ids)
    assert "jump" in byte_level().decode(reader.answer.token_ids)
    assert "jump" not in byte_level().decode(reader.answer.token_ids[:-1])
    assert reader.num_stops == 1
    assert len(reader.answer.logprobs) == (end.num_tokens if logprobs else 0)


@pytest.mark.parametrize(("include", "text"), [(False, "a b "), (True, "a b STOP")])
def test_a_stop_string_is_part_of_the_answer_on_request(include, text):
    reader = Reader(StopRules(ENDS, ENDS, ("STOP",), include)).send(*ids_of("a b STOP c")).finish()
    assert (reader.text, reader.answer.end.stop_reason) == (text, "STOP")


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, False, "a"), (True, False, "a<|im_end|>"), (True, True, "a")]
)
def test_a_stop_tokens_text_is_part_of_the_answer_on_request_unless_it_is_skipped(include, skip, text):
    reader = Reader(StopRules(ENDS, ENDS, (), include), skip=skip).send(*ids_of("a"), END).finish(END)
    assert reader.text == text
    assert reader.answer.end.num_tokens == 2


def test_an_invalid_byte_does_not_silence_the_stream():
    def byte(value):
        return 3 + value

    reader = Reader(StopRules(ENDS, ENDS, ("fox",)), piece_level(), [259])
    shown = [reader.send(token_id).text for token_id in (byte(0xFF), 259, byte(0xF0), 260)]
    assert shown == ["\ufffd", "\ufffd the", "\ufffd the", "\ufffd the\ufffd "]
    assert reader.answer.end is None
    assert (reader.finish().text, reader.answer.end.stop_reason) == ("\ufffd the\ufffd ", "fox")


def test_logprobs_show_the_sampled_token_among_the_best_and_never_null():
    async def go():
        world = ScriptedWorld()
        world.script = saying("ö🦊 x")
        async with world.client() as http:
            return [
                (await http.post("/v1/completions", json=completion_body(logprobs=count))).json()["choices"][0]
                for count in (0, 1, 2)
            ]

    for count, choice in enumerate(run(go())):
        logprobs = choice["logprobs"]
        for token, value, best in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert best[token] == value
            assert len(best) == max(count, 1)
        num_end = len(byte_level().encode("ö🦊 x"))
        assert logprobs["text_offset"][num_end] == len(choice["text"]) == 4
        assert logprobs["text_offset"][num_end - 1] == 3


def test_chat_logprobs_are_those_of_the_answers_text():
    async def go():
        world = ScriptedWorld()
        world.script = saying("ö🦊 x")
        async with world.client() as http:
            whole = (await http.post("/v1/chat/completions", json=chat_body(logprobs=True))).json()
            streamed = await http.post("/v1/chat/completions", json=chat_body(logprobs=True, stream=True))
        return whole, streamed.text

    whole, streamed = run(go())
    entries = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "ö🦊 x"
    assert "im_end" not in streamed
