"""A batch of rows as the tensors of one packed forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from headstart.attention.torch_cpu import AttentionRow
from headstart.core.batch import Batch, Row
from headstart.executor.sampler import SampleTask


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Rows one after another along the token dimension."""

    input_ids: torch.Tensor  # [1, tokens] int64
    position_ids: torch.Tensor  # [1, tokens] int64
    logits_to_keep: torch.Tensor  # [sampled positions] int64: each row's last token, and those before its drafts
    rows: tuple[AttentionRow, ...]
    tasks: tuple[SampleTask, ...]  # in the order of logits_to_keep


def pack(batch: Batch, device: str) -> PackedBatch:
    """Pack a batch of at least one row, each of at least one token."""
    lens = np.array([len(row.tokens) for row in batch.rows])
    last = np.cumsum(lens) - 1
    positions = np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in batch.rows])
    tokens = np.concatenate([row.tokens for row in batch.rows]).astype(np.int64)
    tasks = tuple(task for row in batch.rows for task in sample_tasks(row))
    kept = [np.arange(end - row.num_drafts, end + 1) for row, end in zip(batch.rows, last, strict=True) if row.sample]
    return PackedBatch(
        input_ids=torch.from_numpy(tokens).unsqueeze(0).to(device),
        position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
        logits_to_keep=torch.from_numpy(np.concatenate(kept) if kept else np.empty(0, np.int64)).to(device),
        rows=tuple(_attention_row(row) for row in batch.rows),
        tasks=tasks,
    )


def sample_tasks(row: Row) -> Iterator[SampleTask]:
    """One for each token that the row draws, given that the drafts before it are right."""
    spec = row.sample
    if spec is None:
        return
    yield SampleTask(row.row_id, spec)
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    for count in range(1, row.num_drafts + 1):
        context = np.concatenate((spec.context, drafts[:count]))
        yield SampleTask(row.row_id, replace(spec, context=context, output_index=spec.output_index + count))


def _attention_row(row: Row) -> AttentionRow:
    """A sampled row's context tells what its pages hold."""
    tokens = row.sample.context if row.sample is not None and len(row.sample.context) >= row.start else None
    return AttentionRow(row.pages, row.start, len(row.tokens), tokens)
