"""How prompts share a prefill worker's steps: short ones pass, long ones always get on."""

import pytest
from test_prefill import prompt

from headstart.core.messages import PrefillDone, TicketRef
from tests.support.prefill_rig import Rig


def test_a_short_prompt_passes_a_long_one_that_runs() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(100, 1))
    rig.step()
    caller.call(2, prompt(8, 2), first_page=30)
    finished: list[int] = []
    while len(finished) < 2:
        rig.step()
        finished += [mail.ref.ticket for mail in caller.take_mail() if isinstance(mail, PrefillDone)]
    assert finished == [2, 1]


@pytest.mark.behaviour("78")
def test_a_long_prompt_gets_a_quarter_of_every_step_however_many_short_ones_come() -> None:
    rig = Rig(max_running_requests=8)
    caller = rig.caller()
    long = caller.call(1, prompt(160, 1))
    ticket, num_steps = 1, 0
    while PrefillDone not in {type(m) for m in rig.callers[caller.name].mail if getattr(m, "ref", None) == long.ref}:
        if rig.scheduler.load().num_waiting < 3:
            ticket += 1
            caller.call(ticket, [ticket % 50, *prompt(11, ticket)], first_page=40 + 3 * (ticket % 7))
        rig.run_pass()
        before = rig.executor.num_steps
        rig.step()
        num_steps += rig.executor.num_steps - before
    assert ticket > 10, "short ones went on coming and being served"
    assert rig.executor.num_steps <= 160 // 4 + 2
    assert caller.holds(long)


def test_prompts_of_one_length_are_served_in_order_and_one_after_the_other() -> None:
    rig = Rig()
    caller = rig.caller()
    for ticket in range(1, 4):
        caller.call(ticket, prompt(60, ticket), first_page=15 * (ticket - 1))
    finished: list[TicketRef] = []
    while len(finished) < 3:
        rig.step()
        assert rig.scheduler.load().num_running <= 2
        finished += [mail.ref for mail in caller.take_mail() if isinstance(mail, PrefillDone)]
    assert [ref.ticket for ref in finished] == [1, 2, 3]


def test_a_prompt_that_finds_no_pages_is_passed_by_those_that_fit_a_bounded_number_of_times() -> None:
    rig = Rig(num_pages=20, max_running_requests=8)
    caller = rig.caller()
    caller.call(1, prompt(60, 1))  # 15 of 20 pages
    rig.step()
    big = caller.call(2, prompt(24, 2), first_page=15)  # 6 pages: waits for the first
    for ticket in range(3, 6):
        caller.call(ticket, [ticket, *prompt(7, ticket)], first_page=30 + 2 * ticket)
    finished: list[int] = []
    while len(finished) < 5:
        rig.step()
        finished += [mail.ref.ticket for mail in caller.take_mail() if isinstance(mail, PrefillDone)]
    assert set(finished[:3]) == {3, 4, 5}
    assert caller.holds(big)


def test_who_was_passed_often_enough_is_next() -> None:
    rig = Rig(num_pages=20, max_running_requests=8)
    caller = rig.caller()
    caller.call(1, prompt(60, 1))
    rig.links.stall(caller.name)  # the first prompt's pages stay
    rig.run(0.2)
    caller.call(2, prompt(24, 2), first_page=15)
    rig.step()
    (waiting,) = rig.scheduler._waiting
    waiting.num_bypassed = 64
    caller.call(3, prompt(8, 3), first_page=40)
    rig.step()
    assert rig.scheduler.load().num_waiting == 2
