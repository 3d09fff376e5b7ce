"""A cluster whose workers launch ahead and guess: every answer is the one of one step and one token at a time."""

import pytest
from worlds import assert_right, make_world, prompt, settle, submit

from headstart.core.request import SamplingParams
from headstart.sim.spec import Modelling

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(seed=8, presence_penalty=1.5, frequency_penalty=0.5),
]


def play(max_steps: int, num_drafts: int, decode_pages: int) -> tuple[list[list[int]], dict[str, float]]:
    """Twelve requests, cacheable or not, some with stop ids; what each answered, and the decode worker's counters."""
    modelling = Modelling(decode_steps_in_flight=(max_steps,), prefill_steps_in_flight=(max_steps,))
    limits = {"num_draft_tokens": num_drafts, "num_reserved_decode_tokens": 2}
    world = make_world(decode_pages=decode_pages, decode=limits, modelling=modelling)
    handles = []
    for number in range(12):
        stops = {"stop_token_ids": (5, 40), "min_new_tokens": 3} if number % 4 == 1 else {}
        tokens = prompt(9 + number, number % 3)
        sampling = SAMPLINGS[number % 3]
        handles.append(submit(world, tokens, 24, sampling=sampling, cacheable=number % 5 > 0, **stops))
        world.run_for(0.01)
    settle(world)
    assert_right(*handles)
    return [handle.tokens for handle in handles], world.load("decode-0")


@pytest.mark.parametrize("decode_pages", [200, 26])
def test_the_same_answers_with_one_and_two_steps_in_flight_and_with_drafts(decode_pages: int) -> None:
    plain, _ = play(1, 0, decode_pages)
    ahead, counters = play(2, 0, decode_pages)
    assert counters["dropped_rows"] > 0, "a stop id was seen one step late"
    guessed, counters = play(1, 3, decode_pages)
    assert 0 < counters["accepted_draft_tokens"] < counters["draft_tokens"]
    both, _ = play(2, 3, decode_pages)
    assert plain == ahead == guessed == both
    if decode_pages == 26:
        assert counters["retractions"] > 0


def test_an_answer_takes_fewer_steps_with_drafts() -> None:
    assert play(1, 3, 200)[1]["steps"] < play(1, 0, 200)[1]["steps"]
