"""Small Triton kernels around the forward pass: inputs of decode rows, and KV to its pages."""

import torch
import triton
import triton.language as tl

from headstart.attention.triton_attention import LayerKV
from headstart.executor.cuda.columns import BLOCK_WIDTH, KV_LEN, SOURCE, TOKEN

_WIDTH: tl.constexpr = tl.constexpr(BLOCK_WIDTH)
_TOKEN: tl.constexpr = tl.constexpr(TOKEN)
_SOURCE: tl.constexpr = tl.constexpr(SOURCE)
_KV_LEN: tl.constexpr = tl.constexpr(KV_LEN)
_FP8_MAX: tl.constexpr = tl.constexpr(448.0)
NOWHERE = -1
"""The slot of a token whose KV is not kept."""


@triton.jit
def inputs_kernel(
    block_ptr, drawn_ptr, table_ptr, stride_table, token_ptr, position_ptr, kv_len_ptr, slot_ptr, num_rows,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Inputs of decode rows from the step block: tokens, positions, KV lengths, and where their KV goes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = row < num_rows
    columns = block_ptr + row * _WIDTH
    source = tl.load(columns + _SOURCE, mask=ok, other=-1)
    kv_len = tl.load(columns + _KV_LEN, mask=ok, other=0)
    drawn = tl.load(drawn_ptr + source, mask=ok & (source >= 0), other=0)
    given = tl.load(columns + _TOKEN, mask=ok, other=0)
    there = ok & (kv_len > 0)
    position = tl.where(there, kv_len - 1, 0)
    page = tl.load(table_ptr + row.to(tl.int64) * stride_table + position // PAGE, mask=there, other=0)
    slot = tl.where(there, page.to(tl.int64) * PAGE + position % PAGE, -1)
    tl.store(token_ptr + row, tl.where(source >= 0, drawn, given), mask=ok)
    tl.store(position_ptr + row, position, mask=ok)
    tl.store(kv_len_ptr + row, kv_len.to(tl.int32), mask=ok)
    tl.store(slot_ptr + row, slot.to(tl.int32), mask=ok)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, slot_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, stride_k_token, stride_k_head,
    stride_v_token, stride_v_head, stride_page, stride_head,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (token) writes its keys and values, all heads, to its slot of one layer."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)[:, None]
    d = tl.arange(0, D)[None, :]
    ok = (head < HEADS) & (d < D)
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + d, mask=ok, other=0.0)
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + d, mask=ok, other=0.0)
    if FP8:
        k = k.to(tl.float32) / tl.load(k_scale_ptr + head, mask=head < HEADS, other=1.0)
        v = v.to(tl.float32) / tl.load(v_scale_ptr + head, mask=head < HEADS, other=1.0)
        k = tl.minimum(tl.maximum(k, -_FP8_MAX), _FP8_MAX)
        v = tl.minimum(tl.maximum(v, -_FP8_MAX), _FP8_MAX)
    at = slot // PAGE * stride_page + head * stride_head + slot % PAGE * D + d
    tl.store(k_pool_ptr + at, k.to(k_pool_ptr.dtype.element_ty), mask=ok)
    tl.store(v_pool_ptr + at, v.to(v_pool_ptr.dtype.element_ty), mask=ok)


def read_inputs(
    block: torch.Tensor,
    drawn: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Tokens, positions (int64), KV lengths and slots (int32) of decode rows; `out` says how many rows."""
    tokens, positions, kv_lens, slots = out
    num_rows = tokens.shape[0]
    inputs_kernel[(triton.cdiv(num_rows, 64),)](
        block, drawn, table, table.stride(0), tokens, positions, kv_lens, slots, num_rows, PAGE=page_size, ROWS=64,
        num_warps=2,
    )  # fmt: skip


def write_kv(kv: LayerKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store `key` and `value` [tokens, kv_heads, head_dim] (last dimension contiguous) at `slots` of one layer; NOWHERE
    is not stored. fp8 numbers are divided by their head's scale and kept within the type's range."""
    num_tokens, heads, dim = key.shape
    write_kernel[(num_tokens,)](
        key, value, slots, kv.k, kv.v, kv.k if kv.k_scale is None else kv.k_scale,
        kv.v if kv.v_scale is None else kv.v_scale, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv.k.stride(0), kv.k.stride(1), HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), D=dim,
        PAGE=kv.page_size, FP8=kv.is_fp8, num_warps=4 if heads * dim >= 1024 else 1,
    )  # fmt: skip
