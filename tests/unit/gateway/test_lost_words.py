"""Words of a worker's last message that never arrive."""

from .world import World


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
