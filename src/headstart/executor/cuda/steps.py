"""From a batch to work on the card's stream: inputs up, the forward pass, tokens drawn, tokens on their way back.

Nothing here waits for the device. A step that only decodes replays a graph; one with chunks, or of more rows than any
graph holds, runs eagerly. Places number what is drawn from: decode rows have that of their slot, then come the sampled
positions of chunk rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headstart.attention.triton_attention import RowTables
from headstart.core.batch import Batch, Row
from headstart.core.errors import InvariantError
from headstart.executor.cuda.attention import CardAttention, ChunkPlanner, DecodeAttention, MixedAttention, slots_of
from headstart.executor.cuda.columns import KV_LEN, SOURCE, TOKEN
from headstart.executor.cuda.graphs import DecodeGraphs
from headstart.executor.cuda.kernels import read_inputs
from headstart.executor.cuda.marks import Mark, new_mark
from headstart.executor.cuda.plans import DecodePlans
from headstart.executor.cuda.positions import Position, positions_of, write_columns
from headstart.executor.cuda.sampling import BatchSampler, FetchedLogprobs
from headstart.executor.cuda.slots import DecodeSlots, TableUpdate, flatten
from headstart.executor.cuda.staging import Outbox, StepStaging
from headstart.executor.cuda.upload import to_device
from headstart.model.hook import STEP_KEYWORD, StepAttention

CHUNK_PLACES = 1024
"""Positions of chunk rows that one step may draw at."""


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What the buffers of an executor hold."""

    max_rows: int  # decode rows of a step
    max_pages: int  # of one row
    graph_sizes: tuple[int, ...]  # rows of captured steps


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on the stream. `drawn` and `logprobs` may be read when `ended` has happened."""

    batch: Batch
    positions: list[Position]
    drawn: torch.Tensor  # int64 [2, places]: token ids, and whether they are fine
    logprobs: FetchedLogprobs | None
    began: Mark
    ended: Mark


@dataclass(frozen=True, slots=True)
class _DecodeInputs:
    """Where the inputs of decode rows are on the device, all [max_rows]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, device: torch.device) -> "_DecodeInputs":
        wide = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(2)]
        narrow = [torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(*wide, *narrow)


class StepLauncher:
    """Puts one step after another on the current stream."""

    def __init__(self, model: PreTrainedModel, vocab_size: int, card: CardAttention, bounds: RowBounds) -> None:
        device, max_places = card.device, bounds.max_rows + CHUNK_PLACES
        self._model = model
        self._card = card
        self._bounds = bounds
        self._staging = StepStaging(max_places, device)
        self._outbox = Outbox(max_places, device.type == "cuda")
        self._inputs = _DecodeInputs.empty(bounds.max_rows, device)
        self._table = torch.zeros(bounds.max_rows, bounds.max_pages, dtype=torch.int32, device=device)
        self._slots = DecodeSlots()
        self._plans = DecodePlans(card, bounds.max_rows)
        self._chunks = ChunkPlanner(card)
        self.sampler = BatchSampler(vocab_size, max_places, device)
        self.graphs = DecodeGraphs(bounds.graph_sizes, self._decode_body)
        self._last: tuple[int, dict[int, int]] = (-1, {})  # the step launched last, and the places of its rows' tokens

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        began, ended = (new_mark(self._card.device) for _ in range(2))
        began.record()
        decode = [row for row in batch.rows if row.num_new == 1 and not row.num_drafts]
        chunks = [row for row in batch.rows if row.num_new > 1 or row.num_drafts]
        if len(decode) > self._bounds.max_rows:
            raise InvariantError(f"{len(decode)} decode rows in buffers for {self._bounds.max_rows}")
        slots = self._assign(decode)
        positions = [Position(slot, row, row.sample, 0) for slot, row in zip(slots, decode, strict=True) if row.sample]
        place = len(decode)
        for row in chunks:
            positions += positions_of(row, place)
            place += row.num_drafts + 1 if row.sample is not None else 0
        size = self.graphs.size_for(len(decode)) if decode and not chunks else None
        apart = self._stage(batch, decode, slots, positions, size or len(decode))
        tile_rows = self._plan(decode, slots)
        if size is not None:
            logits, inputs = self.graphs.run(size, tile_rows), self._inputs.tokens
        else:
            logits, inputs = self._run_eagerly(decode, chunks, positions, tile_rows)
        logprobs = self.sampler.draw_apart(logits, inputs, apart) if apart else None
        drawn = self._outbox.fetch(self.sampler.drawn)
        ended.record()
        return LaunchedStep(batch, positions, drawn, logprobs, began, ended)

    def captures(self) -> list[tuple[int, int]]:
        """(rows, rows of the tile) of every step that may be captured, the largest first."""
        return [(size, tile) for size in reversed(self._bounds.graph_sizes) for tile in self._plans.tile_rows(size)]

    def _assign(self, decode: Sequence[Row]) -> list[int]:
        slots, updates = self._slots.assign([row.pages for row in decode])
        if updates:
            self._upload_tables(updates)
        return slots

    def _upload_tables(self, updates: Sequence[TableUpdate]) -> None:
        width = self._bounds.max_pages
        if longest := max((len(update.pages) for update in updates if len(update.pages) > width), default=0):
            raise InvariantError(f"a page table of {longest} pages in buffers for {width}")
        places, pages = flatten(updates, width)
        if len(places):
            flat = self._table.view(-1)
            flat.index_copy_(0, to_device(places, self._card.device), to_device(pages, self._card.device))

    def _stage(
        self, batch: Batch, decode: Sequence[Row], slots: list[int], positions: list[Position], num_decode: int
    ) -> list[Position]:
        """Upload the step block. `num_decode`: places of decode rows, those of a graph that stay empty included."""
        last_step, places = self._last
        num_places = max(num_decode, 1 + max((position.place for position in positions), default=0))
        if num_places > len(self._staging.block):
            raise InvariantError(f"step {batch.step_id} draws at more than {CHUNK_PLACES} positions of chunks")
        sources, tokens = [], []
        for row in decode:
            pending = row.pending
            if pending is None:
                sources.append(-1)
                tokens.append(int(row.tokens[0]))
            elif pending.step_id == last_step and pending.row_id in places:
                sources.append(places[pending.row_id])
                tokens.append(0)
            else:
                raise InvariantError(f"row {row.row_id} waits for row {pending.row_id} of step {pending.step_id}")
        with self._staging.filled(num_places) as block:
            block[slots, TOKEN] = tokens
            block[slots, SOURCE] = sources
            block[slots, KV_LEN] = [row.start + 1 for row in decode]
            apart = write_columns(block, positions, self.sampler.kinds, self.sampler.vocab_size)
        self._last = (batch.step_id, {position.row.row_id: position.place for position in positions})
        return apart

    def _plan(self, decode: Sequence[Row], slots: list[int]) -> int:
        if not decode:
            return 0
        kv_lens = np.empty(len(decode), np.int64)
        kv_lens[slots] = [row.start + 1 for row in decode]
        return self._plans.update(self._slots.tables, kv_lens)

    def _decode_body(self, num_rows: int, tile_rows: int) -> torch.Tensor:
        """The step of `num_rows` decode rows, all in fixed buffers."""
        inputs = self._read_inputs(num_rows)
        tokens, positions = inputs[:2]
        logits = self._forward(tokens, positions, self._decode_attention(num_rows, tile_rows), None)
        self.sampler.draw_plain(logits, self._staging.block)
        return logits

    def _read_inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        held = self._inputs
        views = (held.tokens[:num_rows], held.positions[:num_rows], held.kv_lens[:num_rows], held.slots[:num_rows])
        read_inputs(self._staging.block, self.sampler.drawn[0], self._table, self._card.page_size, views)
        return views

    def _decode_attention(self, num_rows: int, tile_rows: int) -> DecodeAttention:
        rows = RowTables(self._table[:num_rows], self._inputs.kv_lens[:num_rows])
        plans = self._plans
        return DecodeAttention(
            self._card, plans.tile(tile_rows), plans.partials, plans.device_plan, rows, self._inputs.slots[:num_rows]
        )

    def _run_eagerly(
        self, decode: Sequence[Row], chunks: Sequence[Row], positions: list[Position], tile_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> logits and input tokens, both by place."""
        num_decode, device = len(decode), self._card.device
        read = self._read_inputs(num_decode) if num_decode else None
        packed = _pack(chunks, self._card.page_size)
        columns = to_device(packed, device)
        if read is not None:
            columns = torch.cat((torch.stack((read[0], read[1], read[3])), columns), dim=1)
        tokens, places, slots = columns[0], columns[1], columns[2].to(torch.int32)
        parts = self._chunks.plan(
            [row.pages for row in chunks],
            np.array([row.start for row in chunks], np.int64),
            np.array([row.num_new for row in chunks], np.int64),
        ) if chunks else ()  # fmt: skip
        attention = MixedAttention(
            self._card, slots, num_decode, self._decode_attention(num_decode, tile_rows) if num_decode else None, parts
        )
        if not positions:
            self._forward(tokens, places, attention, torch.empty(0))
            return tokens, tokens
        keep = to_device(_kept(num_decode, chunks), device)
        logits = self._forward(tokens, places, attention, keep)
        self.sampler.draw_plain(logits, self._staging.block)
        return logits, tokens[keep]

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: StepAttention, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of all tokens, or of `keep`; no logits if that is empty."""
        inputs = {
            "input_ids": tokens.unsqueeze(0),
            "position_ids": positions.unsqueeze(0),
            "use_cache": False,
            STEP_KEYWORD: attention,
        }
        if keep is not None and not len(keep):
            self._model.base_model(**inputs)
            return tokens
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=0 if keep is None else keep).logits[0]
        return logits


def _pack(chunks: Sequence[Row], page_size: int) -> NDArray[np.int64]:
    """Tokens, positions and slots of chunk rows, [3, tokens]."""
    if not chunks:
        return np.empty((3, 0), np.int64)
    positions = [np.arange(row.start, row.start + row.num_new) for row in chunks]
    slots = [slots_of(row.pages, row.start, row.num_new, page_size) for row in chunks]
    tokens = np.concatenate([row.tokens for row in chunks]).astype(np.int64)
    return np.stack((tokens, np.concatenate(positions), np.concatenate(slots)))


def _kept(num_decode: int, chunks: Sequence[Row]) -> NDArray[np.int64]:
    """Tokens of the packed step that have a place: every decode row, and where chunk rows are sampled from."""
    kept, end = [np.arange(num_decode)], num_decode
    for row in chunks:
        end += row.num_new
        if row.sample is not None:
            kept.append(np.arange(end - row.num_drafts - 1, end))
    return np.concatenate(kept)
