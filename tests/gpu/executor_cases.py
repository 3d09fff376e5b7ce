"""What an executor for cards must do: on a card (`test_executor.py`) and in the interpreter (`interpreted_executor.py`)."""

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, PendingToken, Row, SampleSpec
from headstart.core.errors import InvariantError
from headstart.core.request import SamplingParams
from tests.gpu.rig import GREEDY, VOCAB, Request_, Rig, assert_greedy, prompt


def check_greedy_alone_and_together(rig: Rig, noise: float, long: int) -> None:
    """Cold prompts in chunks beside decoding rows, and prompts that begin like one before."""
    first = rig.admit(prompt(0, long))
    rig.generate([first], 4, chunk=long // 3)
    others = [rig.admit(prompt(i, 3 + 17 * i)) for i in range(1, 4)]
    likes = [rig.admit([*first.tokens[: long - 5], *prompt(9 + i, 10)], like=first) for i in range(2)]
    rig.generate([*others, *likes], 6, chunk=40, stagger=2)
    for request in (first, *others, *likes):
        assert_greedy(rig, request, noise)


def check_two_steps_ahead(rig: Rig, noise: float) -> None:
    """Tokens go from one step to the next on the device: the same as with one step in flight."""
    params = [GREEDY, SamplingParams(seed=4), SamplingParams(seed=5, top_p=0.8, repetition_penalty=1.2)]

    def admitted() -> list[Request_]:
        return [rig.admit(prompt(20 + i, 5 + 30 * i), one) for i, one in enumerate(params * 2)]

    one_by_one, ahead = admitted(), admitted()
    rig.generate(one_by_one, 8, chunk=48, stagger=1)
    rig.generate_ahead(ahead, 8, chunk=48, stagger=1)
    for request in (ahead[0], ahead[3]):
        assert_greedy(rig, request, noise)
    assert sum(a.tokens == b.tokens for a, b in zip(one_by_one, ahead, strict=True)) >= 5


def check_pages_are_reused(rig: Rig, noise: float) -> None:
    """A retracted request's pages are written by others, and its own KV is computed anew elsewhere."""
    request, other = rig.admit(prompt(40, 70)), rig.admit(prompt(41, 20))
    rig.generate([request, other], 3)
    rig.release(request)
    late = rig.admit(prompt(42, 90))
    rig.generate([late, other], 5)
    rig.generate([request], 6, chunk=32)
    for one in (request, other, late):
        assert_greedy(rig, one, noise)


def check_drafts(rig: Rig) -> None:
    """Right drafts are accepted and wrong ones end the row there."""
    request = rig.admit(prompt(50, 33))
    rig.generate([request], 5)
    pages, prompt_len = rig.admit([]), request.prompt_len
    pages.pages = [rig.free.pop() for _ in range(3)]
    table = int32_array(pages.pages)
    spec = SampleSpec(GREEDY, 0, 0, int32_array(request.tokens[:prompt_len]), prompt_len)
    wrong = (request.tokens[prompt_len + 2] + 1) % VOCAB
    drafts = [*request.tokens[prompt_len : prompt_len + 2], wrong]
    row = Row(3, int32_array([*request.tokens[:prompt_len], *drafts]), 0, table, spec, num_drafts=3)
    (sampled,) = rig.run([row]).sampled
    assert sampled.token_ids == tuple(request.tokens[prompt_len : prompt_len + 3])


def check_order_of_calls(rig: Rig) -> None:
    assert rig.executor.poll() is None
    rig.launch([])
    rig.launch([])
    with pytest.raises(InvariantError, match="2 are in flight"):
        rig.executor.launch(Batch(99, ()))
    assert [rig.finish().step_id for _ in range(2)] == [rig.step_id - 1, rig.step_id]


def check_rows_that_fill_kv_only(rig: Rig) -> None:
    one = rig.admit(prompt(60, 20))
    row = rig.row(one, 8, chunk=10)
    assert row.sample is None
    assert rig.run([row]).sampled == ()


def check_every_number_of_rows(rig: Rig, noise: float, sizes: tuple[int, ...]) -> None:
    shared = rig.admit(prompt(70, 2 * rig.setup.page_size + 3))
    rig.generate([shared], 1)
    for size in sizes:
        requests = [rig.admit([*shared.tokens[:-1], *prompt(80 + i, 1 + i % 5)], like=shared) for i in range(size)]
        rig.generate(requests, 2)
        for request in requests[:: max(1, size // 4)]:
            assert_greedy(rig, request, noise)
        for request in requests:
            request.pages = request.pages[2:]
            rig.release(request)


def check_unknown_pending(rig: Rig) -> None:
    """Last: the executor is of no use afterwards."""
    row = Row(0, int32_array([]), 3, int32_array([0]), None, pending=PendingToken(10_000, 1))
    with pytest.raises(InvariantError, match="waits for row 1 of step 10000"):
        rig.executor.launch(Batch(7, (row,)))
    with pytest.raises(InvariantError):
        rig.executor.poll()


def kv_of(rig: Rig, request: Request_) -> np.ndarray:
    """[layers, 2, kv_heads, num_computed, head_dim] as stored."""
    table = rig.pool.data[request.pages].float().cpu().numpy()
    joined = np.concatenate(list(table), axis=3)
    return joined.transpose(1, 2, 0, 3, 4)[:, :, :, : request.num_computed]
