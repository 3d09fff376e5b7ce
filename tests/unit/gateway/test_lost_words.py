"""Words of a worker's last message that never arrive."""

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Submit
from tests.support.dispatchers import World


def test_a_choice_whose_tokens_are_all_here_does_not_wait_long_for_the_word_of_its_end():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit(max_new=3)
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5, 6, 7)
    world.run(1.0)
    assert not sink.is_over  # the worker's own account of it may still come
    world.run(1.7)
    assert sink.tokens == [5, 6, 7]
    assert sink.finished[0].finish_reason == "length"
    world.check()


def test_a_worker_that_says_it_has_ended_the_attempt_is_asked_for_the_rest_under_another():
    world = World()
    worker = world.join("decode-0")
    sink = world.submit(max_new=3)
    _, submit = world.submitted()
    world.emit(worker, submit.request.ref, 0, 5)
    world.run(10.5)  # the other tokens and the end are lost
    world.say(worker, Failed(submit.request.ref, ErrorCode.UNAVAILABLE, "this attempt has ended here"))
    again = world.take(Submit)[-1][1].request
    assert (again.ref.attempt, list(again.output_ids)) == (1, [5])
    assert not sink.is_over
