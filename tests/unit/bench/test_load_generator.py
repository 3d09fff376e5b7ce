"""Sessions against a server in virtual time: what is sent when, and what a turn continues."""

import math
from random import Random

import pytest

from headstart.bench.errors import BenchError
from headstart.bench.load_generator import Pace, play
from headstart.bench.workload import Length, MultiTurn, NoReuse, Session, TokenSpan, Turn
from tests.support.bench_targets import SOURCE, Server, VirtualTime, load_env


def played(sessions, pace=None, **options):
    time = VirtualTime()
    server = Server(time)
    for name in ("fails",):
        if name in options:
            setattr(server, name, options.pop(name))
    phase = time.run(play(sessions, pace or Pace(), load_env(server, **options), Random(1)))
    return phase, server


def fresh(length, stream=1):
    return (TokenSpan(stream, 0, length),)


def test_a_turn_is_the_previous_prompt_and_the_servers_own_output_and_fresh_tokens():
    session = Session("s", (Turn(fresh(5), 3), Turn(fresh(4, 2), 2), Turn(fresh(3, 3), 1)))
    _, server = played([session])
    first, second, third = server.prompts
    assert first == SOURCE.tokens(fresh(5))
    assert second == [*first, 1, 2, 3, *SOURCE.tokens(fresh(4, 2))]
    assert third == [*second, 1, 2, *SOURCE.tokens(fresh(3, 3))]


def test_a_turn_that_keeps_less_cuts_the_context():
    session = Session("s", (Turn(fresh(5), 3), Turn(fresh(4, 2), 2, keep=6), Turn(fresh(3, 3), 1, keep=0)))
    _, server = played([session])
    assert server.prompts[1] == server.prompts[0] + [1] + SOURCE.tokens(fresh(4, 2))
    assert server.prompts[2] == SOURCE.tokens(fresh(3, 3))


def test_as_text_a_turn_continues_the_text():
    session = Session("s", (Turn(fresh(2), 3), Turn(fresh(1, 2), 2)))
    _, server = played([session], as_text=True)
    first, second = server.prompts
    assert len(first.split()) == 2
    assert second.startswith(first + "xxx ")


def test_without_token_ids_a_continuing_turn_is_refused_and_single_turns_are_not():
    with pytest.raises(BenchError, match="prompt-format text"):
        played(MultiTurn(1, 2, Length(5), Length(3), Length(2)).build(1).measured, returns_ids=False)
    phase, _ = played(NoReuse(2, Length(5), Length(2)).build(1).measured, returns_ids=False)
    assert all(record.is_complete for record in phase.records)


def test_possible_reuse_counts_whole_blocks_of_earlier_prompts_and_answers():
    session = Session("s", (Turn(fresh(40), 30), Turn(fresh(50, 2), 2), Turn(fresh(40, 1), 2, keep=0)))
    phase, _ = played([session])
    assert [record.request.possible_len for record in phase.records] == [0, 64, 32]


def test_the_last_token_of_an_answer_cannot_be_reused():
    session = Session("s", (Turn(fresh(40), 24), Turn(fresh(50, 2), 2)))
    phase, _ = played([session])
    assert [record.request.possible_len for record in phase.records] == [0, 48]


def test_the_concurrency_limit_holds_and_is_used():
    phase, server = played(NoReuse(9, Length(5), Length(3)).build(1).measured, Pace(max_concurrency=4))
    assert server.most_at_once == 4
    assert len(phase.records) == 9
    assert phase.duration_s == pytest.approx(3 * 4)


def test_a_request_rate_spreads_the_starts_with_the_mean_gap():
    phase, server = played(NoReuse(400, Length(2), Length(1)).build(1).measured, Pace(request_rate=2.0))
    assert len(phase.records) == 400
    assert 0.4 < (server.sent_at[-1] - server.sent_at[0]) / 399 < 0.6
    assert math.isclose(server.sent_at[0], 100.0, abs_tol=5)


def test_closed_loop_waits_the_delay_after_the_answer_at_the_given_speed():
    session = Session("s", (Turn(fresh(5), 3), Turn(fresh(4, 2), 2, delay_s=10.0)))
    _, server = played([session], Pace(speed=2.0))
    assert server.sent_at == [100.0, 100.0 + 4 + 5]


def test_open_loop_sends_at_due_times_but_never_before_the_answer_it_continues():
    session = Session(
        "s", (Turn(fresh(5), 3, due_s=2.0), Turn(fresh(4, 2), 2, due_s=4.0), Turn(fresh(1, 3), 1, due_s=90.0))
    )
    phase, server = played([session], Pace(open_loop=True, speed=2.0))
    assert server.sent_at == [101.0, 105.0, 145.0]
    assert [record.request.late_s for record in phase.records] == [0.0, 3.0, 0.0]


def test_a_failed_turn_ends_its_session_and_no_other():
    sessions = MultiTurn(2, 3, Length(5), Length(3), Length(2)).build(1).measured
    phase, _ = played(sessions, Pace(max_concurrency=1), fails=lambda number: number == 2)
    assert len(phase.records) == 5
    assert phase.num_unsent == 1
    assert [record.answer.error for record in phase.records if not record.is_complete] == ["HTTP 500: no"]
