"""Attention over the KV pool with torch on a CPU. A prefix that rows share is gathered and read once for all of them.

A step's keys fall into parts, each attended by one flash call that also returns log-sum-exps:

    shared segment   pages that several rows have in common: all their queries in one call
    decode tails     what single-token rows read alone, padded and batched
    chunk            a row's own new tokens, causal, straight from the layer's k and v
    chunk prefix     what a chunk row reads alone before its chunk

Every query token has a tail or a chunk part; the others are merged into it by their log-sum-exps (natural log, fp32).
The two-part scheme for chunks needs no mask. The source of the merge formula: FlashInfer's cascade attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.attention.contiguous_kv_cache import ContiguousKV, ContiguousKVCache
from headstart.attention.row import AttentionRow
from headstart.attention.segments import PrefixOrder, find_segments
from headstart.core.layout import pages_for

MIN_SHARE = 256
"""Tokens below which one more flash call costs more than rereading the prefix for each row."""

_NO_SHARING = 1 << 62
_SETTLED_UNIT = 256
"""A single-token row's private pages are copied in multiples of this many tokens, so that a copy serves many steps."""
_SETTLED_MIN = 512
"""Private tokens from which a copy of the settled part saves more than its own flash call costs."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A range of whole pages, read by the query tokens `tokens`."""

    blocks: torch.Tensor  # [2 * kv_heads * pages] rows of the layer's block view, key blocks first
    kv_len: int
    tokens: torch.Tensor | None  # [n] indices of query tokens; None: all, in order
    copy: ContiguousKV | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    first: int  # query tokens [first, first + num_new)
    num_new: int


@dataclass(frozen=True, slots=True)
class _Tails:
    """Single-token rows whose private ranges are padded to one length."""

    blocks: torch.Tensor  # [2 * kv_heads * rows * pages] of the layer's block view
    garbage: torch.Tensor  # gathered vectors that hold no key or value of the row
    mask: torch.Tensor | None  # [rows, 1, 1, padded] additive
    tokens: torch.Tensor | None  # [rows] their query tokens; None: all, in order
    num_rows: int


class CpuAttention:
    """Plans steps over one pool tensor `[pages, kv_heads, layers, 2, page, head_dim]` in CPU memory.

    `copy_bytes` bounds the copies of shared and settled pages that are kept between steps; 0 gathers at every step.
    """

    def __init__(self, pool: torch.Tensor, grouped: bool = True, copy_bytes: int = 0) -> None:
        num_pages, kv_heads, num_layers, _, page_size, _ = pool.shape
        token_bytes = pool.numel() // (num_pages * page_size) * pool.element_size()
        self._pool = pool
        self._geometry = _Geometry(num_layers, kv_heads, page_size)
        self._min_share = MIN_SHARE if grouped else _NO_SHARING
        self._prefixes = PrefixOrder()
        self._copies = ContiguousKVCache(token_bytes, copy_bytes)

    def begin(self, rows: Sequence[AttentionRow]) -> "CpuStep":
        """Plan one step of at least one row. Query tokens are the rows' new tokens, in row order."""
        self._copies.begin_step()
        starts = np.array([row.start for row in rows], np.int64)
        num_new = np.array([row.num_new for row in rows], np.int64)
        firsts = np.concatenate(([0], np.cumsum(num_new)))
        segments, private0 = self._shared(rows, starts, firsts)
        for r in np.flatnonzero((num_new > 1) & (starts > private0)).tolist():
            span = np.arange(firsts[r], firsts[r + 1])
            segments.append(self._segment(rows[r], int(private0[r]), int(starts[r]), span, keep=False))
        decode = np.flatnonzero(num_new == 1)
        for r in decode.tolist():
            settled = self._settled(rows[r], int(private0[r]), int(firsts[r]))
            if settled is not None:
                segments.append(settled)
                private0[r] += settled.kv_len
        buckets = _length_buckets(decode, starts[decode] + 1 - private0[decode])
        return CpuStep(
            self._pool,
            destinations=torch.from_numpy(_write_vectors(self._geometry, rows)),
            segments=[_whole(segment, int(firsts[-1])) for segment in segments],
            chunks=[_Chunk(int(firsts[r]), int(num_new[r])) for r in np.flatnonzero(num_new > 1)],
            tails=[_tails(self._geometry, rows, bucket, private0, firsts) for bucket in buckets],
        )

    def _shared(
        self, rows: Sequence[AttentionRow], starts: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> tuple[list[_Segment], NDArray[np.int64]]:
        """What rows have in common, and where the private part of each begins."""
        tables = [row.pages for row in rows]
        found = find_segments(tables, starts, self._geometry.page_size, self._min_share, prefixes=self._prefixes)
        segments = []
        for lo, hi, tok0, tok1 in zip(found.lo, found.hi, found.tok0, found.tok1, strict=True):
            members = sorted(found.order[lo:hi].tolist())
            known = next((rows[r] for r in members if rows[r].tokens is not None), rows[members[0]])
            tokens = np.concatenate([np.arange(firsts[r], firsts[r + 1]) for r in members])
            segments.append(self._segment(known, int(tok0), int(tok1), tokens))
        return segments, found.private0.astype(np.int64)

    def _segment(
        self, row: AttentionRow, tok0: int, tok1: int, tokens: NDArray[np.int64], keep: bool = True
    ) -> _Segment:
        """[tok0, tok1) of `row` for the query tokens `tokens`, with a copy if it may and can be kept."""
        page_size = self._geometry.page_size
        span = row.pages[tok0 // page_size : pages_for(tok1, page_size)]
        copy = None
        if keep and row.tokens is not None:
            copy = self._copies.find(span, tok1 - tok0, row.tokens[:tok1])
        blocks = self._geometry.blocks(span.astype(np.int64))
        return _Segment(blocks, tok1 - tok0, torch.from_numpy(tokens), copy)

    def _settled(self, row: AttentionRow, private0: int, token: int) -> _Segment | None:
        """The part of a single-token row's private pages that later steps will read unchanged, if worth a copy."""
        unit = pages_for(_SETTLED_UNIT, self._geometry.page_size) * self._geometry.page_size
        end = row.start // unit * unit
        if row.tokens is None or end - private0 < _SETTLED_MIN:
            return None
        segment = self._segment(row, private0, end, np.array([token]))
        return segment if segment.copy is not None else None


class CpuStep:
    """One step's attention, called once per layer."""

    def __init__(
        self,
        pool: torch.Tensor,
        destinations: torch.Tensor,
        segments: list[_Segment],
        chunks: list[_Chunk],
        tails: list[_Tails],
    ) -> None:
        self._pool = pool
        self._destinations = destinations
        self._segments = segments
        self._chunks = chunks
        self._tails = tails

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `headstart.model.attention_hook.StepAttention`."""
        self._write(layer, key, value)
        num_tokens, num_heads, head_dim = query.shape
        if len(self._tails) == 1 and self._tails[0].tokens is None:
            out, lse = self._attend_tails(layer, self._tails[0], query, scale)
        else:
            out = query.new_empty(num_tokens, num_heads, head_dim)
            lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
            for tails in self._tails:
                out[tails.tokens], lse[tails.tokens] = self._attend_tails(layer, tails, query[tails.tokens], scale)
            for chunk in self._chunks:
                span = slice(chunk.first, chunk.first + chunk.num_new)
                out[span], lse[span] = _attend_chunk(query[span], key[span], value[span], scale)
        for segment in self._segments:
            if segment.tokens is None:
                out, lse = _merge(out, lse, *self._attend_segment(layer, segment, query, scale))
            else:
                part = self._attend_segment(layer, segment, query[segment.tokens], scale)
                out[segment.tokens], lse[segment.tokens] = _merge(out[segment.tokens], lse[segment.tokens], *part)
        return out

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        vectors = torch.stack((key, value)).to(self._pool.dtype).reshape(-1, key.shape[-1])
        self._vectors(layer).index_copy_(0, self._destinations, vectors)

    def _vectors(self, layer: int) -> torch.Tensor:
        """The pool as head vectors [n, head_dim], from `layer`'s first on: one index serves every layer."""
        page_size, head_dim = self._pool.shape[-2:]
        return self._pool.view(-1, head_dim)[layer * 2 * page_size :]

    def _gather(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Key and value blocks, [2, kv_heads, tokens, head_dim]. A block is a head's part of a page."""
        page_size, head_dim = self._pool.shape[-2:]
        block_view = self._pool.view(-1, page_size * head_dim)[layer * 2 :]
        return block_view.index_select(0, blocks).view(2, self._pool.shape[1], -1, head_dim).to(dtype)

    def _read(self, layer: int, segment: _Segment, dtype: torch.dtype) -> torch.Tensor:
        """The segment's keys and values, [2, kv_heads, kv_len, head_dim]."""
        if segment.copy is None:
            return self._gather(layer, segment.blocks, dtype)[:, :, : segment.kv_len]
        kept = segment.copy.layers.get(layer)
        if kept is None:
            kept = segment.copy.layers[layer] = self._gather(layer, segment.blocks, dtype)
        return kept

    def _attend_segment(
        self, layer: int, segment: _Segment, query: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._read(layer, segment, query.dtype)
        kv_heads, num_queries = keys.shape[0], query.shape[0]
        packed = (
            query.view(num_queries, kv_heads, -1, query.shape[-1])
            .transpose(0, 1)
            .reshape(kv_heads, -1, query.shape[-1])
        )
        out, lse = _flash(packed.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale)
        return (
            out[0].view(kv_heads, num_queries, -1, query.shape[-1]).transpose(0, 1).reshape(query.shape),
            lse[0].reshape(kv_heads, num_queries, -1).transpose(0, 1).reshape(query.shape[:2]),
        )

    def _attend_tails(
        self, layer: int, tails: _Tails, query: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = self._gather(layer, tails.blocks, query.dtype)
        kv_heads, head_dim = gathered.shape[1], gathered.shape[-1]
        if tails.garbage.numel():
            gathered.view(-1, head_dim).index_fill_(0, tails.garbage, 0)
        keys, values = gathered.view(2, kv_heads, tails.num_rows, -1, head_dim).transpose(1, 2)
        packed = query.view(tails.num_rows, kv_heads, -1, head_dim)
        out, lse = _flash(packed, keys, values, scale, tails.mask)
        return out.reshape(query.shape), lse.reshape(query.shape[:2])


@dataclass(frozen=True, slots=True)
class _Geometry:
    num_layers: int
    kv_heads: int
    page_size: int

    def blocks(self, pages: NDArray[np.int64]) -> torch.Tensor:
        """Index of a gather of `pages` [any shape] into layer 0's block view, [2 * kv_heads * pages] key blocks first."""
        planes = self.planes
        return torch.from_numpy((pages.reshape(1, -1) * (self.num_layers * planes.size) + planes[:, None]).ravel())

    @property
    def planes(self) -> NDArray[np.int64]:
        """[2 * kv_heads] the blocks of page 0 that hold layer 0's keys, then its values, by head."""
        part, head = np.divmod(np.arange(2 * self.kv_heads, dtype=np.int64), self.kv_heads)
        return head * (2 * self.num_layers) + part


def _write_vectors(geometry: _Geometry, rows: Sequence[AttentionRow]) -> NDArray[np.int64]:
    """[2 * tokens * kv_heads] head vectors of layer 0 that the step's keys, then values, go to."""
    page_size, kv_heads = geometry.page_size, geometry.kv_heads
    positions = [np.arange(row.start, row.start + row.num_new) for row in rows]
    pages = np.concatenate([row.pages[at // page_size] for row, at in zip(rows, positions, strict=True)])
    first = pages.astype(np.int64) * (geometry.num_layers * 2 * kv_heads * page_size)
    first += np.concatenate(positions) % page_size
    planes = geometry.planes.reshape(2, 1, kv_heads) * page_size
    return (first[None, :, None] + planes).ravel()


def _whole(segment: _Segment, num_tokens: int) -> _Segment:
    """Query tokens are unique and ascending, so a segment of as many as there are reads them in order."""
    if segment.tokens is not None and len(segment.tokens) == num_tokens:
        return _Segment(segment.blocks, segment.kv_len, None, segment.copy)
    return segment


def _length_buckets(rows: NDArray[np.int64], lens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split rows so that none is padded to more than about twice its length."""
    if not len(rows):
        return []
    bucket_of = np.maximum(lens - 1, 127)
    keys = np.floor(np.log2(bucket_of)).astype(np.int64)
    return [rows[keys == key] for key in np.unique(keys)]


def _tails(
    geometry: _Geometry,
    rows: Sequence[AttentionRow],
    members: NDArray[np.int64],
    private0: NDArray[np.int64],
    firsts: NDArray[np.int64],
) -> _Tails:
    page_size, kv_heads = geometry.page_size, geometry.kv_heads
    lens = np.array([rows[r].start + 1 - private0[r] for r in members])
    num_pages = pages_for(int(lens.max()), page_size)
    table = np.zeros((len(members), num_pages), np.int64)
    for i, r in enumerate(members):
        own = rows[r].pages[private0[r] // page_size :][: pages_for(int(lens[i]), page_size)]
        table[i, : len(own)] = own
        table[i, len(own) :] = own[0]
    beyond = np.arange(num_pages * page_size) >= lens[:, None]
    garbage = np.flatnonzero(beyond)
    planes = np.arange(2 * kv_heads)[:, None] * beyond.size
    mask = None
    if garbage.size:
        mask = torch.zeros(beyond.shape, dtype=torch.float32)
        mask.masked_fill_(torch.from_numpy(beyond), -torch.inf)
        mask = mask.view(len(members), 1, 1, -1)
    alone = len(members) == firsts[-1]
    return _Tails(
        geometry.blocks(table),
        torch.from_numpy((planes + garbage).ravel()),
        mask,
        None if alone else torch.from_numpy(firsts[members]),
        len(members),
    )


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a chunk over itself; [tokens, heads, head_dim] in and out."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(0, 1).unsqueeze(0), keys, values, 0.0, True, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, heads, queries, head_dim] -> the same and log-sum-exps [b, heads, queries], natural log, fp32."""
    if mask is not None:
        mask = mask.to(query.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse


def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted union of two parts over disjoint keys."""
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_a, out_b, weight), torch.logaddexp(lse_a, lse_b)
