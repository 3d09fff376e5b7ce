"""Whatever way a prompt takes through both workers, tokens, logits and KV are the model library's own.

Each test runs production schedulers, caches, loops and executors over two KV pools, for each page size.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headstart.core.errors import ErrorCode
from headstart.core.messages import Flush
from headstart.executor.build import ExecutorConfig
from headstart.model.source import WeightSource
from headstart.transfer.loopback import Fault
from tests.support.executors import assert_greedy, assert_same_kv, reference_model, write_small_model
from tests.support.stacks import DECODE, PREFILL, Answer, Engine, StackSpec, StackWorld, engines

VOCAB = 311
NUM_TOKENS = 12
POOL_TOKENS = 4096
Engines = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    return WeightSource(write_small_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3"), "dummy", seed=3)


@pytest.fixture(scope="module", params=[1, 16, 64], ids=lambda size: f"page{size}")
def pair(source: WeightSource, request: pytest.FixtureRequest) -> Iterator[Engines]:
    page_size = request.param
    with engines(ExecutorConfig(source, page_size, POOL_TOKENS // page_size, dtype="float32")) as pair:
        yield pair


@pytest.fixture(scope="module")
def reference(source: WeightSource) -> PreTrainedModel:
    return reference_model(source)


def start(pair: Engines, **changes: object) -> StackWorld:
    return StackWorld(*pair, StackSpec(num_top_logprobs=VOCAB, **changes))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def check(world: StackWorld, answers: Sequence[Answer], reference: PreTrainedModel, evicts: bool = False) -> None:
    """Tokens and log-probabilities of each answer, and the KV that the decode worker caches of it: where nothing was
    evicted, of every whole page."""
    num_compared = 0
    for answer in answers:
        sequence = answer.sequence()
        assert len(answer.tokens) == answer.request.stop.max_new_tokens
        assert len(answer.logprobs) == len(answer.tokens) - len(answer.request.output_ids)
        assert_greedy(sequence, reference)
        sequence.pages = world.cached(DECODE, sequence.tokens).tolist()
        sequence.num_computed = len(sequence.pages) * world.page_size
        assert evicts or sequence.num_computed >= world.hit(len(sequence.tokens))
        if sequence.num_computed:
            assert_same_kv(world, sequence, reference)
            num_compared += sequence.num_computed
    assert num_compared


@pytest.mark.parametrize("chunk", [32, 23])
@pytest.mark.behaviour("62")
def test_a_cold_prompt_computed_by_prefill_and_moved_in_several_writes(
    pair: Engines, reference: PreTrainedModel, chunk: int
) -> None:
    world = start(pair, chunk=chunk)
    (answer,) = world.ask(prompt(0, 300), num_tokens=NUM_TOKENS)
    check(world, [answer], reference)
    assert answer.stats.bytes_moved == world.bytes_for(0, 299)
    assert (answer.stats.cached_tokens, answer.stats.decode_prefix_len) == (0, 0)
    whole = {computed // world.page_size for computed in range(chunk, 299, chunk)} - {0}
    assert len(world.posts) == len(whole) + 1  # one a chunk that completes pages, and the rest
    assert sum(posted.num_pages for posted in world.posts) == world.counters()["pages_moved"]
    assert world.counters().get("local_prefill_tokens", 0) == 0


@pytest.mark.behaviour("62")
def test_what_arrived_is_what_prefill_computed_to_the_bit(pair: Engines) -> None:
    world = start(pair)
    tokens = prompt(1, 300)
    world.ask(tokens, num_tokens=1)
    whole = tokens[: world.hit(len(tokens))]
    here, there = world.cached(DECODE, whole), world.cached(PREFILL, whole)
    assert len(here) == len(there) == len(whole) // world.page_size
    assert np.array_equal(world.decode.memory()[here], world.prefill.memory()[there])


def test_generate_itself_gives_the_same_tokens(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens = prompt(2, 90)
    ids = torch.tensor([tokens])
    expected = reference.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    (answer,) = world.ask(tokens, num_tokens=NUM_TOKENS)
    check(world, [answer], reference)
    assert answer.sequence().tokens == expected[0].tolist()


@pytest.mark.behaviour("62")
def test_a_repeated_prompt_moves_its_tail_alone(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens = prompt(3, 150)
    first, again = (world.ask(tokens, num_tokens=NUM_TOKENS)[0] for _ in range(2))
    check(world, [first, again], reference)
    assert again.tokens == first.tokens
    assert again.stats.decode_prefix_len == world.hit(150)
    assert again.stats.bytes_moved == world.bytes_for(world.hit(150), 149)
    assert again.stats.cached_tokens == world.hit(150)


def test_a_repeated_prompt_of_whole_pages_and_a_token_moves_nothing(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens = prompt(4, 129)
    answers = [world.ask(tokens, num_tokens=NUM_TOKENS)[0] for _ in range(2)]
    check(world, answers, reference)
    assert answers[1].stats.bytes_moved == 0
    assert answers[1].stats.cached_tokens == 128
    assert world.counters()["prefill_calls"] == 1


@pytest.mark.behaviour("62")
def test_prompts_that_share_a_prefix(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    common = prompt(5, 400)
    first = world.ask(common + prompt(6, 9), num_tokens=NUM_TOKENS)
    rest = world.ask(*(common + prompt(10 + i, 5 + 31 * i) for i in range(5)), num_tokens=NUM_TOKENS)
    check(world, first + rest, reference)
    shared = 400 // world.page_size * world.page_size
    assert all(answer.stats.decode_prefix_len >= shared for answer in rest)
    for answer in rest:
        end = len(answer.request.prompt) - 1
        assert answer.stats.bytes_moved == world.bytes_for(answer.stats.decode_prefix_len, end)


@pytest.mark.behaviour("62")
def test_a_conversation_of_four_turns(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens, known = prompt(20, 70), 0
    for turn in range(4):
        (answer,) = world.ask(tokens, num_tokens=NUM_TOKENS)
        check(world, [answer], reference)
        assert answer.stats.decode_prefix_len == known
        assert answer.stats.bytes_moved == world.bytes_for(known, len(tokens) - 1)
        tokens = answer.sequence().tokens
        known = world.hit(len(tokens))
        tokens = tokens + prompt(21 + turn, 25)


@pytest.mark.behaviour("62")
def test_sixteen_prompts_of_all_lengths_at_once(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    answers = world.ask(*(prompt(30 + i, 1 + 9 * i) for i in range(16)), num_tokens=NUM_TOKENS)
    check(world, answers, reference)
    for answer in answers:
        hit = answer.stats.decode_prefix_len  # at page size 1, two prompts may begin with the same token
        assert answer.stats.bytes_moved == world.bytes_for(hit, len(answer.request.prompt) - 1)


@pytest.mark.behaviour("A6")
def test_kv_that_is_damaged_on_its_way_is_fetched_again(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    world.injector = lambda posted: Fault(flips=posted.index == 0, late_page_s=0.1 if posted.index == 3 else None)
    answers = [world.ask(prompt(90 + i, 150), num_tokens=NUM_TOKENS)[0] for i in range(2)]
    check(world, answers, reference)
    assert world.counters()["digest_mismatches"] == 2


@pytest.mark.parametrize("has_prefill", [True, False], ids=["remote", "local"])
@pytest.mark.behaviour("28")
def test_answers_after_retraction(pair: Engines, reference: PreTrainedModel, has_prefill: bool) -> None:
    world = start(pair, has_prefill=has_prefill, num_reserved=0, decode_tokens=320)
    answers = world.ask(*(prompt(50 + i, 40) for i in range(5)), num_tokens=50)
    check(world, answers, reference, evicts=True)
    assert world.counters()["retractions"] > 0
    assert sum(answer.stats.num_retractions for answer in answers) == world.counters()["retractions"]


@pytest.mark.parametrize("has_prefill", [True, False], ids=["remote", "local"])
@pytest.mark.behaviour("28")
def test_shared_prefixes_survive_retraction(pair: Engines, reference: PreTrainedModel, has_prefill: bool) -> None:
    world = start(pair, has_prefill=has_prefill, num_reserved=0, decode_tokens=384)
    common = prompt(60, 130)
    world.ask(common, num_tokens=1)
    answers = world.ask(*(common + prompt(61 + i, 6) for i in range(4)), num_tokens=64)
    check(world, answers, reference, evicts=True)
    assert world.counters()["retractions"] > 0


@pytest.mark.behaviour("62")
def test_a_short_delta_is_computed_where_it_is_needed(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair, local_prefill_tokens=64)
    (first,) = world.ask(prompt(70, 82 - NUM_TOKENS), num_tokens=NUM_TOKENS)
    calls = world.counters()["prefill_calls"]
    (second,) = world.ask(first.sequence().tokens + prompt(71, 25), num_tokens=NUM_TOKENS)
    check(world, [first, second], reference)
    assert world.counters()["prefill_calls"] == calls == 1
    assert second.stats.bytes_moved == 0
    assert second.stats.decode_prefix_len == second.stats.cached_tokens == world.hit(82)
    assert world.counters()["local_prefill_tokens"] == 82 + 25 - 1 - world.hit(82)


def test_long_prompts_are_computed_in_chunks_for_want_of_a_prefill_worker(
    pair: Engines, reference: PreTrainedModel
) -> None:
    world = start(pair, has_prefill=False)
    answers = world.ask(*(prompt(80 + i, 133 + i) for i in range(3)), num_tokens=NUM_TOKENS)
    check(world, answers, reference)
    assert all(answer.stats.bytes_moved == answer.stats.cached_tokens == 0 for answer in answers)
    assert world.counters()["local_prefill_tokens"] == 132 + 133 + 134


@pytest.mark.behaviour("62")
def test_hits_without_a_prefill_worker(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair, has_prefill=False)
    tokens = prompt(85, 200)
    (first,) = world.ask(tokens, num_tokens=NUM_TOKENS)
    rest = world.ask(tokens, tokens + prompt(86, 40), first.sequence().tokens + prompt(87, 3), num_tokens=NUM_TOKENS)
    check(world, [first, *rest], reference)
    hits = [world.hit(200), 200 // world.page_size * world.page_size, world.hit(200 + NUM_TOKENS)]
    assert [answer.stats.decode_prefix_len for answer in rest] == hits
    assert [answer.stats.cached_tokens for answer in rest] == hits
    assert rest[0].tokens == first.tokens


@pytest.mark.behaviour("62")
def test_followers_of_one_prompt(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens = prompt(90, 150)
    leader, *followers = world.ask(tokens, tokens, tokens, tokens, num_tokens=NUM_TOKENS)
    check(world, [leader, *followers], reference)
    assert world.counters()["followed"] == 3
    assert leader.stats.bytes_moved == world.bytes_for(0, 149)
    for follower in followers:
        assert follower.tokens == leader.tokens
        assert follower.stats.decode_prefix_len == world.hit(150)
        assert follower.stats.bytes_moved == world.bytes_for(world.hit(150), 149)
    assert world.counters(PREFILL)["tokens_computed"] == 149 + 3 * (149 - world.hit(150))


@pytest.mark.parametrize("has_prefill", [True, False], ids=["remote", "local"])
@pytest.mark.behaviour("62")
def test_an_answer_that_began_elsewhere_goes_on(pair: Engines, reference: PreTrainedModel, has_prefill: bool) -> None:
    tokens = prompt(100, 100)
    elsewhere = start(pair)
    (whole,) = elsewhere.ask(tokens, num_tokens=NUM_TOKENS)
    world = start(pair, has_prefill=has_prefill)
    answer = world.submit(tokens, NUM_TOKENS, output_ids=whole.tokens[:7], attempt=1)
    world.finish()
    check(world, [answer], reference)
    assert answer.tokens == whole.tokens
    assert answer.stats.bytes_moved == (world.bytes_for(0, 106) if has_prefill else 0)


def test_an_answer_goes_on_in_a_later_attempt_on_the_same_worker(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    tokens = prompt(101, 140)
    first = world.submit(tokens, 40, name="one")
    world.run_until(lambda: len(first.tokens) >= 20)
    second = world.submit(tokens, 40, output_ids=first.tokens[:20], attempt=1, name="one")
    world.finish()
    check(world, [second], reference)
    assert first.failed is not None
    assert first.failed.code is ErrorCode.CANCELLED
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert second.stats.decode_prefix_len == min(len(tokens), world.hit(160))


def test_what_the_decode_worker_forgot_comes_from_the_cache_of_prefill(
    pair: Engines, reference: PreTrainedModel
) -> None:
    world = start(pair)
    tokens = prompt(110, 200)
    (first,) = world.ask(tokens, num_tokens=NUM_TOKENS)
    world.send(Flush(1))
    world.run_until(lambda: not len(world.cached(DECODE, tokens)))
    world.decode.pool.fill_(torch.nan)
    (again,) = world.ask(tokens, num_tokens=NUM_TOKENS)
    check(world, [first, again], reference)
    assert again.tokens == first.tokens
    assert again.stats.decode_prefix_len == 0
    assert again.stats.bytes_moved == world.bytes_for(0, 199)
    assert again.stats.prefill_prefix_len == again.stats.cached_tokens == world.hit(200)


@pytest.mark.behaviour("62")
def test_a_write_that_fails_half_way_changes_no_answer(pair: Engines, reference: PreTrainedModel) -> None:
    world = start(pair)
    world.injector = lambda posted: Fault(fails=posted.index == 1)
    answers = world.ask(prompt(120, 200), prompt(121, 170), num_tokens=NUM_TOKENS)
    check(world, answers, reference)
    assert world.counters()["prefill_retries"] == 1


def test_prompts_arrive_while_others_decode_on_reused_pages(pair: Engines, reference: PreTrainedModel) -> None:
    """Pages are evicted and written anew, by peers and by steps, while rows of other prompts read theirs."""
    world = start(pair, local_prefill_tokens=16, decode_tokens=896)
    common = prompt(130, 300)
    answers = []
    for i in range(8):
        tokens = prompt(131 + i, 150 + i) if i % 2 else common + prompt(131 + i, 10)
        answers.append(world.submit(tokens, 30))
        world.run_until(lambda last=answers[-1]: len(last.tokens) >= 6)
    world.finish()
    check(world, answers, reference, evicts=True)
    kept = [len(world.cached(DECODE, answer.sequence().tokens)) * world.page_size for answer in answers]
    assert any(num < world.hit(len(answer.sequence().tokens)) for num, answer in zip(kept, answers, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_in_a_small_pool_with_failing_writes(
    pair: Engines, reference: PreTrainedModel, seed: int
) -> None:
    """Conversations, shared prefixes and strangers: retraction, eviction, followers, retries and lost notices at once."""
    draw = random.Random(seed)
    world = start(
        pair,
        chunk=draw.choice([7, 23, 64]),
        local_prefill_tokens=draw.choice([0, 40]),
        num_reserved=0,
        decode_tokens=draw.choice([576, 640, 768]),
    )
    world.injector = lambda posted: Fault(fails=draw.random() < 0.05, num_notices=draw.choice([1] * 20 + [0, 2]))
    common = prompt(200 + seed, 130)
    answers: list[Answer] = []
    for i in range(12):
        begins = [], common, draw.choice(answers).sequence().tokens if answers else common
        tokens = draw.choice(begins)[:400] + prompt(300 + 20 * seed + i, draw.randint(1, 40))
        answers.append(world.submit(tokens, draw.randint(20, 120)))
        until = world.clock.now() + draw.choice([0, 0, 0.004, 0.03])
        world.run_until(lambda until=until: world.is_idle or world.clock.now() >= until)
    world.finish()
    check(world, answers, reference, evicts=True)
