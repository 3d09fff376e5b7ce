"""Chunks of prompts on the device: packed tokens, and their attention, eagerly or at fixed addresses for graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import build_plan
from headstart.attention.triton_attention import Partials, RowTables, extend_tile, extend_tiling
from headstart.core.batch import Row
from headstart.core.errors import InvariantError
from headstart.executor.cuda.attention import CardAttention, ChunkPart, slots_of
from headstart.executor.cuda.upload import to_device

MAX_ROWS = 16  # chunk rows of a captured step
MAX_SAMPLED = 16  # positions of them that are drawn from
MAX_ITEMS = 4096
MAX_SLOTS = 8192


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """Chunk rows one after another, on the host."""

    columns: NDArray[np.int64]  # [3, tokens]: tokens, positions, slots
    sampled: NDArray[np.int64]  # places among the tokens that are drawn from

    @classmethod
    def of(cls, rows: Sequence[Row], page_size: int) -> "PackedChunks":
        if not rows:
            return cls(np.empty((3, 0), np.int64), np.empty(0, np.int64))
        tokens = np.concatenate([row.tokens for row in rows])
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        slots = np.concatenate([slots_of(row.pages, row.start, row.num_new, page_size) for row in rows])
        ends = np.cumsum([row.num_new for row in rows])
        kept = [np.arange(end - row.num_drafts - 1, end) for row, end in zip(rows, ends, strict=True) if row.sample]
        sampled = np.concatenate(kept) if kept else np.empty(0, np.int64)
        return cls(np.stack((tokens.astype(np.int64), positions, slots)), sampled)

    @property
    def num_tokens(self) -> int:
        return self.columns.shape[1]

    @property
    def fits_graph(self) -> bool:
        return len(self.sampled) <= MAX_SAMPLED


def check_width(num_pages: int, table: torch.Tensor) -> None:
    """Raise InvariantError if a page table has more pages than there is room for."""
    if num_pages > table.shape[1]:
        raise InvariantError(f"a page table of {num_pages} pages in buffers for {table.shape[1]}")


class ChunkBuffers:
    """Chunk rows of a captured step at fixed addresses: what comes behind its decode rows."""

    def __init__(self, card: CardAttention, max_rows: int, max_tokens: int, max_pages: int) -> None:
        device = card.device
        self._card = card
        self._columns = torch.zeros(3, max_rows + max_tokens, dtype=torch.int64, device=device)
        self._kept = torch.zeros(max_rows + MAX_SAMPLED, dtype=torch.int64, device=device)
        self._plan = DevicePlan(max_tokens, MAX_ITEMS, device)
        self._partials = Partials.empty(card.heads, MAX_SLOTS, device)
        self._rows = RowTables(
            torch.zeros(MAX_ROWS, max_pages, dtype=torch.int32, device=device),
            torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
        )
        tile = extend_tile(card.heads)
        self._tiling = extend_tiling(card.heads, tile, card.page_size, card.num_sms, MAX_SLOTS)

    def columns(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Tokens, positions and slots, int64 [3, num_rows + num_tokens]. The first `num_rows` are decode rows'."""
        return self._columns[:, : num_rows + num_tokens]

    def kept(self, num_rows: int) -> torch.Tensor:
        """Tokens that have a place: every decode row, then `MAX_SAMPLED`."""
        return self._kept[: num_rows + MAX_SAMPLED]

    def part(self, num_tokens: int) -> ChunkPart:
        return ChunkPart(0, num_tokens, self._rows, self._plan, self._partials, None)

    def fill(self, rows: Sequence[Row], packed: PackedChunks, num_decode: int, num_tokens: int) -> bool:
        """Upload a step's chunks behind `num_decode` decode rows. False, with nothing changed, if they do not fit."""
        starts = np.array([row.start for row in rows], np.int64)
        num_new = np.array([row.num_new for row in rows], np.int64)
        if len(rows) > MAX_ROWS or not packed.fits_graph:
            return False
        try:
            plan = build_plan([row.pages for row in rows], starts, num_new, self._tiling)
        except ValueError:  # more partial results than there is room for
            return False
        if len(plan.items) > MAX_ITEMS or plan.num_slots > MAX_SLOTS:
            return False
        self._plan.upload(plan)
        self._upload_tables(rows, starts + num_new)
        columns = np.zeros((3, num_tokens), np.int64)
        columns[2] = -1  # padding is not stored
        columns[:, : packed.num_tokens] = packed.columns
        kept = np.zeros(num_decode + MAX_SAMPLED, np.int64)
        kept[:num_decode] = np.arange(num_decode)
        kept[num_decode : num_decode + len(packed.sampled)] = num_decode + packed.sampled
        device = self._card.device
        uploaded = to_device(np.concatenate((columns.ravel(), kept)), device)
        self._columns[:, num_decode : num_decode + num_tokens] = uploaded[: columns.size].view(3, num_tokens)
        self.kept(num_decode).copy_(uploaded[columns.size :])
        return True

    def _upload_tables(self, rows: Sequence[Row], kv_lens: NDArray[np.int64]) -> None:
        width = max(len(row.pages) for row in rows)
        check_width(width, self._rows.pages)
        packed = np.zeros((len(rows), width + 1), np.int32)
        packed[:, 0] = kv_lens
        for line, row in zip(packed, rows, strict=True):
            line[1 : 1 + len(row.pages)] = row.pages
        uploaded = to_device(packed, self._card.device)
        self._rows.kv_lens[: len(rows)] = uploaded[:, 0]
        self._rows.pages[: len(rows), :width] = uploaded[:, 1:]
