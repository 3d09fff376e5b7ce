"""Long chunks of prompts over a cached prefix: the prefix is gathered once and attended by a dense kernel.

    keys      [ prefix, whole pages: gather, dense, not causal | the rows' own: paged, causal ]
    queries   every query token of the rows sees all of the prefix, so it needs no mask

Both parts come with log-sum-exps and are merged. Gathering costs a few percent of the dense kernel's time (it also
dequantises fp8), and the dense kernel is faster than a paged one. Rows that share a prefix share its part.
"""

import torch
import triton
import triton.language as tl

from headstart.attention.device_plan import DevicePlan
from headstart.attention.triton_attention import HeadShape, LayerKV, PlannedAttention, RowTables
from headstart.attention.triton_tile import unpack_e4m3


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


@triton.jit
def merge_pair_kernel(
    out_ptr, lse_ptr, dense_ptr, dense_lse_ptr, num_tokens,
    G: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Merge dense results `[kv_heads, tokens, G, D]`, natural log-sum-exps, into `out` `[tokens, q_heads, D]`, base 2."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    ok = token < num_tokens
    head = tl.program_id(1)
    ours = token * (KVH * G) + head
    dense = ((head // G) * num_tokens + token) * G + head % G
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


class GatheredExtend:
    """Chunks of prompts over one common prefix of whole pages. Pays from about 512 query tokens on one prefix; below, the
    paged kernel alone is faster."""

    def __init__(self, heads: HeadShape, paged: PlannedAttention) -> None:
        """`paged` attends the rows' own keys; it must be causal."""
        self._heads = heads
        self._paged = paged

    def __call__(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        prefix_pages: torch.Tensor,
        rows: RowTables,
        plan: DevicePlan,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """`q`, `out` [query tokens, q_heads, head_dim], contiguous.

        `prefix_pages` int32 [pages] come before every row's keys. `rows` and `plan` describe the rows without them:
        page tables from there on, lengths and positions counted from there.
        """
        num_tokens, kv_heads, dim = q.shape[0], self._heads.num_kv_heads, self._heads.head_dim
        lse = torch.empty(num_tokens, self._heads.num_q_heads, dtype=torch.float32, device=q.device)
        self._paged(q, kv, rows, plan, out, out_lse=lse)
        k, v = (gather(kv, part, prefix_pages, q.dtype) for part in (0, 1))
        packed = q.view(num_tokens, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        dense, dense_lse = dense_attention(packed, k[None], v[None], self._heads.sm_scale)
        block = 16
        merge_pair_kernel[(triton.cdiv(num_tokens, block), self._heads.num_q_heads)](
            out, lse, dense, dense_lse, num_tokens, G=self._heads.group, KVH=kv_heads, D=dim, BT=block
        )
        return out


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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention without a mask, `[1, heads, n, head_dim]` each. -> contiguous output, natural log-sum-exps fp32."""
    if not q.is_cuda:
        scores = (q.float() @ k.float().transpose(-1, -2)) * sm_scale
        return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)
    if q.shape[-1] <= 128:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=sm_scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=sm_scale)
    return out.contiguous(), lse.reshape(q.shape[:-1]).contiguous()
