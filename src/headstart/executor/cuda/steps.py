"""From a batch to work on the card's stream: inputs up, the forward pass, tokens drawn, tokens on their way back.

Nothing here waits for the device. A step that fits replays a graph; one with long chunks, or of more rows than any graph
holds, runs eagerly. Places number what is drawn from: decode rows have that of their slot, then come the sampled
positions of chunk rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headstart.core.batch import Batch, Row
from headstart.core.errors import InvariantError
from headstart.executor.cuda.attention import CardAttention, ChunkPlanner, MixedAttention
from headstart.executor.cuda.chunks import MAX_SAMPLED, ChunkBuffers, PackedChunks
from headstart.executor.cuda.columns import KV_LEN, SOURCE, TOKEN
from headstart.executor.cuda.decode_rows import DecodeRows
from headstart.executor.cuda.graphs import CHUNK_SIZES, StepGraphs, StepResult, StepSize, fitting, mixed_sizes
from headstart.executor.cuda.marks import Mark, new_mark
from headstart.executor.cuda.positions import Position, names_unknown_token, positions_of, write_columns
from headstart.executor.cuda.sampling import BatchSampler, FetchedLogprobs
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
    apart: frozenset[int]  # places whose parameters ask for more than a draw
    drawn: torch.Tensor  # int64 [2, places]: token ids, and whether they are fine
    logprobs: FetchedLogprobs | None
    began: Mark
    ended: Mark


@dataclass(frozen=True, slots=True)
class _Rows:
    """A batch's rows by kind, and the size that the step is captured for; None: it runs eagerly."""

    decode: list[Row]
    chunks: list[Row]
    packed: PackedChunks
    size: tuple[int, int] | None  # decode rows, tokens of chunks

    @property
    def first_chunk_place(self) -> int:
        return len(self.decode) if self.size is None else self.size[0]

    @property
    def num_places(self) -> int:
        if self.size is None:
            return len(self.decode) + len(self.packed.sampled)
        return self.size[0] + (MAX_SAMPLED if self.size[1] else 0)


class StepLauncher:
    """Puts one step after another on the current stream."""

    def __init__(self, model: PreTrainedModel, vocab_size: int, card: CardAttention, bounds: RowBounds) -> None:
        device, max_places = card.device, bounds.max_rows + CHUNK_PLACES
        sizes = bounds.graph_sizes
        self._model = model
        self._card = card
        self._sizes = sizes
        self.max_pages = bounds.max_pages
        self._staging = StepStaging(max_places, device)
        self._outbox = Outbox(max_places, device.type == "cuda")
        self._rows = DecodeRows(card, bounds.max_rows, bounds.max_pages)
        self._chunks = ChunkPlanner(card)
        self._buffers = ChunkBuffers(card, sizes[-1], CHUNK_SIZES[-1], bounds.max_pages) if sizes else None
        self.sampler = BatchSampler(vocab_size, max_places, device)
        self.graphs = StepGraphs(self._captured)
        self._last: tuple[int, dict[int, int]] = (-1, {})  # the step launched last, and the places of its rows' tokens

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        began, ended = new_mark(self._card.device), new_mark(self._card.device)
        began.record()
        positions, apart, logprobs = self._run(batch) if batch.rows else ([], frozenset[int](), None)
        drawn = self._outbox.fetch(self.sampler.drawn)
        ended.record()
        return LaunchedStep(batch, positions, apart, drawn, logprobs, began, ended)

    def captures(self) -> list[StepSize]:
        """Every step that may be captured, the largest first."""
        tiles = self._rows.plans.tile_rows
        mixed = [
            StepSize(num_rows, tile, tokens)
            for tokens in reversed(CHUNK_SIZES)
            for num_rows in reversed(mixed_sizes(self._sizes[-1] if self._sizes else 0))
            for tile in tiles(num_rows)
        ]
        return mixed + [StepSize(num_rows, tile) for num_rows in reversed(self._sizes) for tile in tiles(num_rows)]

    def _run(self, batch: Batch) -> tuple[list[Position], frozenset[int], FetchedLogprobs | None]:
        rows = self._sorted(batch)
        slots = self._rows.assign(rows.decode)
        positions = [
            Position(slot, row, row.sample, 0) for slot, row in zip(slots, rows.decode, strict=True) if row.sample
        ]
        place = rows.first_chunk_place
        for row in rows.chunks:
            positions += positions_of(row, place)
            place += row.num_drafts + 1 if row.sample is not None else 0
        apart = self._stage(batch, rows, slots, positions)
        tile_rows = self._rows.plan(rows.decode, slots)
        if rows.size is not None:
            result = self.graphs.run(StepSize(rows.size[0], tile_rows, rows.size[1]))
        else:
            result = self._run_eagerly(rows, tile_rows)
        drawable = [one for one in apart if not names_unknown_token(one.spec, self.sampler.vocab_size)]
        logprobs = self.sampler.draw_apart(result.logits, result.inputs, drawable) if drawable else None
        return positions, frozenset(one.place for one in apart), logprobs

    def _sorted(self, batch: Batch) -> _Rows:
        """Choose how the step runs; uploads its chunks if they are part of a graph."""
        chunks = [row for row in batch.rows if row.pending is None and (len(row.tokens) > 1 or row.num_drafts)]
        decode = [row for row in batch.rows if row.pending is not None or (len(row.tokens) == 1 and not row.num_drafts)]
        packed = PackedChunks.of(chunks, self._card.page_size)
        if not chunks:
            num_rows = fitting(self._sizes, len(decode))
            return _Rows(decode, chunks, packed, None if num_rows is None else (num_rows, 0))
        num_rows = fitting(mixed_sizes(self._sizes[-1] if self._sizes else 0), len(decode))
        num_tokens = fitting(CHUNK_SIZES, packed.num_tokens)
        if self._buffers is None or num_rows is None or num_tokens is None:
            return _Rows(decode, chunks, packed, None)
        fits = self._buffers.fill(chunks, packed, num_rows, num_tokens)
        return _Rows(decode, chunks, packed, (num_rows, num_tokens) if fits else None)

    def _stage(self, batch: Batch, rows: _Rows, slots: list[int], positions: list[Position]) -> list[Position]:
        """Upload the step block. -> positions that are drawn apart."""
        if rows.num_places > len(self._staging.block):
            raise InvariantError(f"step {batch.step_id} draws at more than {CHUNK_PLACES} positions of chunks")
        with self._staging.filled(rows.num_places) as block:
            if slots:
                self._write_inputs(block, rows.decode, slots)
            apart = write_columns(block, positions, self.sampler.kinds)
        self._last = (batch.step_id, {position.row.row_id: position.place for position in positions})
        return apart

    def _write_inputs(self, block: NDArray[np.int64], decode: Sequence[Row], slots: list[int]) -> None:
        """What decode rows are given: tokens, or places among the tokens of the step before."""
        last_step, places = self._last
        sources = [-1 if row.pending is None else places.get(row.pending.row_id, -2) for row in decode]
        for row, source in zip(decode, sources, strict=True):
            if source == -2 or (row.pending is not None and row.pending.step_id != last_step):
                assert row.pending is not None
                raise InvariantError(
                    f"row {row.row_id} waits for row {row.pending.row_id} of step {row.pending.step_id}"
                )
        at = np.array(slots)
        block[at, SOURCE] = sources
        block[at, KV_LEN] = [row.start + 1 for row in decode]
        block[at, TOKEN] = [0 if row.pending is not None else int(row.tokens[0]) for row in decode]

    def _captured(self, size: StepSize) -> StepResult:
        """The body of a graph."""
        num_rows, block = size.num_rows, self._staging.block
        read = self._rows.read(num_rows, block, self.sampler.drawn[0])
        decode = self._rows.attention(num_rows, size.tile_rows)
        if not size.num_chunk_tokens:
            result = StepResult(self._forward(read.tokens, read.positions, decode, None), read.tokens)
        else:
            assert self._buffers is not None
            columns, kept = self._buffers.columns(num_rows, size.num_chunk_tokens), self._buffers.kept(num_rows)
            for column, part in zip(columns, (read.tokens, read.positions, read.slots), strict=True):
                column[:num_rows] = part
            chunks = (self._buffers.part(size.num_chunk_tokens),)
            attention = MixedAttention(self._card, columns[2].to(torch.int32), num_rows, decode, chunks)
            result = StepResult(self._forward(columns[0], columns[1], attention, kept), columns[0][kept])
        self.sampler.draw_plain(result.logits, block)
        return result

    def _run_eagerly(self, rows: _Rows, tile_rows: int) -> StepResult:
        num_decode, device, block = len(rows.decode), self._card.device, self._staging.block
        columns, decode = to_device(rows.packed.columns, device), None
        if num_decode:
            read = self._rows.read(num_decode, block, self.sampler.drawn[0])
            columns = torch.cat((torch.stack((read.tokens, read.positions, read.slots.long())), columns), dim=1)
            decode = self._rows.attention(num_decode, tile_rows)
        tokens, positions, slots = columns[0], columns[1], columns[2].to(torch.int32)
        attention = MixedAttention(self._card, slots, num_decode, decode, self._chunk_parts(rows.chunks))
        kept = np.concatenate((np.arange(num_decode), num_decode + rows.packed.sampled))
        if not len(kept):
            self._model.base_model(**_inputs(tokens, positions, attention))
            return StepResult(tokens, tokens)
        keep = to_device(kept, device)
        result = StepResult(self._forward(tokens, positions, attention, keep), tokens[keep])
        self.sampler.draw_plain(result.logits, block)
        return result

    def _chunk_parts(self, chunks: Sequence[Row]) -> tuple:
        if not chunks:
            return ()
        starts = np.array([row.start for row in chunks], np.int64)
        num_new = np.array([row.num_new for row in chunks], np.int64)
        return self._chunks.plan([row.pages for row in chunks], starts, num_new)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: StepAttention, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of all tokens, or of `keep`."""
        inputs = _inputs(tokens, positions, attention)
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=0 if keep is None else keep).logits[0]
        return logits


def _inputs(tokens: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> dict[str, object]:
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "use_cache": False,
        STEP_KEYWORD: attention,
    }
