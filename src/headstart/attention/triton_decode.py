"""Decode attention over the KV pool in Triton: plan-driven and prefix-shared, and a plain ungrouped kernel beside it.

Two launches a layer. Stage 1 is a fixed grid of programs that take (item, KV head) pairs from a queue and leave
partial results in slots; stage 2 merges each query token's slots in key order and resets the queue. All that changes
between steps (plan, page tables, KV lengths) is read from device memory, so both launches can sit in a CUDA graph.
"""

import triton
import triton.language as tl

from headstart.attention.triton_tile import attend

# Columns and flags of Plan.items; Triton reads module constants only as constexpr.
_ITEM_WIDTH: tl.constexpr = tl.constexpr(8)
_OPEN: tl.constexpr = tl.constexpr(1)
_CAUSAL: tl.constexpr = tl.constexpr(2)


@triton.jit
def run_item(
    it, h, q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, item_ptr, q_list_ptr, slot_ptr, pos_ptr, part_ptr, lse_ptr,
    out_ptr, k_scale_ptr, v_scale_ptr, scale_log2, stride_q, stride_page, stride_head, stride_table,
    KVH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr,
    FP8: tl.constexpr, CAUSAL: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One item for one KV head. A token's only partial goes straight to the output. CAUSAL: chunks of prompts."""
    item = item_ptr + it * _ITEM_WIDTH
    src = tl.load(item)
    tok0 = tl.load(item + 1)
    end = tok0 + tl.load(item + 2)
    q_off = tl.load(item + 3)
    n_q = tl.load(item + 4)
    ordinal = tl.load(item + 5)
    flags = tl.load(item + 6)
    if flags & _OPEN:
        end = tl.load(kv_len_ptr + src)
    r = tl.arange(0, MT)
    rows_ok = r < n_q * G
    token = tl.load(q_list_ptr + q_off + r // G, mask=rows_ok, other=0)
    head = h * G + r % G
    num_clear = (end - tok0) // BN
    q_pos = token
    if CAUSAL:
        q_pos = tl.load(pos_ptr + token, mask=rows_ok, other=0)
        if flags & _CAUSAL:
            first_pos = tl.load(pos_ptr + tl.load(q_list_ptr + q_off))
            num_clear = tl.maximum(tl.minimum(num_clear, (first_pos + 1 - tok0) // BN), 0)
        else:
            q_pos = tl.full((MT,), 0x7FFFFFFF, tl.int32)
    if FP8:
        scale_log2 *= tl.load(k_scale_ptr + h)
    out, lse = attend(
        q_ptr, k_ptr + h * stride_head, v_ptr + h * stride_head, table_ptr + src.to(tl.int64) * stride_table, rows_ok,
        token, head, q_pos, tok0, end, num_clear, scale_log2, stride_q, stride_page, G, D, PAGE, MT, BN, FP8, CAUSAL,
        ASM, STAGES,
    )  # fmt: skip
    slot = tl.load(slot_ptr + token, mask=rows_ok, other=0)
    alone = tl.load(slot_ptr + token + 1, mask=rows_ok, other=0) - slot == 1
    d = tl.arange(0, D)[None, :]
    final = out * tl.load(v_scale_ptr + h) if FP8 else out
    at = (token.to(tl.int64) * (KVH * G) + head) * D
    tl.store(out_ptr + at[:, None] + d, final.to(out_ptr.dtype.element_ty), mask=(rows_ok & alone)[:, None])
    place = (slot + ordinal).to(tl.int64) * (KVH * G) + head
    tl.store(part_ptr + place[:, None] * D + d, out, mask=(rows_ok & (alone == 0))[:, None])
    tl.store(lse_ptr + place, lse, mask=rows_ok)


@triton.jit(do_not_specialize=["stride_table"])
def grouped_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, count_ptr, item_ptr, q_list_ptr, slot_ptr, pos_ptr, queue_ptr,
    part_ptr, lse_ptr, out_ptr, k_scale_ptr, v_scale_ptr, scale_log2, stride_q, stride_page, stride_head, stride_table,
    KVH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr,
    FP8: tl.constexpr, CAUSAL: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs take work from a queue, longest items first; the heads of an item are neighbours."""
    num_work = tl.load(count_ptr) * KVH
    work = tl.program_id(0)
    while work < num_work:
        following = tl.atomic_add(queue_ptr, 1, sem="relaxed") + tl.num_programs(0)
        run_item(
            work // KVH, work % KVH, q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, item_ptr, q_list_ptr, slot_ptr,
            pos_ptr, part_ptr, lse_ptr, out_ptr, k_scale_ptr, v_scale_ptr, scale_log2, stride_q, stride_page,
            stride_head, stride_table, KVH, G, D, PAGE, MT, BN, FP8, CAUSAL, ASM, STAGES,
        )  # fmt: skip
        work = following


@triton.jit
def ungrouped_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, kv_len_ptr, part_ptr, lse_ptr, k_scale_ptr, scale_log2, stride_q, stride_page,
    stride_head, stride_table, chunk,
    KVH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, MT: tl.constexpr, BN: tl.constexpr,
    FP8: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Plain split-KV decode: program (KV head, split, row) reads tokens [split * chunk, (split + 1) * chunk)."""
    h = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    kv_len = tl.load(kv_len_ptr + row)
    tok0 = split * chunk
    if tok0 >= kv_len:
        return
    end = tl.minimum(tok0 + chunk, kv_len)
    r = tl.arange(0, MT)
    rows_ok = r < G
    token = tl.full((MT,), 0, tl.int32) + row
    head = h * G + r
    if FP8:
        scale_log2 *= tl.load(k_scale_ptr + h)
    out, lse = attend(
        q_ptr, k_ptr + h * stride_head, v_ptr + h * stride_head, table_ptr + row.to(tl.int64) * stride_table, rows_ok,
        token, head, token, tok0, end, (end - tok0) // BN, scale_log2, stride_q, stride_page, G, D, PAGE, MT, BN, FP8,
        False, ASM, STAGES,
    )  # fmt: skip
    place = (row.to(tl.int64) * tl.num_programs(1) + split) * (KVH * G) + head
    tl.store(part_ptr + place[:, None] * D + tl.arange(0, D)[None, :], out, mask=rows_ok[:, None])
    tl.store(lse_ptr + place, lse, mask=rows_ok)


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, slot_ptr, kv_len_ptr, queue_ptr, out_ptr, out_lse_ptr, v_scale_ptr, splits, chunk,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, NS: tl.constexpr, FP8: tl.constexpr, UNGROUPED: tl.constexpr,
    WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program (token, head) merges the token's slots in order. A token without slots (padding) becomes zeros.

    Planned attention has written the output of a token with one slot.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    if UNGROUPED:
        lo = token * splits
        hi = lo + tl.cdiv(tl.load(kv_len_ptr + token), chunk)
    else:
        lo = tl.load(slot_ptr + token)
        hi = tl.load(slot_ptr + token + 1)
        if (token == 0) & (head == 0):
            tl.store(queue_ptr, 0)
        if hi - lo == 1:
            if WITH_LSE:
                lse = tl.load(lse_ptr + lo.to(tl.int64) * HQ + head)
                tl.store(out_lse_ptr + token.to(tl.int64) * HQ + head, lse)
            return
    d = tl.arange(0, D)
    n = tl.arange(0, NS)
    peak = -float("inf")
    mass = 0.0
    acc = tl.zeros((D,), tl.float32)
    for first in range(lo, hi, NS):
        slots = (first + n).to(tl.int64)
        ok = slots < hi
        lse = tl.load(lse_ptr + slots * HQ + head, mask=ok, other=-float("inf"))
        part = tl.load(part_ptr + (slots * HQ + head)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight = tl.exp2(lse - shift)
        decay = tl.exp2(peak - shift)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        mass = mass * decay + tl.sum(weight, 0)
        peak = new_peak
    acc = acc / tl.where(mass == 0.0, 1.0, mass)
    if FP8:
        acc *= tl.load(v_scale_ptr + head // G)
    at = token.to(tl.int64) * HQ + head
    tl.store(out_ptr + at * D + d, acc.to(out_ptr.dtype.element_ty))
    if WITH_LSE:
        tl.store(out_lse_ptr + at, peak + tl.log2(mass))
