"""Pages gathered into contiguous keys and values and attended by a dense kernel of the library.

Every query token sees all of a cached prefix, so that needs no mask, and the query heads of a KV head become more query
rows of one head. A long row's own keys are attended causally. The parts come with log-sum-exps and are merged. Gathering
costs a few percent of the dense kernel's time; it also dequantises fp8.

cuDNN prepares each new shape for up to some tenths of a second, so keys and queries are cut and padded to few sizes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headstart.attention.triton_attention import HeadShape, LayerKV
from headstart.attention.triton_tile import unpack_e4m3

MAX_CUDNN_DIM = 128  # of a head; cuDNN's kernel takes no wider ones here
_LOG2_E = math.log2(math.e)


@triton.jit
def gather_kernel(
    kv_ptr, scale_ptr, page_ptr, out_ptr, stride_page, stride_head, num_tokens,
    D: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (page index, head) copies a page of keys or values to `out` [heads, tokens, D]."""
    i = tl.program_id(0)
    h = tl.program_id(1)
    page = tl.load(page_ptr + i).to(tl.int64)
    source = kv_ptr + page * stride_page + h * stride_head
    n = tl.arange(0, PAGE)[:, None]
    target = out_ptr + (h.to(tl.int64) * num_tokens + i * PAGE) * D
    if FP8:
        DW: tl.constexpr = D // 2
        even, odd = unpack_e4m3(tl.load(source + n * DW + tl.arange(0, DW)[None, :]), ASM)
        values = tl.reshape(tl.join(even, odd), (PAGE, D)).to(tl.float32) * tl.load(scale_ptr + h)
    else:
        values = tl.load(source + n * D + tl.arange(0, D)[None, :])
    tl.store(target + n * D + tl.arange(0, D)[None, :], values.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["first", "num_tokens"])
def merge_pair_kernel(
    out_ptr, lse_ptr, dense_ptr, dense_lse_ptr, token_ptr, first, num_tokens, num_dense,
    G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Merge dense results `[kv_heads, num_dense, G, D]`, natural log-sum-exps, into `out` `[tokens, q_heads, D]`, base 2.

    Token i < `num_tokens` of the dense results is `token_ptr[i]` of `out` if LISTED, else `first` + i.
    """
    i = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok = i < num_tokens
    token = tl.load(token_ptr + i, mask=ok, other=0) if LISTED else first + i
    head = tl.program_id(1)
    ours = token * (KVH * G) + head
    dense = ((head // G) * num_dense + i) * G + head % G
    d = tl.arange(0, D)[None, :]
    lse_a = tl.load(lse_ptr + ours, mask=ok, other=0.0)
    lse_b = tl.load(dense_lse_ptr + dense, mask=ok, other=0.0) * 1.4426950408889634
    peak = tl.maximum(lse_a, lse_b)
    weight_a = tl.exp2(lse_a - peak)
    weight_b = tl.exp2(lse_b - peak)
    a = tl.load(out_ptr + ours[:, None] * D + d, mask=ok[:, None], other=0.0).to(tl.float32)
    b = tl.load(dense_ptr + dense[:, None] * D + d, mask=ok[:, None], other=0.0).to(tl.float32)
    merged = (a * weight_a[:, None] + b * weight_b[:, None]) / (weight_a + weight_b)[:, None]
    tl.store(out_ptr + ours[:, None] * D + d, merged.to(out_ptr.dtype.element_ty), mask=ok[:, None])
    tl.store(lse_ptr + ours, peak + tl.log2(weight_a + weight_b), mask=ok)


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Tokens of what the dense kernel is given, so that it meets few shapes."""

    keys: tuple[int, ...]  # falling, each a multiple of the next and of the page
    queries: tuple[int, ...]  # falling
    own_step: int  # a row's own tokens are padded to a multiple


@dataclass(frozen=True, slots=True)
class Attended:
    """Query tokens of a step, and what is known of their attention."""

    q: torch.Tensor  # [query tokens, q_heads, head_dim]
    out: torch.Tensor  # like q, contiguous
    lse: torch.Tensor  # fp32 [query tokens, q_heads], base 2


def attend_prefix(
    heads: HeadShape,
    kv: LayerKV,
    step: Attended,
    pages: torch.Tensor,
    tokens: slice | torch.Tensor,
    sizes: PieceSizes,
) -> None:
    """Attend the keys of whole `pages`, int32, for the query tokens `tokens`, and merge that into what is known of them.

    The pages hold a multiple of the smallest piece of keys.
    """
    pieces = list(_query_pieces(heads, step.q, tokens, sizes.queries))
    listed = isinstance(tokens, torch.Tensor)
    block = 16
    first_page = 0
    for num_keys, _ in cut(len(pages) * kv.page_size, sizes.keys):
        end_page = first_page + num_keys // kv.page_size
        k, v = (gather(kv, part, pages[first_page:end_page], step.q.dtype)[None] for part in (0, 1))
        first_page = end_page
        for packed, part, num_tokens in pieces:
            dense, dense_lse = dense_attention(packed, k, v, heads.sm_scale, causal=False)
            first = part.start if isinstance(part, slice) else 0
            merge_pair_kernel[(triton.cdiv(num_tokens, block), heads.num_q_heads)](
                step.out, step.lse, dense, dense_lse, part if listed else step.lse, first,
                num_tokens, packed.shape[2] // heads.group, G=heads.group, KVH=heads.num_kv_heads, D=heads.head_dim,
                BT=block, LISTED=listed,
            )  # fmt: skip


def attend_own(
    heads: HeadShape, kv: LayerKV, step: Attended, pages: torch.Tensor, tokens: slice, sizes: PieceSizes
) -> None:
    """Attend causally a row's own keys, which begin with the first of `pages`, as many as it has query tokens."""
    num_tokens = tokens.stop - tokens.start
    room = -(-num_tokens // sizes.own_step) * sizes.own_step
    k, v = (torch.zeros(1, heads.num_kv_heads, room, heads.head_dim, dtype=step.q.dtype, device=step.q.device)
            for _ in range(2))  # fmt: skip
    for part, padded in enumerate((k, v)):  # what lies in the last page behind the row's end may be no number
        padded[0, :, :num_tokens] = gather(kv, part, pages, step.q.dtype)[:, :num_tokens]
    q = torch.zeros(room, *step.q.shape[1:], dtype=step.q.dtype, device=step.q.device)
    q[:num_tokens] = step.q[tokens]
    dense, dense_lse = dense_attention(q.transpose(0, 1)[None], k, v, heads.sm_scale, causal=True)
    step.out[tokens] = dense[0, :, :num_tokens].transpose(0, 1)
    step.lse[tokens] = dense_lse[0, :, :num_tokens].transpose(0, 1) * _LOG2_E


def cut(length: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """`length` as pieces of `sizes`, largest first -> (size, used). Only the last may be used in part."""
    while length > 0:
        size = next((size for size in sizes if size <= length), sizes[-1])
        yield size, min(size, length)
        length -= size


def _query_pieces(
    heads: HeadShape, q: torch.Tensor, tokens: slice | torch.Tensor, sizes: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, slice | torch.Tensor, int]]:
    """-> queries `[1, kv_heads, size * group, head_dim]`, which tokens those are, and how many."""
    kv_heads, dim = heads.num_kv_heads, heads.head_dim
    length = len(tokens) if isinstance(tokens, torch.Tensor) else tokens.stop - tokens.start
    first = 0
    for size, used in cut(length, sizes):
        if isinstance(tokens, torch.Tensor):
            part: slice | torch.Tensor = tokens[first : first + used]
        else:
            part = slice(tokens.start + first, tokens.start + first + used)
        first += used
        packed = torch.zeros(kv_heads, size, heads.group, dim, dtype=q.dtype, device=q.device)
        packed[:, :used] = q[part].reshape(used, kv_heads, heads.group, dim).transpose(0, 1)
        yield packed.view(1, kv_heads, size * heads.group, dim), part, used


def gather(kv: LayerKV, part: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys (`part` 0) or values (1) of `pages` as one contiguous `[kv_heads, tokens, head_dim]` of `dtype`."""
    source, scale = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[part]
    _, kv_heads, page_size, dim = source.shape
    num_tokens = len(pages) * page_size
    out = torch.empty(kv_heads, num_tokens, dim, dtype=dtype, device=source.device)
    words = source.view(torch.int16) if kv.is_fp8 else source
    gather_kernel[(len(pages), kv_heads)](
        words, words if scale is None else scale, pages, out, words.stride(0), words.stride(1), num_tokens,
        D=dim, PAGE=page_size, FP8=kv.is_fp8, ASM=not triton.knobs.runtime.interpret,
    )  # fmt: skip
    return out


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` [1, q_heads, n, head_dim] to `k`, `v` [1, kv_heads, m, head_dim]; causal where n = m.

    Returns the output, contiguous, and natural log-sum-exps, fp32 [1, q_heads, n].
    """
    if not q.is_cuda:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = (q.float() @ k.float().transpose(-1, -2)) * sm_scale
        if causal:
            scores += torch.full(scores.shape[-2:], float("-inf")).triu(1)
        return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)
    if q.shape[-1] <= MAX_CUDNN_DIM:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=sm_scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=sm_scale)
    return out.contiguous(), lse.reshape(q.shape[:-1]).contiguous()
