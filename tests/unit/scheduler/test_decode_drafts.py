"""Guessed tokens: they change how many steps an answer takes, and nothing else."""

import pytest

from headstart.core.batch import Row, Sampled
from headstart.core.messages import Tokens
from tests.support.decode_rig import CountingDrafter, Rig, count_up


def drafting(length: int = 3, wrong_at: int = 7, **changes) -> Rig:
    limits = {"num_draft_tokens": 3, "local_prefill_tokens": 100, **changes}
    return Rig(drafter=CountingDrafter(length, wrong_at), **limits)


def deltas(rig: Rig) -> list[tuple[int, tuple[int, ...]]]:
    return [(d.index, d.token_ids) for message in rig.said(Tokens) for d in message.deltas]


def test_right_guesses_make_an_answer_in_fewer_steps() -> None:
    rig = drafting()
    ref = rig.submit("a", range(6), max_new=9)
    rig.run()
    assert rig.answer(ref) == list(range(6, 15))
    assert deltas(rig) == [(0, (6,)), (1, (7, 8, 9, 10)), (5, (11, 12, 13, 14))]
    assert rig.counter("output_tokens") == 9
    assert (rig.counter("draft_tokens"), rig.counter("accepted_draft_tokens")) == (6, 6)


def test_what_stands_behind_a_wrong_guess_is_not_taken_and_its_kv_is_written_again() -> None:
    rig = drafting(wrong_at=1)
    ref = rig.submit("a", range(6), max_new=12)
    rig.run()
    assert rig.answer(ref) == list(range(6, 18))
    assert 0 < rig.counter("accepted_draft_tokens") < rig.counter("draft_tokens")
    assert rig.cached_pages(range(17)) == 4


def test_the_prompts_last_row_has_no_drafts() -> None:
    rig = drafting()
    rig.submit("a", range(6), max_new=9)
    rig.run()
    assert [row.num_drafts for batch in rig.batches for row in batch.rows] == [0, 3, 3]


def test_tokens_behind_a_stop_id_are_dropped_and_their_kv_is_not_counted() -> None:
    rig = drafting()
    ref = rig.submit("a", range(6), max_new=20, stop_token_ids=(8,))
    rig.run()
    assert rig.answer(ref) == [6, 7, 8]
    assert (rig.finished(ref).num_tokens, rig.finished(ref).stop_token_id) == (3, 8)
    assert rig.cached_pages(range(12)) == 2
    assert rig.is_clean()


@pytest.mark.parametrize("max_new", range(1, 10))
def test_no_answer_is_longer_than_it_may_be(max_new: int) -> None:
    rig = drafting()
    ref = rig.submit("a", range(6), max_new=max_new)
    rig.run()
    assert rig.answer(ref) == list(range(6, 6 + max_new))
    assert max(row.start + row.num_new for batch in rig.batches for row in batch.rows) <= 6 + max_new - 1


def test_all_positions_of_a_row_have_the_same_ids_banned() -> None:
    rig = drafting()
    ref = rig.submit("a", range(6), max_new=12, min_new_tokens=4, stop_token_ids=(8, 12))
    rig.run()
    assert rig.answer(ref) == [6, 7, 8, 9, 10, 11, 12]
    spans = [(row.sample.output_index, row.num_drafts, row.sample.banned_ids) for b in rig.batches for row in b.rows]
    assert all(first + num_drafts < 4 for first, num_drafts, banned in spans if banned)
    assert all(first >= 4 for first, _, banned in spans if not banned)


def test_logprobs_are_those_of_the_tokens_that_were_taken() -> None:
    rig = drafting()
    rig.model = lambda row: said_with_logprobs(row)
    rig.submit("a", range(6), max_new=20, stop_token_ids=(8,), num_top_logprobs=1)
    rig.run()
    told = [d for message in rig.said(Tokens) for d in message.deltas]
    assert [(d.token_ids, d.logprobs, d.top_logprobs) for d in told] == [
        ((6,), (-6.0,), (((6, -6.0),),)),
        ((7, 8), (-7.0, -8.0), (((7, -7.0),), ((8, -8.0),))),
    ]


def said_with_logprobs(row: Row) -> Sampled:
    token = count_up(row)
    return Sampled(0, (token,), (-float(token),), (((token, -float(token)),),))


def test_a_row_with_drafts_is_not_followed_before_its_length_is_known() -> None:
    rig = drafting(max_steps=2)
    ref = rig.submit("a", range(6), max_new=12)
    rig.advance()
    rig.launch()
    assert rig.launch() is None, "there is something to propose behind the token in flight"
    rig.land()
    assert rig.launch().rows[0].num_drafts == 3
    assert rig.launch() is None
    rig.run()
    assert rig.answer(ref) == list(range(6, 18))


def test_a_row_of_which_nothing_is_guessed_goes_ahead() -> None:
    rig = drafting(length=0, max_steps=2)
    rig.submit("a", range(6), max_new=12)
    rig.advance()
    assert rig.launch()
    assert rig.launch().rows[0].pending is not None


def test_drafts_make_nobody_give_way() -> None:
    """Seven tokens of prompt and one page: there is room for one draft, then for none."""
    rig = drafting(num_pages=2)
    ref = rig.submit("a", range(5), max_new=4, cacheable=False)
    rig.run()
    assert rig.answer(ref) == [5, 6, 7, 8]
    rig = drafting(num_pages=5, num_reserved_decode_tokens=0)
    refs = [rig.submit(name, range(100 * k, 100 * k + 7), max_new=2, cacheable=False) for k, name in enumerate("ab")]
    rig.run()
    assert rig.counter("retractions") == 0
    assert [rig.answer(ref) for ref in refs] == [[7, 8], [107, 108]]


def test_without_a_limit_there_are_no_drafts() -> None:
    rig = drafting(num_draft_tokens=0)
    rig.submit("a", range(6), max_new=9)
    rig.run()
    assert all(row.num_drafts == 0 for batch in rig.batches for row in batch.rows)
    assert len(rig.batches) == 9
