"""What decides an answer in the simulation: stop strings end it at the gateway, penalties see what was said before."""

import numpy as np
from chaos.text_client import Letters, read, submit_text
from msgspec import structs

from headstart.core.arrays import int32_array
from headstart.core.batch import SampleSpec
from headstart.core.request import SamplingParams
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import Draw, next_token, oracle
from headstart.sim.world import World

VOCAB = 97
PENALTIES = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.3)
REPEATS = SamplingParams(temperature=0.0, frequency_penalty=-0.5)


def test_a_stop_string_ends_an_answer_at_the_gateway_and_frees_its_worker() -> None:
    world = World()
    world.run_for(0.1)
    unstopped = oracle(int32_array(range(20)), 30, VOCAB)
    text = Letters().push(unstopped)
    reader = submit_text(world, world.request(range(20), 30), (text[6:8], "no such text"))
    world.run_until(world.is_quiet)
    assert (reader.text, len(reader.answer.token_ids)) == read(unstopped, (text[6:8],), ())
    assert reader.answer.end is not None
    assert (reader.answer.end.finish_reason, reader.answer.end.stop_reason) == ("stop", text[6:8])
    assert world.load("decode-0")["output_tokens"] < 30
    world.check_idle()


def test_a_text_without_its_stop_string_is_told_whole() -> None:
    tokens = oracle(int32_array(range(20)), 8, VOCAB)
    assert read(tokens, ("no such text",), ()) == (Letters().push(tokens), 8)
    assert read(tokens, (), (tokens[-1],)) == (Letters().push(t for t in tokens if t != tokens[-1]), 8)


def test_penalties_count_outputs_and_not_the_prompt() -> None:
    context = int32_array([3, 5, 8])

    def said(prompt_len: int) -> set[int]:
        spec = SampleSpec(PENALTIES, 0, 3 - prompt_len, context, prompt_len)
        return {next_token(mark, spec, VOCAB) for mark in range(50)}

    assert said(prompt_len=3) == {3, 5, 8}, "it likes what it has seen"
    assert not said(prompt_len=0) & {3, 5, 8}


def test_a_model_that_likes_to_repeat_itself_does_not_where_that_is_penalized() -> None:
    prompt = int32_array(range(5))
    penalized = oracle(prompt, 20, VOCAB, draw=Draw(PENALTIES))
    encouraged = oracle(prompt, 20, VOCAB, draw=Draw(REPEATS))
    assert len(set(penalized)) == 20
    assert len(set(encouraged)) < 10


def test_a_stream_with_penalties_goes_on_the_same_after_its_decode_worker_died() -> None:
    world = World(WorldSpec(num_decode=2))
    world.run_for(0.1)
    request = structs.replace(world.request(range(12), 40), sampling=REPEATS)
    handle = world.submit(request)
    world.run_until(lambda: len(handle.tokens) == 15)
    (busy,) = [name for name in ("decode-0", "decode-1") if world.load(name).get("output_tokens")]
    world.kill(busy)
    world.finish()
    assert handle.tokens == oracle(request.prompt, 40, VOCAB, draw=Draw(REPEATS))
    assert np.unique(handle.tokens).size < 40
