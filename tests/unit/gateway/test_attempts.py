"""What a worker says of an attempt that is over counts for nothing, also where the same worker has the next one."""

import pytest
from msgspec import structs

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, Rejected, WorkerRef
from headstart.core.request import ChoiceRef, RequestStats
from tests.support.dispatchers import RecordingSink, World


def handed_over_anew() -> tuple[World, WorkerRef, RecordingSink, ChoiceRef, ChoiceRef]:
    """Tokens 0 and 1 of the first attempt came, the third was lost: the only worker gets a second attempt."""
    world = World()
    worker = world.join("decode-0")
    sink = world.submit()
    old = world.submitted()[1].request.ref
    world.accept(worker, old)
    world.emit(worker, old, 0, 10, 11)
    world.emit(worker, old, 3, 13)
    to, submit = world.submitted()
    assert to == str(worker)
    assert submit.request.output_ids.tolist() == [10, 11]
    new = submit.request.ref
    assert new == structs.replace(old, attempt=old.attempt + 1)
    world.accept(worker, new)
    return world, worker, sink, old, new


def test_tokens_of_an_earlier_attempt_are_dropped_even_at_the_expected_index() -> None:
    world, worker, sink, old, new = handed_over_anew()
    world.emit(worker, old, 2, 99)
    assert sink.tokens == [10, 11]
    world.emit(worker, new, 2, 12)
    world.finish(worker, new, 3)
    assert sink.tokens == [10, 11, 12]
    assert len(sink.finished) == 1
    world.check()


@pytest.mark.parametrize("end", ["finished", "failed", "rejected"])
def test_the_end_of_an_earlier_attempt_does_not_end_the_choice(end: str) -> None:
    world, worker, sink, old, new = handed_over_anew()
    world.say(
        worker,
        {
            "finished": Finished(old, "length", 2, RequestStats()),
            "failed": Failed(old, ErrorCode.INTERNAL, "late"),
            "rejected": Rejected(old, ErrorCode.INVALID, "late"),
        }[end],
    )
    assert not sink.is_over
    world.emit(worker, new, 2, 12)
    world.finish(worker, new, 3)
    assert sink.tokens == [10, 11, 12]
    assert not sink.failed
    world.check()
