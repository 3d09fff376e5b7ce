"""The prefill worker seen from a decode worker: what is written where, and when which answer leaves."""

import math

import pytest
from msgspec import structs
from prefill_rig import DECODE, NAMESPACE, Caller, Rig, spec_of

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.identity import KVSpec, cache_namespace
from headstart.core.messages import (
    Drain,
    Hello,
    KillRequest,
    PrefillDone,
    PrefillFailed,
    Refused,
    TicketClosed,
    TicketRef,
    Welcome,
    WorkerExited,
    WorkerRef,
)
from headstart.scheduler.checksums import page_checksums
from headstart.transfer.contract import Completed, Notice, PeerLost
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import Fate, judge_nth

REF = TicketRef(1, 0)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(7 * i + first) % 50 for i in range(length)]


def failure(caller: Caller) -> PrefillFailed:
    (message,) = caller.take_mail()
    assert isinstance(message, PrefillFailed)
    return message


def done(prefix_len: int, num_computed: int, ticket: int = 1) -> object:
    return Matching(PrefillDone, ref=TicketRef(ticket, 0), prefix_len=prefix_len, num_computed=num_computed)


class Matching:
    """Equal to a message of a type with these fields: messages themselves compare by identity."""

    def __init__(self, kind: type, **fields: object) -> None:
        self.kind, self.fields = kind, fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.kind) and all(getattr(other, k) == v for k, v in self.fields.items())

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.fields})"


def chunks_of(caller: Caller) -> list[tuple[int, int]]:
    """(first, count) of every notice the caller got."""
    caller.take_mail()
    return sorted((notice.first, notice.count) for notice in caller.notices)


# ---- handshake -------------------------------------------------------------------------------------------------------


def test_a_hello_with_the_same_spec_is_welcomed_as_often_as_it_is_said() -> None:
    rig = Rig(capacity_tokens=200, credit_tokens=77)
    caller = rig.caller()
    caller.hello()
    (welcome,) = caller.take_mail()
    assert isinstance(welcome, Welcome)
    assert (welcome.capacity_tokens, welcome.credit_tokens) == (200, 77)


def with_dtype(spec: KVSpec, dtype: str) -> KVSpec:
    """The same layout of numbers of another type."""
    (group,) = spec.layout.groups
    parts = tuple(structs.replace(part, dtype=dtype) for part in group.parts)
    layout = structs.replace(spec.layout, groups=(structs.replace(group, parts=parts),))
    return structs.replace(spec, layout=layout)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("page_size", spec_of(8)),
        ("kv_dtype", with_dtype(spec_of(4), "float32")),
        ("model_fingerprint", structs.replace(spec_of(4), model_fingerprint="x")),
        ("protocol_version", structs.replace(spec_of(4), protocol_version=9)),
    ],
)
def test_behaviour_48_and_75_a_mismatch_is_refused_with_both_values_and_both_live(field: str, theirs: KVSpec) -> None:
    rig = Rig()
    caller = rig.caller()
    caller.hello(theirs)
    (refused,) = caller.take_mail()
    assert isinstance(refused, Refused)
    assert field in refused.message
    assert repr(theirs.described()[field]) in refused.message
    assert repr(spec_of(4).described()[field]) in refused.message
    assert rig.scheduler.load().mismatches == (refused.message,)
    assert all(name in refused.message for name in ("prefill-0", "decode-0"))
    call = rig.caller(WorkerRef("decode-1", 1)).call(1, prompt(9))
    rig.run()
    assert rig.callers["decode-1#1"].holds(call)


def test_a_mismatch_is_reported_until_the_worker_comes_back_with_the_same_settings_or_has_ended() -> None:
    rig = Rig()
    mended, ended = rig.caller(), rig.caller(WorkerRef("decode-1", 1))
    for caller in (mended, ended):
        caller.hello(spec_of(8))
    assert len(rig.scheduler.load().mismatches) == 2
    mended.hello()
    assert ["decode-1" in text for text in rig.scheduler.load().mismatches] == [True]
    rig.scheduler.handle("gateway", WorkerExited(WorkerRef("decode-1", 0), 0))
    assert len(rig.scheduler.load().mismatches) == 1, "a former incarnation"
    rig.scheduler.handle("gateway", WorkerExited(ended.worker, 0))
    assert rig.scheduler.load().mismatches == ()


def test_a_pool_that_cannot_be_reached_now_is_not_refused_for_good() -> None:
    rig = Rig()
    caller = rig.callers["decode-0#1"] = Caller(rig, DECODE)
    caller.send(Hello(DECODE, spec_of(4), b"not a pool"))
    assert caller.take_mail() == []
    assert rig.counter("unreachable_callers") == 1
    caller.hello()
    (answer,) = caller.take_mail()
    assert isinstance(answer, Welcome)


def test_a_call_before_hello_is_refused_but_not_as_invalid() -> None:
    rig = Rig()
    caller = rig.callers["decode-0#1"] = Caller(rig, DECODE)
    caller.call(1, prompt(9))
    assert failure(caller).code is ErrorCode.UNAVAILABLE


def test_a_hello_in_another_name_or_of_a_former_incarnation_is_ignored() -> None:
    rig = Rig()
    rig.caller(WorkerRef("decode-0", 2))
    old = rig.callers["decode-0#1"] = Caller(rig, DECODE)
    old.hello()
    assert old.take_mail() == []
    assert rig.counter("stray_messages") == 1


# ---- what is computed and written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 53])
def test_case_G16_every_prompt_length_around_page_and_chunk_is_written_whole(page_size: int, length: int) -> None:
    rig = Rig(page_size=page_size)
    caller = rig.caller()
    call = caller.call(1, prompt(length))
    rig.run()
    assert caller.holds(call)
    assert sorted(caller.written(1)) == list(range(len(call.dst_pages)))
    assert caller.take_mail() == [done(0, length)]
    assert rig.is_clean()


@pytest.mark.parametrize("start", [0, 4, 8, 20, 36])
def test_case_C6_and_C9_only_the_delta_is_written_and_at_its_positions(start: int) -> None:
    rig = Rig()
    caller = rig.caller()
    call = caller.call(1, prompt(38), start=start, first_page=5)
    rig.run()
    assert caller.holds(call)
    assert rig.counter("pages_posted") == math.ceil((38 - start) / 4)
    assert not caller.pool[:5].any()
    assert not caller.pool[5 + len(call.dst_pages) :].any()


def test_behaviour_8_chunks_below_the_callers_prefix_send_nothing_and_the_cursor_never_moves_back() -> None:
    rig = Rig()
    caller = rig.caller()
    call = caller.call(1, prompt(64), start=40)  # 2.5 chunks of 16
    rig.run(0.025)
    assert (rig.counter("tokens_computed"), rig.counter("pages_posted")) == (32, 0)
    rig.run()
    assert chunks_of(caller) == [(0, 2), (2, 4)]
    assert caller.holds(call)
    assert rig.counter("recomputed_tokens") == 40


def test_behaviour_9_an_own_hit_beyond_the_callers_is_sent_at_once_and_starts_at_the_callers() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(32))
    rig.run()
    call = caller.call(2, prompt(32) + prompt(10, first=3), start=8, first_page=20)
    rig.run_pass()
    assert rig.counter("pages_posted") == 8 + 6  # the second call's own 32 tokens less the caller's 8, before any step
    rig.run()
    assert caller.holds(call)
    assert caller.take_mail()[-1] == done(32, 10, ticket=2)
    assert rig.counter("pages_posted") == 8 + 9


def test_behaviour_10_a_start_within_a_chunk_sends_the_chunks_upper_part() -> None:
    rig = Rig()
    caller = rig.caller()
    call = caller.call(1, prompt(40), start=24)
    rig.run()
    assert chunks_of(caller) == [(0, 2), (2, 2)]
    assert caller.holds(call)


def test_behaviour_11_a_page_that_a_chunk_leaves_partial_is_sent_once_with_the_next() -> None:
    rig = Rig(chunked_prefill_size=10)
    caller = rig.caller()
    call = caller.call(1, prompt(25))
    rig.run()
    assert chunks_of(caller) == [(0, 2), (2, 3), (5, 2)]
    assert caller.holds(call)


def test_behaviour_12_a_chunk_without_a_whole_page_sends_no_message() -> None:
    rig = Rig(page_size=16, chunked_prefill_size=5)
    caller = rig.caller()
    caller.call(1, prompt(14))
    rig.run()
    assert len(caller.written(1)) == 1
    assert len(caller.notices) == 1


def test_chunks_are_written_while_the_next_is_computed() -> None:
    rig = Rig(transfer_s=0.002)
    caller = rig.caller()
    caller.call(1, prompt(64))
    rig.run(0.019)
    assert caller.written(1) == [0, 1, 2, 3]
    assert rig.executor.finish_at is not None


def test_steps_hold_no_more_tokens_than_the_chunk_size_over_all_prompts() -> None:
    rig = Rig(chunked_prefill_size=16)
    caller = rig.caller()
    for ticket in range(3):
        caller.call(ticket, prompt(10, first=ticket), first_page=3 * ticket)
    rig.run_pass()
    rig.run()
    assert rig.executor.num_steps == 2
    assert {message.ref.ticket for message in caller.take_mail() if isinstance(message, PrefillDone)} == {0, 1, 2}


# ---- own cache -------------------------------------------------------------------------------------------------------


def test_case_C11_a_prompt_seen_before_hits_every_whole_page_and_is_counted_once() -> None:
    rig = Rig()
    caller = rig.caller()
    for ticket in range(3):
        caller.call(ticket, prompt(50), first_page=13 * ticket)
        rig.run()
    assert [m.prefix_len for m in caller.take_mail() if isinstance(m, PrefillDone)] == [0, 48, 48]
    assert rig.counter("prompt_tokens") == 150
    assert rig.counter("hit_tokens") == 96
    assert rig.counter("tokens_computed") == 54


def test_a_full_hit_takes_no_step() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(48))
    rig.run()
    steps = rig.executor.num_steps
    call = caller.call(2, prompt(48), first_page=20)
    rig.run()
    assert rig.executor.num_steps == steps
    assert caller.holds(call)


def test_a_prompt_that_arrives_while_its_twin_is_computed_reuses_all_but_the_last_chunk() -> None:
    rig = Rig()
    one, two = rig.caller(), rig.caller(WorkerRef("decode-1", 1))
    first, second = one.call(1, prompt(48)), two.call(1, prompt(48))
    rig.run()
    assert one.holds(first)
    assert two.holds(second)
    assert rig.counter("tokens_computed") <= 48 + 16


def test_behaviour_14_and_case_K8_another_salt_or_adapter_never_hits() -> None:
    rig = Rig()
    caller = rig.caller()
    names = [NAMESPACE, cache_namespace(tenant_salt=b"b"), cache_namespace(adapter="b")]
    calls = [caller.call(i, prompt(16), first_page=4 * i, namespace=name) for i, name in enumerate(names)]
    rig.run()
    assert [m.prefix_len for m in caller.take_mail() if isinstance(m, PrefillDone)] == [0, 0, 0]
    assert all(caller.holds(call) for call in calls)


def test_behaviour_32_an_uncacheable_call_neither_hits_nor_is_hit() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(16), cacheable=False)
    rig.run()
    assert rig.cache.counts().cached == 0
    caller.call(2, prompt(16), first_page=4)
    rig.run()
    caller.call(3, prompt(16), first_page=8, cacheable=False)
    rig.run()
    assert [m.prefix_len for m in caller.take_mail() if isinstance(m, PrefillDone)] == [0, 0, 0]


def test_two_equal_prompts_at_once_keep_one_copy() -> None:
    rig = Rig(chunked_prefill_size=64)
    caller = rig.caller()
    first, second = caller.call(1, prompt(20)), caller.call(2, prompt(20), first_page=5)
    rig.run()
    assert caller.holds(first)
    assert caller.holds(second)
    assert rig.cache.counts().cached == 5
    assert rig.is_clean()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 3},
        {"start": -4},
        {"start": 20},
        {"start": 24},
        {"dst_pages": int32_array(range(4))},
        {"dst_pages": int32_array(range(6))},
        {"dst_pages": int32_array(())},
        {"dst_pages": int32_array((1, 2, 3, 4, 1))},
        {"dst_pages": int32_array((1, 2, 3, 4, -1))},
        {"tokens": int32_array(())},
        {"remaining_s": math.nan},
        {"remaining_s": math.inf},
    ],
    ids=str,
)
def test_behaviour_13_a_malformed_call_is_refused_and_the_process_lives(wrong: dict[str, object]) -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(20), **wrong)
    assert failure(caller).code is ErrorCode.INVALID
    call = caller.call(2, prompt(20))
    rig.run()
    assert caller.holds(call)
    assert rig.is_clean()


def test_a_target_page_outside_the_callers_pool_ends_the_call_and_nothing_else() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(8), dst_pages=int32_array((3, 64)))
    other = caller.call(2, prompt(8, first=1), first_page=10)
    rig.run()
    assert caller.take_mail()[0] == Matching(PrefillFailed, ref=REF)
    assert caller.holds(other)
    assert rig.is_clean()


def test_a_prompt_beyond_capacity_is_too_long() -> None:
    rig = Rig(capacity_tokens=19)
    caller = rig.caller()
    caller.call(1, prompt(20))
    assert failure(caller).code is ErrorCode.TOO_LONG


def test_a_caller_that_ignores_its_credit_is_told_busy_and_costs_nothing() -> None:
    rig = Rig(credit_tokens=30)
    caller, other = rig.caller(), rig.caller(WorkerRef("decode-1", 1))
    for ticket in range(1, 6):
        caller.call(ticket, prompt(20, ticket), first_page=5 * ticket)
    failures = [mail for mail in caller.take_mail() if isinstance(mail, PrefillFailed)]
    assert [failure.ref.ticket for failure in failures] == [2, 3, 4, 5]
    assert {failure.code for failure in failures} == {ErrorCode.BUSY}
    other.call(1, prompt(20, 7))
    rig.run()
    assert caller.take_mail() == [done(0, 20)]
    assert other.take_mail() == [done(0, 20)]
    caller.call(6, prompt(20, 6))
    rig.run()
    assert caller.take_mail() == [done(0, 20, ticket=6)]
    assert rig.is_clean()


def test_a_call_without_time_left_is_refused() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(20), remaining_s=0.0)
    assert failure(caller).code is ErrorCode.DEADLINE


def test_behaviour_42_a_repeated_call_is_ignored_while_open_and_refused_after() -> None:
    rig = Rig()
    caller = rig.caller()
    call = caller.call(1, prompt(20))
    rig.run_pass()
    caller.send(call)
    rig.run()
    assert caller.take_mail() == [done(0, 20)]
    assert sorted(caller.written(1)) == [0, 1, 2, 3, 4]
    caller.send(call)
    rig.run()
    assert failure(caller).code is ErrorCode.UNAVAILABLE
    assert sorted(caller.written(1)) == [0, 1, 2, 3, 4]


def test_another_attempt_of_a_ticket_is_another_call() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(20))
    again = caller.call(1, prompt(20), first_page=10, ref=TicketRef(1, 1))
    rig.run()
    assert len(caller.take_mail()) == 2
    assert caller.holds(again)


def test_tombstones_stay_bounded_and_older_tickets_stay_refused() -> None:
    rig = Rig()
    caller = rig.caller()
    for ticket in range(5000):
        caller.cancel(ticket)
    caller.take_mail()
    caller.call(3, prompt(20))
    assert failure(caller).code is ErrorCode.UNAVAILABLE
    call = caller.call(5000, prompt(20))
    rig.run()
    assert caller.holds(call)


# ---- cancel ----------------------------------------------------------------------------------------------------------


def test_behaviour_41_a_cancel_for_a_ticket_never_seen_is_answered_and_the_call_refused_when_it_comes() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.cancel(1)
    assert caller.take_mail() == [Matching(TicketClosed, ref=REF)]
    caller.call(1, prompt(20))
    assert failure(caller).code is ErrorCode.UNAVAILABLE
    rig.run()
    assert rig.executor.num_steps == 0


def test_case_F1_a_cancelled_prompt_stops_at_the_next_chunk_and_the_one_behind_it_starts() -> None:
    rig = Rig(transfer_s=0.0)
    caller = rig.caller()
    caller.call(1, prompt(160))
    rig.run(0.025)
    call = caller.call(2, prompt(8, first=1), first_page=50)
    caller.cancel(1)
    rig.run(0.022)
    assert caller.take_mail() == [Matching(TicketClosed, ref=REF), done(0, 8, ticket=2)]
    assert caller.holds(call)
    assert rig.counter("tokens_computed") == 3 * 16 + 8


@pytest.mark.parametrize("passes", range(10))
def test_behaviour_36_a_cancel_is_answered_only_when_no_write_is_open(passes: int) -> None:
    rig = Rig(transfer_s=0.015)
    caller = rig.caller()
    caller.call(1, prompt(48))
    for _ in range(passes):
        rig.step()
    caller.cancel(1)
    for _ in range(100):
        if caller.mail:
            break
        rig.step()
    (*_, answer) = caller.take_mail()
    assert rig.links.num_open_writes() == 0
    assert isinstance(answer, TicketClosed)
    before = caller.pool.copy()
    rig.run()
    assert (caller.pool == before).all()
    assert rig.is_clean()


def test_the_step_in_flight_keeps_the_pages_of_a_cancelled_call_until_it_is_out() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(40))
    rig.run_pass()
    assert rig.cache.counts().private == 10
    caller.cancel(1)
    (answer,) = caller.take_mail()
    assert isinstance(answer, TicketClosed)
    assert (rig.cache.counts().inflight, rig.cache.counts().free) == (4, 60)
    rig.scheduler.check()
    rig.run()
    assert rig.is_clean()


def test_repeated_cancels_of_a_running_call_get_one_answer() -> None:
    rig = Rig(transfer_s=0.05)
    caller = rig.caller()
    caller.call(1, prompt(48))
    rig.run(0.02)
    caller.cancel(1)
    caller.cancel(1)
    assert caller.take_mail() == []
    rig.run()
    assert caller.take_mail() == [Matching(TicketClosed, ref=REF)]


# ---- failed writes and lost peers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("fate", [Fate(refused=True), Fate(fails=True)], ids=["post refused", "write failed"])
def test_case_C8_and_E4_a_failed_chunk_ends_the_attempt_after_its_other_writes(k: int, fate: Fate) -> None:
    rig = Rig(transfer_s=0.012)
    rig.links.judge = judge_nth({k: fate})
    caller = rig.caller()
    caller.call(1, prompt(64))
    rig.run()
    assert failure(caller).code is ErrorCode.UNAVAILABLE
    indices = caller.written(1)
    assert len(indices) == len(set(indices))
    assert not set(range(4 * k, 4 * k + 4)) & set(indices)
    assert rig.links.num_open_writes() == 0
    assert rig.is_clean()
    again = caller.call(2, prompt(64), first_page=20)
    rig.run()
    assert caller.holds(again)


def test_a_failed_attempt_is_not_answered_while_a_write_is_open() -> None:
    rig = Rig(transfer_s=0.001)
    rig.links.judge = judge_nth({0: Fate(delay_s=1.0), 1: Fate(fails=True)})
    caller = rig.caller()
    caller.call(1, prompt(32))
    rig.run(0.5)
    assert caller.take_mail() == []
    rig.run(1.0)
    assert failure(caller).code is ErrorCode.UNAVAILABLE


def test_case_B9_events_of_handles_that_ended_are_counted_and_ignored() -> None:
    rig = Rig()
    caller = rig.caller()
    caller.call(1, prompt(8))
    rig.run()
    for event in (Completed(0), Completed(99), Notice(b"?"), PeerLost("nobody")):
        rig.scheduler.on_transfer(event)
    assert rig.counter("stray_events") == 3
    assert rig.is_clean()


def test_behaviour_38_a_killed_caller_costs_nothing_and_others_are_served() -> None:
    rig = Rig(transfer_s=0.005)
    dead, other = rig.caller(), rig.caller(WorkerRef("decode-1", 1))
    dead.call(1, prompt(100))
    dead.call(2, prompt(100, first=1), first_page=30)
    call = other.call(1, prompt(20, first=2))
    rig.run(0.02)
    rig.links.kill(dead.name)
    rig.scheduler.handle("gateway", WorkerExited(DECODE, -9))
    dead.take_mail()
    rig.run()
    assert dead.take_mail() == []
    assert other.holds(call)
    assert rig.is_clean()
    assert rig.scheduler.load().num_running == 0


def test_a_lost_transport_ends_the_callers_calls_and_a_new_hello_mends_it() -> None:
    rig = Rig(transfer_s=0.005)
    caller = rig.caller()
    caller.call(1, prompt(100))
    caller.call(2, prompt(100, first=1), first_page=30)
    rig.run(0.02)
    rig.scheduler.on_transfer(PeerLost(caller.name))
    caller.call(3, prompt(8, first=9))
    rig.run()
    codes = {message.ref.ticket: message.code for message in caller.take_mail()}
    assert codes == dict.fromkeys((1, 2, 3), ErrorCode.UNAVAILABLE)
    assert rig.is_clean()
    caller.hello()
    call = caller.call(4, prompt(8), first_page=60)
    rig.run()
    assert caller.holds(call)


def test_a_later_incarnation_proves_the_end_of_the_former() -> None:
    rig = Rig(transfer_s=0.005)
    caller = rig.caller()
    caller.call(1, prompt(100))
    rig.run(0.02)
    rig.links.kill(caller.name)
    heir = rig.caller(WorkerRef("decode-0", 2))
    call = heir.call(1, prompt(20))
    rig.run()
    assert heir.holds(call)
    assert rig.scheduler.load().num_running == 0
    assert rig.is_clean()


# ---- room and time ---------------------------------------------------------------------------------------------------


def test_case_A3_source_pages_stay_until_sent_and_the_next_prompt_waits_for_them() -> None:
    rig = Rig(num_pages=10, transfer_s=2.0)
    caller = rig.caller()
    first, second = caller.call(1, prompt(32)), caller.call(2, prompt(32, first=1), first_page=8)
    rig.run(1.5)
    assert rig.scheduler.load().num_waiting == 1
    rig.run(8.0)
    assert caller.holds(first)
    assert caller.holds(second)
    assert rig.is_clean()


def test_prompts_wait_in_order_and_a_reservation_is_for_the_whole_prompt() -> None:
    rig = Rig(num_pages=12, transfer_s=0.001)
    caller = rig.caller()
    for ticket in range(4):
        caller.call(ticket, prompt(40, first=ticket), first_page=10 * ticket)
    rig.run(5.0)
    assert [message.ref.ticket for message in caller.take_mail()] == [0, 1, 2, 3]
    assert rig.is_clean()


def test_a_deadline_ends_a_waiting_and_a_running_call() -> None:
    rig = Rig(num_pages=12)
    caller = rig.caller()
    caller.call(1, prompt(48), remaining_s=0.025)
    caller.call(2, prompt(48, first=1), first_page=12, remaining_s=0.02)
    rig.run()
    codes = [(message.ref.ticket, message.code) for message in caller.take_mail()]
    assert sorted(codes) == [(1, ErrorCode.DEADLINE), (2, ErrorCode.DEADLINE)]
    assert rig.is_clean()


def test_after_the_deadline_nothing_is_posted() -> None:
    rig = Rig(chunked_prefill_size=8)
    caller = rig.caller()
    caller.call(1, prompt(48), remaining_s=0.025)
    rig.run(0.03)
    posted = rig.counter("pages_posted")
    rig.run()
    assert rig.counter("pages_posted") == posted


def test_a_caller_that_stalls_writes_past_their_deadline_is_counted_and_its_end_asked_for() -> None:
    rig = Rig(num_pages=20)
    caller = rig.caller()
    caller.call(1, prompt(40), remaining_s=0.1)
    rig.run(0.02)
    rig.links.stall(caller.name)
    rig.run(1.0)
    assert caller.take_mail() == []
    assert rig.scheduler.load().overdue_pages >= 4
    assert rig.cache.counts().free + rig.cache.counts().cached < 20
    rig.run(4.5)
    kills = [message for recipient, message in rig.sent if recipient == "gateway"]
    assert [kill.worker for kill in kills if isinstance(kill, KillRequest)] == [DECODE]
    rig.links.kill(caller.name)
    rig.scheduler.handle("gateway", WorkerExited(DECODE, -9))
    rig.run()
    assert rig.is_clean()


def test_each_notice_has_the_checksums_of_what_its_caller_finds_in_its_own_pool() -> None:
    rig = Rig()
    caller = rig.caller()
    warm = caller.call(1, prompt(18))
    rig.run()
    verified = caller.call(2, prompt(42), start=12, first_page=20, verify=True)
    rig.run()
    assert len(caller.written(2)) == 8
    for notice in caller.notices:
        if notice.ref == warm.ref:
            assert notice.checksums == b""
            continue
        pages = verified.dst_pages[notice.first : notice.first + notice.count]
        digests = HostDigests(caller.pool.view("u1")).digest(pages)
        assert notice.checksums == page_checksums(digests, verified.tokens, 12 + 4 * notice.first, 4)


def test_draining_finishes_what_it_has_and_takes_nothing_new() -> None:
    rig = Rig()
    caller = rig.caller()
    first = caller.call(1, prompt(48))
    waiting = caller.call(2, prompt(48, first=1), first_page=20)
    rig.run_pass()
    rig.scheduler.handle("gateway", Drain())
    caller.call(3, prompt(8))
    assert failure(caller).code is ErrorCode.UNAVAILABLE
    rig.run()
    assert caller.holds(first)
    assert caller.holds(waiting)


def test_load_tells_queues_and_pages() -> None:
    rig = Rig(max_running_requests=1)
    caller = rig.caller()
    caller.call(1, prompt(40))
    caller.call(2, prompt(30, first=1), first_page=10)
    rig.run_pass()
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (1, 1, 70)
    assert load.private_pages == 10
    assert load.free_pages == 54
