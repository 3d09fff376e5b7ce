"""Whatever becomes of the workers, every choice ends once and its tokens arrive once, in order."""

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    Failed,
    Flush,
    Flushed,
    Join,
    KillRequest,
    LauncherHello,
    Leave,
    Membership,
    Submit,
    WorkerExited,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, RequestStats
from headstart.gateway.limits import DispatchLimits
from tests.support.dispatchers import SPEC, RecordingSink, World, make_request


def test_a_choice_is_served_and_ends_once():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    to, submit = world.submitted()
    assert to == str(worker)
    world.accept(worker, submit.request.ref)
    world.emit(worker, submit.request.ref, 0, 5, 6)
    world.emit(worker, submit.request.ref, 2, 7)
    world.finish(worker, submit.request.ref, 3)
    world.finish(worker, submit.request.ref, 3)
    assert sink.tokens == [5, 6, 7]
    assert sink.finished[0].stats.cached_tokens == 16
    assert world.dispatcher.counters["late_replies"] == 1
    world.check()


def test_without_a_decode_worker_a_request_fails_at_once():
    world = World()
    world.join("prefill-0", role="prefill")
    assert world.submit().failed[0].code is ErrorCode.UNAVAILABLE
    world.check()


def test_a_request_that_no_worker_can_hold_is_too_long():
    world = World()
    world.join("decode-0", capacity=47)
    assert world.submit(prompt=40, max_new=8).failed[0].code is ErrorCode.TOO_LONG
    assert not world.submit(request_id="s", prompt=40, max_new=7).failed


def test_a_request_goes_only_to_a_worker_that_can_hold_it():
    world = World()
    world.join("decode-0", capacity=20)
    large = world.join("decode-1", capacity=500)
    for i in range(8):
        world.submit(request_id=f"r{i}")
    assert {to for to, _ in world.take(Submit)} == {str(large)}


def test_a_refusal_reaches_the_client_as_it_is():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    _, submit = world.submitted()
    world.reject(worker, submit.request.ref, ErrorCode.INVALID)
    assert sink.failed[0].code is ErrorCode.INVALID
    world.check()


def test_a_full_worker_sends_the_request_to_another_and_all_full_is_busy():
    world = World()
    workers = {str(ref): ref for ref in (world.join("decode-0"), world.join("decode-1"))}
    sink = world.submit()
    first, submit = world.submitted()
    world.reject(workers[first], submit.request.ref, ErrorCode.BUSY)
    second, again = world.submitted()
    assert second != first
    assert again.request.ref.attempt == submit.request.ref.attempt + 1
    world.reject(workers[second], again.request.ref, ErrorCode.BUSY)
    assert sink.failed[0].code is ErrorCode.BUSY
    world.check()


def test_more_unfinished_requests_than_the_bound_are_busy():
    world = World(DispatchLimits(max_unfinished=2))
    world.join("decode-0")
    sinks = [world.submit(request_id=f"r{i}") for i in range(3)]
    assert [sink.is_over for sink in sinks] == [False, False, True]
    assert sinks[2].failed[0].code is ErrorCode.BUSY


def test_an_unanswered_submit_is_repeated_under_the_same_attempt():
    world = World()
    world.join("decode-0")
    world.submit()
    _, first = world.submitted()
    world.run(2.5)
    _, repeat = world.submitted()
    assert repeat.request.ref == first.request.ref
    assert repeat.request.remaining_s < first.request.remaining_s


def test_exit_of_the_worker_moves_the_stream_with_the_tokens_it_has():
    world = World()
    workers = {str(ref): ref for ref in (world.join("decode-0"), world.join("decode-1"))}
    sink = world.submit()
    first, submit = world.submitted()
    world.emit(workers[first], submit.request.ref, 0, 5, 6)
    world.dispatcher.handle("launcher", WorkerExited(workers[first], -9))
    second, again = world.submitted()
    assert second != first
    assert list(again.request.output_ids) == [5, 6]
    assert list(again.request.prompt) == list(submit.request.prompt)
    world.emit(workers[first], submit.request.ref, 2, 99)  # still in the socket when its sender died
    world.emit(workers[second], again.request.ref, 2, 7)
    world.finish(workers[second], again.request.ref, 3)
    assert sink.tokens == [5, 6, 7]
    assert sink.finished
    assert world.dispatcher.counters["late_tokens"] == 1
    world.check()


def test_silence_for_three_seconds_moves_the_stream_and_the_old_worker_is_told_when_it_returns():
    world = World()
    workers = {str(ref): ref for ref in (world.join("decode-0"), world.join("decode-1"))}
    sink = world.submit()
    first, submit = world.submitted()
    world.emit(workers[first], submit.request.ref, 0, 5)
    world.beating.discard(workers[first])
    world.run(2.8)
    assert not world.take(Submit)
    world.run(0.8)
    _, again = world.submitted()
    assert list(again.request.output_ids) == [5]
    world.cancelled()
    world.run(3.0)
    world.emit(workers[first], submit.request.ref, 1, 6)
    assert (first, submit.request.ref) in world.cancelled()
    assert sink.tokens == [5]


def test_a_request_on_two_workers_that_died_is_not_tried_on_a_third():
    world = World()
    workers = {str(ref): ref for ref in (world.join(f"decode-{i}") for i in range(3))}
    sink = world.submit()
    for _ in range(2):
        to, submit = world.submitted()
        world.accept(workers[to], submit.request.ref)
        world.dispatcher.handle("launcher", WorkerExited(workers[to], -11))
    assert not world.take(Submit)
    assert sink.failed[0].code is ErrorCode.WORKER_LOST
    world.check()


@pytest.mark.behaviour("E7")
def test_a_request_that_was_sent_to_a_worker_dead_already_is_tried_on_a_third():
    """Both decode workers die at once: the choice of the first goes to the second before its death is known."""
    world = World()
    workers = {str(ref): ref for ref in (world.join("decode-0"), world.join("decode-1"))}
    sink = world.submit(max_new=2)
    to, submit = world.submitted()
    world.emit(workers[to], submit.request.ref, 0, 5)
    world.dispatcher.handle("launcher", WorkerExited(workers[to], -9))
    to, _ = world.submitted()
    world.dispatcher.handle("launcher", WorkerExited(workers[to], -9))
    back = world.join("decode-0", incarnation=2)
    to, again = world.submitted()
    assert to == str(back)
    world.emit(back, again.request.ref, 1, 6)
    world.finish(back, again.request.ref, 2)
    assert sink.tokens == [5, 6]
    world.check()


def test_a_worker_that_had_taken_a_request_and_was_asked_again_counts_whole_when_it_dies():
    world = World()
    workers = {str(ref): ref for ref in (world.join(f"decode-{i}") for i in range(3))}
    sink = world.submit(remaining_s=600)
    for _ in range(2):
        to, submit = world.submitted()
        world.accept(workers[to], submit.request.ref)
        world.run(10.5)
        assert world.submitted()[1].request.ref == submit.request.ref, "it is asked whether it still has it"
        world.dispatcher.handle("launcher", WorkerExited(workers[to], -11))
        world.beating.discard(workers[to])
    assert not world.take(Submit)
    assert sink.failed[0].code is ErrorCode.WORKER_LOST


def test_a_request_that_kills_workers_before_they_take_it_is_not_tried_on_a_fifth():
    world = World()
    workers = {str(ref): ref for ref in (world.join(f"decode-{i}") for i in range(5))}
    sink = world.submit()
    for _ in range(4):
        to, _ = world.submitted()
        world.dispatcher.handle("launcher", WorkerExited(workers[to], -11))
    assert not world.take(Submit)
    assert sink.failed[0].code is ErrorCode.WORKER_LOST


def test_a_worker_that_drains_hands_its_requests_on_without_blame():
    world = World()
    workers = {str(ref): ref for ref in (world.join(f"decode-{i}") for i in range(4))}
    sink = world.submit()
    for _ in range(3):
        to, _ = world.submitted()
        world.say(workers[to], Leave(workers[to]))
    to, submit = world.submitted()
    world.emit(workers[to], submit.request.ref, 0, *range(10, 18))
    world.finish(workers[to], submit.request.ref, 8)
    assert sink.finished


def test_the_only_worker_restarts_and_the_stream_goes_on():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5)
    world.beating.clear()
    world.dispatcher.handle("launcher", WorkerExited(worker, -9))
    world.run(10.0)
    assert not sink.is_over
    again = world.join("decode-0", incarnation=2)
    to, resumed = world.submitted()
    assert to == str(again)
    assert list(resumed.request.output_ids) == [5]


def test_a_later_incarnation_alone_proves_that_the_former_is_gone():
    world = World()
    world.join("decode-0")
    world.submit()
    world.submitted()
    world.beating.clear()
    world.run(1.5)
    world.take(Submit)
    again = world.join("decode-0", incarnation=2)
    assert world.submitted()[0] == str(again)


@pytest.mark.parametrize("lock_domain", ["the lock of another host", ""])
@pytest.mark.parametrize("former_is_heard", [True, False])
def test_a_later_incarnation_under_another_lock_proves_nothing_of_the_former(lock_domain: str, former_is_heard: bool):
    """Two hosts, two containers, two users: no lock sees both. A former that is silent may be stopped, and write later."""
    world = World()
    world.join("decode-0")
    former = world.join("prefill-0", role="prefill")
    if not former_is_heard:
        world.beating.discard(former)
    later = WorkerRef("prefill-0", 2)
    joining = Join(later, "prefill", SPEC, "tcp://elsewhere", 1000, lock_domain=lock_domain)
    for _ in range(20):
        world.say(later, joining)
        world.run(0.5)
    assert world.dispatcher.registry.get(former).is_alive is former_is_heard
    assert world.dispatcher.counters["contested_names"] == 20
    listed = {peer.worker for _, membership in world.take(Membership) for peer in membership.prefill}
    assert listed == {former}, "the one that may still write"
    world.dispatcher.handle("launcher", WorkerExited(former, -9))
    world.say(later, joining)
    assert world.dispatcher.registry.get(later).is_alive


def test_tokens_already_complete_when_the_worker_dies_finish_the_choice():
    world = World()
    worker = world.join("decode-0")
    by_length, by_stop = world.submit(max_new=2), world.submit(request_id="s")
    refs = [submit.request.ref for _, submit in world.take(Submit)]
    world.emit(worker, refs[0], 0, 5, 6)
    world.emit(worker, refs[1], 0, 5, 2)
    world.dispatcher.handle("launcher", WorkerExited(worker, -9))
    assert by_length.finished[0].finish_reason == "length"
    assert by_stop.finished[0].finish_reason == "stop"
    world.check()


def test_a_gap_is_repaired_by_resubmission_and_repeats_are_dropped():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5)
    world.emit(worker, submit.request.ref, 0, 5)
    world.emit(worker, submit.request.ref, 3, 8)
    _, again = world.submitted()
    assert (str(worker), submit.request.ref) in world.cancelled()
    assert list(again.request.output_ids) == [5]
    world.emit(worker, again.request.ref, 1, 6, 7)
    world.finish(worker, again.request.ref, 3)
    assert sink.tokens == [5, 6, 7]
    assert world.dispatcher.counters["gaps"] == 1
    assert world.dispatcher.counters["duplicate_tokens"] == 1


def test_an_end_that_names_tokens_never_seen_is_a_gap_too():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    _, submit = world.submitted()
    world.finish(worker, submit.request.ref, 3)
    assert not sink.is_over
    assert world.submitted()[1].request.ref.attempt == 1


def test_a_request_that_comes_to_nothing_again_and_again_is_failed():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    for _ in range(8):
        _, submit = world.submitted()
        world.say(worker, Failed(submit.request.ref, ErrorCode.CANCELLED, "the gateway was silent"))
    assert sink.failed[0].code is ErrorCode.UNAVAILABLE


def test_the_deadline_ends_a_request_in_every_state():
    world = World()
    worker = world.join("decode-0")
    running, submitted = world.submit(remaining_s=5), world.submit(request_id="s", remaining_s=5)
    (_, first), _ = world.take(Submit)
    world.emit(worker, first.request.ref, 0, 5)
    world.run(5.2)
    assert running.failed[0].code is ErrorCode.DEADLINE
    assert submitted.failed[0].code is ErrorCode.DEADLINE
    assert len(world.cancelled()) == 2
    queued = World()
    lone = queued.join("decode-0")
    queued.beating.clear()
    queued.run(1.5)
    waiting = queued.submit(remaining_s=1.0)
    assert not queued.take(Submit)
    queued.run(1.1)
    assert waiting.failed[0].code is ErrorCode.DEADLINE
    assert lone.name == "decode-0"
    world.check()
    queued.check()


def test_cancel_ends_all_choices_and_tells_the_worker():
    world = World()
    worker = world.join("decode-0")
    sinks = [world.submit(choice=i) for i in range(3)]
    world.dispatcher.cancel("r")
    assert [sink.failed[0].code for sink in sinks] == [ErrorCode.CANCELLED] * 3
    assert world.cancelled() == [(str(worker), ChoiceRef("r", i, 0)) for i in range(3)]
    world.check()


def test_choices_of_one_request_go_to_one_worker():
    world = World()
    for i in range(3):
        world.join(f"decode-{i}")
    for choice in range(4):
        world.submit(choice=choice)
    assert len({to for to, _ in world.take(Submit)}) == 1


def test_a_stop_string_finishes_the_choice_with_the_workers_account_of_it():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5)
    world.dispatcher.stop("r", 0)
    world.emit(worker, submit.request.ref, 1, 6)
    assert not sink.is_over
    stats = RequestStats(cached_tokens=32)
    world.say(worker, Failed(submit.request.ref, ErrorCode.CANCELLED, "as asked", stats))
    assert sink.tokens == [5]
    assert sink.finished[0].finish_reason == "stop"
    assert sink.finished[0].stats == stats
    assert sink.finished[0].num_tokens == 1
    world.check()


@pytest.mark.parametrize("end", ["silence", "death"])
def test_a_stopped_choice_finishes_also_without_the_workers_word(end):
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    world.dispatcher.stop("r", 0)
    if end == "death":
        world.dispatcher.handle("launcher", WorkerExited(worker, -9))
    else:
        world.run(3.0)
    assert sink.finished[0].finish_reason == "stop"
    world.check()


def test_a_suspect_worker_gets_no_new_work_until_it_is_heard_again():
    world = World()
    worker = world.join("decode-0")
    world.beating.clear()
    world.run(1.6)
    sink = world.submit()
    assert not world.take(Submit)
    assert not sink.is_over
    world.beat(worker)
    world.run(0.6)
    assert world.submitted()[0] == str(worker)


def test_a_wedged_loop_with_a_lively_heartbeat_is_suspect_then_dead():
    world = World()
    worker = world.join("decode-0")
    world.beating.clear()
    record = world.dispatcher.registry.get(worker)
    states = []
    for age in (0.0, 5.0, 31.0):
        world.beat(worker, loop_age_s=age)
        world.run(0.6)
        states.append(record.state.value)
    assert states == ["alive", "suspect", "dead"]


def test_time_in_which_the_gateway_stood_still_is_not_held_against_workers():
    world = World()
    worker = world.join("decode-0")
    world.run(1.0)
    world.clock.time += 30.0
    world.dispatcher.advance()
    assert world.dispatcher.registry.get(worker).is_alive


def test_decode_workers_hear_of_every_change_among_prefill_workers_and_hear_from_us_when_nothing_changes():
    world = World()
    decode = world.join("decode-0")
    world.take(Membership)
    prefill = world.join("prefill-0", role="prefill")
    to, membership = world.take(Membership)[-1]
    assert to == str(decode)
    assert [(peer.worker, peer.address, peer.state) for peer in membership.prefill] == [
        (prefill, "tcp://prefill-0", "alive")
    ]
    world.beating.discard(prefill)
    world.run(1.6)
    assert world.take(Membership)[-1][1].prefill[0].state == "suspect"
    world.dispatcher.handle("launcher", WorkerExited(prefill, -9))
    assert world.take(Membership)[-1][1].prefill[0].state == "dead"
    world.run(2.0)
    assert len(world.take(Membership)) >= 3


def test_an_exit_is_passed_on_to_all_workers_and_cannot_be_announced_by_one():
    world = World()
    decode, prefill = world.join("decode-0"), world.join("prefill-0", role="prefill")
    world.say(decode, WorkerExited(prefill, 0))
    assert world.dispatcher.registry.get(prefill).is_alive
    world.dispatcher.handle("launcher", WorkerExited(prefill, 1))
    assert [to for to, _ in world.take(WorkerExited)] == [str(decode)]
    world.beat(prefill)
    world.run(0.6)
    assert not world.dispatcher.registry.get(prefill).may_return


def test_a_worker_cannot_speak_for_another():
    world = World()
    one, other = world.join("decode-0"), world.join("decode-1")
    world.dispatcher.handle(str(one), Leave(other))
    assert world.dispatcher.registry.get(other).is_alive
    assert world.dispatcher.counters["foreign_messages"] == 1
    sink = world.submit()
    to, submit = world.submitted()
    stranger = other if to == str(one) else one
    world.emit(stranger, submit.request.ref, 0, 9)
    assert sink.tokens == []


def test_a_kill_request_reaches_the_launcher_that_started_the_worker():
    world = World()
    decode = world.join("decode-0")
    world.dispatcher.handle("launcher", LauncherHello(("decode-0",)))
    world.dispatcher.handle("launcher-b", LauncherHello(("prefill-7",)))
    world.say(decode, KillRequest(WorkerRef("prefill-7", 1), "does not answer"))
    world.say(decode, KillRequest(WorkerRef("prefill-8", 1), "does not answer"))
    world.dispatcher.handle("nobody", KillRequest(decode, "mischief"))
    assert [to for to, _ in world.take(KillRequest)] == ["launcher-b", "launcher"]


def test_a_prefill_worker_may_ask_for_the_end_of_a_decode_worker_that_stalls_its_writes():
    world = World()
    decode, prefill = world.join("decode-0"), world.join("prefill-0", role="prefill")
    world.dispatcher.handle("launcher", LauncherHello(("decode-0", "prefill-0")))
    world.say(prefill, KillRequest(decode, "pages are pinned by writes past their deadline"))
    assert [(to, kill.worker) for to, kill in world.take(KillRequest)] == [("launcher", decode)]


def test_a_decode_worker_of_another_model_gets_no_requests_while_one_of_ours_is_there():
    world = World()
    ours = world.join("decode-0")
    other = WorkerRef("decode-1", 1)
    spec = structs.replace(SPEC, model_fingerprint="another")
    joining = Join(other, "decode", spec, "", 10_000)
    world.say(other, joining)
    assert world.dispatcher.registry.get(other) is None
    assert world.dispatcher.counters["misfit_joins"] == 1
    world.say(ours, Leave(ours))
    world.say(other, joining)
    assert world.dispatcher.registry.get(other) is not None


def test_a_decode_worker_of_another_model_than_the_gateways_is_not_taken_in_even_as_the_first():
    world = World(model_fingerprint=SPEC.model_fingerprint)
    other = WorkerRef("decode-1", 1)
    spec = structs.replace(SPEC, model_fingerprint="another")
    world.say(other, Join(other, "decode", spec, "", 10_000))
    assert world.dispatcher.registry.get(other) is None
    ours = world.join("decode-0")
    assert world.dispatcher.registry.get(ours).is_alive


def test_a_refusal_after_the_deadline_is_not_handed_on_but_ends_the_choice_by_its_deadline():
    world = World()
    world.join("decode-0")
    world.join("decode-1")
    sink = world.submit()
    to, submit = world.submitted()
    world.clock.time += submit.request.remaining_s
    world.reject(WorkerRef(to.partition("#")[0], 1), submit.request.ref, ErrorCode.BUSY)
    assert [failed.code for failed in sink.failed] == [ErrorCode.DEADLINE]
    assert world.take(Submit) == []
    world.check()


def test_a_flush_asks_every_worker_and_is_refused_while_requests_run():
    world = World()
    workers = [world.join("decode-0"), world.join("prefill-0", role="prefill")]
    answers = []
    world.dispatcher.flush(lambda ok, pages: answers.append((ok, pages)))
    asked = world.take(Flush)
    assert {to for to, _ in asked} == {str(worker) for worker in workers}
    for worker in workers:
        world.say(worker, Flushed(asked[0][1].flush_id, True, 10))
    assert answers == [(True, 20)]
    world.submit()
    world.dispatcher.flush(lambda ok, pages: answers.append((ok, pages)))
    assert answers[1] == (False, 0)


def test_a_flush_that_a_worker_never_answers_fails_in_time():
    world = World()
    world.join("decode-0")
    answers = []
    world.dispatcher.flush(lambda ok, pages: answers.append((ok, pages)))
    world.run(3.0)
    assert answers == [(False, 0)]


def test_an_idle_dispatcher_without_workers_asks_for_no_wakeup_and_a_busy_one_for_the_nearest():
    world = World()
    assert world.dispatcher.advance() is None
    world.join("decode-0")
    world.submit(remaining_s=0.2)
    assert world.dispatcher.advance() == pytest.approx(world.clock.time + 0.2)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_any_order_of_deaths_losses_and_lies_ends_every_choice_once_with_the_right_tokens(seed, num_workers):
    """A naive worker emits f(prompt, i); messages are lost, repeated and delayed; workers die and come back."""
    rng = Random(seed)
    world = World(seed=seed)
    refs = [world.join(f"decode-{i}") for i in range(num_workers)]
    sinks = {i: world.submit(request_id=f"r{i}", prompt=[i] * 5, max_new=6, remaining_s=40.0) for i in range(5)}
    held: list[tuple[WorkerRef, Submit]] = []
    for _ in range(250):
        for to, submit in world.take(Submit):
            held += [(ref, submit) for ref in refs if str(ref) == to]
        if held and rng.random() < 0.7:
            ref, submit = rng.choice(held)
            done = len(submit.request.output_ids)
            base = int(submit.request.prompt[0]) * 100 + 10
            cut = rng.randrange(done, 7)
            if cut > done and rng.random() < 0.9:
                world.emit(ref, submit.request.ref, done, *range(base + done, base + cut))
            if cut < 6 and rng.random() < 0.9:
                world.emit(ref, submit.request.ref, cut, *range(base + cut, base + 6))
            world.finish(ref, submit.request.ref, 6)
        elif rng.random() < 0.05:
            i = rng.randrange(num_workers)
            world.dispatcher.handle("launcher", WorkerExited(refs[i], -9))
            refs[i] = world.join(f"decode-{i}", incarnation=refs[i].incarnation + 1)
        world.run(0.2)
    world.run(20.0, step=0.4)
    for i, sink in sinks.items():
        assert sink.is_over
        assert sink.tokens == list(range(i * 100 + 10, i * 100 + 10 + len(sink.tokens)))
        if sink.finished:
            assert len(sink.tokens) == 6
    world.check()


def test_an_end_lost_on_the_way_is_noticed_and_the_choice_handed_over_anew():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit(max_new=8)
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5)
    world.run(10.5)
    assert world.submitted()[1].request.ref.attempt == 0  # asked whether it still has it
    world.run(8.0)
    again = world.take(Submit)[-1][1].request
    assert again.ref.attempt == 1
    assert list(again.output_ids) == [5]
    assert not sink.is_over


def test_a_sink_may_end_its_siblings_from_within_its_own_end():
    world = World()
    world.join("decode-0")
    sinks = [RecordingSink() for _ in range(3)]

    def end_all(record: Callable[[Failed], None], failed: Failed) -> None:
        record(failed)
        world.dispatcher.cancel("r")

    for index, sink in enumerate(sinks):
        sink.on_failed = partial(end_all, sink.on_failed)
        world.dispatcher.submit(make_request(choice=index, remaining_s=1.0), sink)
    world.run(2.0)
    assert sum(sink.failed[0].code is ErrorCode.DEADLINE for sink in sinks) == 1
    assert sum(sink.failed[0].code is ErrorCode.CANCELLED for sink in sinks) == 2
    world.check()


def test_a_worker_that_was_only_silent_is_not_held_against_the_request():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit(remaining_s=300.0)
    for attempt in range(4):
        _, submit = world.submitted()
        assert submit.request.ref.attempt == attempt
        world.accept(worker, submit.request.ref)
        world.beating.clear()
        world.run(4.0)
        assert not sink.is_over
        world.beat(worker)
        world.beating.add(worker)
        world.run(0.6)
