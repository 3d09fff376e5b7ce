"""What changes a batch's logits before tokens are drawn, and log-probabilities: whole tensors, on any device.

The rules and their order are the CPU sampler's (`executor.sampler`): bias, repetition, frequency and presence penalties
and bans give the adjusted logits; top-k, top-p over what top-k left, and min-p give a floor under which none is drawn.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Edits:
    """Single logits that change: entry i is about `tokens[i]` of row `rows[i]`. All int64 but `values`."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor  # float32; added. -inf bans

    def apply(self, logits: torch.Tensor) -> None:
        logits.index_put_((self.rows, self.tokens), self.values, accumulate=True)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of each row: float64 [rows, 1]; 1 and 0 where none is asked for."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def apply(self, logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`seen` bool, `counts` int32, [rows, vocabulary]: tokens of prompt and outputs, and how often outputs had each."""
        repetition = self.repetition.to(torch.float32)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen & (repetition != 1.0), scaled, logits)
        less = (self.frequency * counts + self.presence).to(torch.float32)
        return torch.where(counts > 0, logits - less, logits)


CANDIDATES = 1024
"""Largest logits of a row that are sorted where top-k is small."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Of each row, [rows, 1]; 0, 1 and 0 where none is asked for."""

    temperature: torch.Tensor  # float64, > 0
    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64

    def floors(self, logits: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """float32 [rows]: the smallest logit that may be drawn. The largest always may.

        `most`: every row has a top-k of at most this, which saves sorting them whole.
        """
        vocab_size = logits.shape[1]
        if most is not None and 2 * most <= CANDIDATES < vocab_size:
            # Those tied with the k-th may not all be among the candidates, but then the floor is their value anyhow.
            descending = logits.topk(CANDIDATES, dim=-1).values
        else:
            descending = logits.sort(dim=-1, descending=True).values
        scaled = (descending.to(torch.float64) - descending[:, :1].to(torch.float64)) / self.temperature
        weights = scaled.exp_()
        is_cut = (self.top_k > 0) & (self.top_k < vocab_size)
        kth = descending.gather(1, self.top_k.clamp(1, descending.shape[1]) - 1)
        floor = torch.where(is_cut, kth, -torch.inf)
        weights.masked_fill_(descending < floor, 0.0)
        mass = weights.cumsum(-1)
        last = (mass < self.top_p * mass[:, -1:]).sum(-1, keepdim=True)
        num_sorted = descending.shape[1]
        smallest = descending.gather(1, last.clamp(max=num_sorted - 1))
        floor = torch.where((self.top_p < 1.0) & (last < num_sorted), torch.maximum(floor, smallest), floor)
        num_likely = (weights >= self.min_p).sum(-1, keepdim=True)
        least = descending.gather(1, (num_likely - 1).clamp(min=0))
        return torch.where(self.min_p > 0.0, torch.maximum(floor, least), floor).squeeze(1)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """Natural log-probabilities of `tokens` [rows]; with `num_top` the best ones' values and ids too, [rows, num_top]."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if not num_top:
        return (chosen,)
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return chosen, best.values, best.indices
