"""The batch sampler of a card beside the CPU's, on the same logits. Runs on a card and in Triton's interpreter."""

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from headstart.core.arrays import int32_array
from headstart.core.batch import PendingToken, Row, Sampled, SampleSpec
from headstart.core.request import SamplingParams
from headstart.executor.cuda.columns import BLOCK_WIDTH
from headstart.executor.cuda.outputs import sampled_at
from headstart.executor.cuda.positions import Position, names_unknown_token, write_columns
from headstart.executor.cuda.sampling import BatchSampler
from headstart.executor.sampler import SampleTask, _adjusted, _truncate, sample, uniforms

TIE = 1e-9
"""Relative difference of two arrivals below which either token may be drawn."""


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Each parameter is used about half of the time."""

    def maybe(value: float, default: float) -> float:
        return float(value) if rng.random() < 0.5 else default

    bias = {int(token): float(rng.normal(0, 4)) for token in rng.integers(0, vocab, 3)} if rng.random() < 0.3 else {}
    return SamplingParams(
        temperature=0.0 if rng.random() < 0.15 else float(rng.uniform(0.2, 2)),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        top_k=int(maybe(rng.integers(1, vocab + 5), 0)),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=bias,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        allowed_token_ids=tuple(rng.integers(0, vocab, 9).tolist()) if rng.random() < 0.15 else (),
        banned_token_ids=tuple(rng.integers(0, vocab, 3).tolist()) if rng.random() < 0.15 else (),
    )


def random_spec(rng: np.random.Generator, vocab: int) -> SampleSpec:
    plain = rng.random() < 0.3
    params = random_params(rng, vocab)
    if plain:
        params = SamplingParams(temperature=params.temperature, seed=params.seed)
    prompt_len, num_outputs = int(rng.integers(1, 40)), int(rng.integers(0, 30))
    return SampleSpec(
        params,
        choice=int(rng.integers(0, 3)),
        output_index=num_outputs,
        context=int32_array(rng.integers(0, vocab, prompt_len + num_outputs)),
        prompt_len=prompt_len,
        banned_ids=tuple(rng.integers(0, vocab, 2).tolist()) if rng.random() < 0.2 else (),
        num_top_logprobs=int(rng.integers(0, 6)) if rng.random() < 0.3 else None,
    )


@dataclass
class Bench:
    """Draws batches with the sampler under test."""

    vocab: int
    device: torch.device
    max_places: int = 64

    def __post_init__(self) -> None:
        self.sampler = BatchSampler(self.vocab, self.max_places, self.device)

    def draw(self, logits: torch.Tensor, rows: list[Row], inputs: list[int]) -> list[Sampled]:
        """`inputs`: the token that each row was given."""
        positions = [Position(i, row, row.sample, 0) for i, row in enumerate(rows) if row.sample is not None]
        block = np.zeros((len(rows), BLOCK_WIDTH), np.int64)
        apart = write_columns(block, positions, self.sampler.kinds)
        drawable = [one for one in apart if not names_unknown_token(one.spec, self.vocab)]
        on_device = logits.to(self.device)
        self.sampler.draw_plain(on_device, torch.from_numpy(block).to(self.device))
        fetched = None
        if drawable:
            fetched = self.sampler.draw_apart(on_device, torch.tensor(inputs, device=self.device), drawable)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return sampled_at(
            positions, frozenset(one.place for one in apart), self.sampler.drawn.cpu(), fetched, self.vocab
        )


def row_of(row_id: int, spec: SampleSpec, pending: bool = False) -> Row:
    """A decode row whose input is the context's last token."""
    tokens = int32_array([] if pending else spec.context[-1:])
    context = spec.context[:-1] if pending else spec.context
    waits = PendingToken(1, 0) if pending else None
    start = len(spec.context) - 1
    return Row(row_id, tokens, start, int32_array([0]), replace(spec, context=int32_array(context)), pending=waits)


def assert_same(got: Sampled, logits: torch.Tensor, spec: SampleSpec) -> None:
    """Tokens equal the CPU sampler's, but for ties; log-probabilities to rounding."""
    (wanted,) = sample(logits[None], [SampleTask(got.row_id, spec)])
    assert (got.error is None) == (wanted.error is None), (got, wanted)
    if wanted.error is not None:
        assert got.error == wanted.error
        return
    (token,), (expected,) = got.token_ids, wanted.token_ids
    if token != expected:
        assert tied(logits, spec, token, expected), f"drew {token}, not {expected}: {spec}"
    assert len(got.logprobs) == len(wanted.logprobs)
    if wanted.logprobs and token == expected:
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
        theirs, ours = (dict(one.top_logprobs[0]) if one.top_logprobs else {} for one in (wanted, got))
        np.testing.assert_allclose(sorted(ours.values()), sorted(theirs.values()), atol=1e-4)


def tied(logits: torch.Tensor, spec: SampleSpec, token: int, other: int) -> bool:
    row = _adjusted(logits, spec)
    params = spec.params
    if params.temperature == 0.0 or params.top_k == 1:
        return bool(row[token] == row[other])
    weights = np.exp((row.astype(np.float64) - row.max()) / params.temperature)
    before = weights.copy()
    _truncate(weights, params)
    least = weights[weights > 0].min()
    if weights[token] == 0.0:  # at the very edge of what is left out
        return bool(abs(before[token] - least) <= TIE * least)
    arrivals = weights / -np.log(uniforms(params.seed, spec.choice, spec.output_index, len(weights)))
    return bool(abs(arrivals[token] - arrivals[other]) <= TIE * arrivals[other])
