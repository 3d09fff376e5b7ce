"""Decode rows on the device: their slots, page tables, plan and inputs, all at fixed addresses."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from headstart.attention.triton_attention import RowTables
from headstart.core.batch import Row
from headstart.core.errors import InvariantError
from headstart.executor.cuda.attention import CardAttention, DecodeAttention
from headstart.executor.cuda.chunks import check_width
from headstart.executor.cuda.kernels import read_inputs
from headstart.executor.cuda.plans import DecodePlans
from headstart.executor.cuda.slots import DecodeSlots, TableUpdate, flatten
from headstart.executor.cuda.upload import to_device


class DecodeInputs(NamedTuple):
    """Of each row. Rows past those of the step have KV length 0 and slot -1."""

    tokens: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    kv_lens: torch.Tensor  # int32
    slots: torch.Tensor  # int32


class DecodeRows:
    """Buffers of up to `max_rows` rows of `max_pages` pages."""

    def __init__(self, card: CardAttention, max_rows: int, max_pages: int) -> None:
        device = card.device
        self.plans = DecodePlans(card, max_rows)
        self._card = card
        self._slots = DecodeSlots()
        self._table = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)
        wide = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(2)]
        narrow = [torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2)]
        self._inputs = DecodeInputs(*wide, *narrow)

    def assign(self, rows: Sequence[Row]) -> list[int]:
        """The rows' slots. Uploads what is new of their page tables."""
        if len(rows) > len(self._table):
            raise InvariantError(f"{len(rows)} decode rows in buffers for {len(self._table)}")
        slots, updates = self._slots.assign([row.pages for row in rows])
        if updates:
            self._upload(updates)
        return slots

    def plan(self, rows: Sequence[Row], slots: list[int]) -> int:
        """Have a plan for the rows on the device. -> rows of the tile that it is made for."""
        kv_lens = np.empty(len(rows), np.int64)
        kv_lens[slots] = [row.start + 1 for row in rows]
        return self.plans.update(self._slots.tables, kv_lens)

    def read(self, num_rows: int, block: torch.Tensor, drawn: torch.Tensor) -> DecodeInputs:
        """Inputs of slots [0, num_rows), from the step block and what the step before drew."""
        inputs = DecodeInputs(*(part[:num_rows] for part in self._inputs))
        read_inputs(block, drawn, self._table, self._card.page_size, inputs)
        return inputs

    def attention(self, num_rows: int, tile_rows: int) -> DecodeAttention:
        rows = RowTables(self._table[:num_rows], self._inputs.kv_lens[:num_rows])
        plans = self.plans
        return DecodeAttention(
            self._card, plans.tile(tile_rows), plans.partials, plans.device_plan, rows, self._inputs.slots[:num_rows]
        )

    def _upload(self, updates: Sequence[TableUpdate]) -> None:
        width = self._table.shape[1]
        check_width(max(len(update.pages) for update in updates), self._table)
        places, pages = flatten(updates, width)
        if len(places):
            device = self._card.device
            self._table.view(-1).index_copy_(0, to_device(places, device), to_device(pages, device))
