"""A batch of rows as the tensors of one packed forward pass."""

from dataclasses import dataclass

import numpy as np
import torch

from headstart.attention.torch_cpu import AttentionRow
from headstart.core.batch import Batch, Row
from headstart.executor.sampler import SampleTask


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows one after another along the token dimension."""

    input_ids: torch.Tensor  # [1, tokens] int64
    position_ids: torch.Tensor  # [1, tokens] int64
    logits_to_keep: torch.Tensor  # [sampled rows] int64: each one's last token
    rows: tuple[AttentionRow, ...]
    tasks: tuple[SampleTask, ...]  # in the order of logits_to_keep


def pack(batch: Batch, device: str) -> PackedBatch:
    """Pack a batch of at least one row, each of at least one token."""
    lens = np.array([len(row.tokens) for row in batch.rows])
    last = np.cumsum(lens) - 1
    positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in batch.rows])
    tokens = np.concatenate([row.tokens for row in batch.rows]).astype(np.int64)
    sampled = [(i, row) for i, row in enumerate(batch.rows) if row.sample is not None]
    return PackedBatch(
        input_ids=torch.from_numpy(tokens).unsqueeze(0).to(device),
        position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
        logits_to_keep=torch.tensor([int(last[i]) for i, _ in sampled], dtype=torch.int64, device=device),
        rows=tuple(_attention_row(row) for row in batch.rows),
        tasks=tuple(SampleTask(row.row_id, row.sample) for _, row in sampled if row.sample is not None),
    )


def _attention_row(row: Row) -> AttentionRow:
    """A sampled row's context tells what its pages hold."""
    tokens = row.sample.context if row.sample is not None and len(row.sample.context) >= row.start else None
    return AttentionRow(row.pages, row.start, len(row.tokens), tokens)
