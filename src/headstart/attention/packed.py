"""A layer's projections before norm and rotation, for kernels that do both while they store keys and values."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """Queries, keys and values of one layer, one after another, as the merged projection leaves them.

    Before attention, queries and keys are divided by their root mean square and multiplied by a weight (where the
    layer has such norms), then rotated in halves: x * cos + (-second half, first half) * sin.
    """

    qkv: torch.Tensor  # [tokens, q_heads + 2 * kv_heads, head_dim], last two dims contiguous
    cos: torch.Tensor | None  # [tokens, head_dim]; None: the layer has no position embedding
    sin: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim] weights; None: no norm
    k_norm: torch.Tensor | None
    eps: float


class PackedAttention(Protocol):
    """One step's attention over the KV pool, from packed heads."""

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        """Norm and rotate, write keys and values to their pages, attend causally over each row's pages.

        May overwrite the queries of `heads.qkv`. Returns [tokens, q_heads, head_dim].
        """
        ...
