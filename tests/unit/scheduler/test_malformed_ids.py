"""Case M3: a message that names a token no model has is refused, where running it would end the process."""

import pytest

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.messages import PrefillFailed
from tests.support import decode_rig, prefill_rig

WRONG_IDS = pytest.mark.parametrize("wrong", [-1, -(1 << 31), 97, (1 << 31) - 1])


@WRONG_IDS
@pytest.mark.parametrize("position", [0, 7, 19])
@pytest.mark.behaviour("13", "M3")
def test_a_prefill_worker_refuses_a_token_outside_the_vocabulary_and_serves_the_next(wrong: int, position: int) -> None:
    rig = prefill_rig.Rig(vocab_size=97)
    caller = rig.caller()
    ids = list(range(20))
    caller.call(1, ids, tokens=int32_array([*ids[:position], wrong, *ids[position + 1 :]]))
    (answer,) = caller.take_mail()
    assert isinstance(answer, PrefillFailed)
    assert answer.code is ErrorCode.INVALID
    call = caller.call(2, [96, *ids[1:]])
    rig.run()
    assert caller.holds(call)
    assert rig.is_clean()


@WRONG_IDS
@pytest.mark.behaviour("M3")
def test_a_decode_worker_refuses_a_token_outside_the_vocabulary_and_serves_the_next(wrong: int) -> None:
    rig = decode_rig.Rig(vocab_size=97)
    assert rig.failed(rig.submit("prompt", [1, wrong, 2], 1)) is ErrorCode.INVALID
    assert rig.failed(rig.submit("outputs", [1, 2], 3, output_ids=int32_array([wrong]))) is ErrorCode.INVALID
    good = rig.submit("good", [1, 96], 1)
    rig.run()
    assert rig.finished(good)
    assert rig.is_clean()
