"""What the batch sampler must do, whatever it runs on: `test_sampler.py` on a card, `interpreted_sampler.py` without."""

import numpy as np
import pytest
import torch

from headstart.core.arrays import int32_array
from headstart.core.batch import SampleSpec
from headstart.core.request import SamplingParams
from headstart.executor.cuda.draw import uniforms_of
from headstart.executor.sampler import uniforms
from tests.gpu.sampling import Bench, assert_same, random_spec, row_of


def check_uniforms(device: torch.device) -> None:
    for seed, choice, index in ((0, 0, 0), (2**64 - 1, 3, 77), (2**63, 1, 2**31), (123456789, 0, 1)):
        got = uniforms_of(seed, choice, index, 8192, device)
        np.testing.assert_array_equal(got.cpu().numpy(), uniforms(seed, choice, index, 8192))


def check_random_specs(device: torch.device, vocab: int, dtype: torch.dtype, num_batches: int) -> int:
    """Batches of rows with random parameters. -> rows checked."""
    rng, bench, checked = np.random.default_rng(vocab), Bench(vocab, device), 0
    for _ in range(num_batches):
        specs = [random_spec(rng, vocab) for _ in range(int(rng.integers(1, 25)))]
        logits = torch.from_numpy(rng.normal(0, 3, (len(specs), vocab)).astype(np.float32)).to(dtype)
        rows = [row_of(i, spec) for i, spec in enumerate(specs)]
        for got, row, spec in zip(bench.draw(logits, rows, [0] * len(rows)), logits, specs, strict=True):
            assert_same(got, row, spec)
            checked += 1
    return checked


def check_broken_rows(device: torch.device) -> None:
    vocab, bench = 500, Bench(500, device)
    everything = tuple(range(vocab))
    specs = [
        spec(), spec(temperature=0.0), spec(top_p=0.5), spec(banned_ids=everything), spec(logit_bias={vocab: 1.0}),
        spec(temperature=0.0), spec(num_top_logprobs=2), spec(),
    ]  # fmt: skip
    logits = torch.randn(len(specs), vocab, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, 9], logits[2, 1], logits[6, 3] = np.nan, np.inf, np.nan, np.inf
    got = bench.draw(logits, [row_of(i, one) for i, one in enumerate(specs)], [0] * len(specs))
    for one, row, each in zip(got, logits, specs, strict=True):
        assert_same(one, row, each)
    assert [one.error is None for one in got] == [False, False, False, False, False, True, False, True]


def check_counts_go_on(device: torch.device) -> None:
    """A penalised row whose inputs the host does not know yet is drawn as if it did."""
    vocab, bench, rng = 300, Bench(300, device), np.random.default_rng(3)
    params = SamplingParams(seed=5, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.4)
    other = SamplingParams(seed=6, repetition_penalty=1.2)
    tokens, others = rng.integers(0, vocab, 9).tolist(), rng.integers(0, vocab, 30).tolist()
    for step in range(12):
        specs = [
            SampleSpec(params, 0, step, int32_array(tokens), 9),
            SampleSpec(other, 0, step, int32_array(others), 30),
        ]
        if step == 7:  # the second row sits out, and comes back
            specs.pop()
        logits = torch.from_numpy(rng.normal(0, 2, (len(specs), vocab)).astype(np.float32))
        pending = step > 0 and step % 3 != 0
        rows = [row_of(i, spec, pending) for i, spec in enumerate(specs)]
        drawn = bench.draw(logits, rows, [int(one.context[-1]) for one in specs])
        for one, row, spec in zip(drawn, logits, specs, strict=True):
            assert_same(one, row, spec)
        tokens.append(drawn[0].token_ids[0])
        if len(drawn) > 1:
            others.append(drawn[1].token_ids[0])


def check_alone_and_together(device: torch.device) -> None:
    vocab, bench, rng = 400, Bench(400, device), np.random.default_rng(1)
    specs = [random_spec(rng, vocab) for _ in range(16)]
    logits = torch.from_numpy(rng.normal(0, 2, (16, vocab)).astype(np.float32))
    together = bench.draw(logits, [row_of(i, spec) for i, spec in enumerate(specs)], [0] * 16)
    for i, spec in enumerate(specs):
        (alone,) = bench.draw(logits[i : i + 1], [row_of(i, spec)], [0])
        assert alone.token_ids == together[i].token_ids


def spec(banned_ids: tuple[int, ...] = (), num_top_logprobs: int | None = None, **params: object) -> SampleSpec:
    context = int32_array([1, 2, 3])
    return SampleSpec(SamplingParams(**params), 0, 0, context, 3, banned_ids, num_top_logprobs)  # type: ignore[arg-type]


CASES = [
    pytest.param(check_uniforms, id="random numbers are the CPU sampler's, bit for bit"),
    pytest.param(check_broken_rows, id="a broken row fails alone"),
    pytest.param(check_counts_go_on, id="penalties count tokens that are pending"),
    pytest.param(check_alone_and_together, id="a row draws the same whatever shares its batch"),
]
