"""Queries normed and rotated in place, keys and values into their pages: one launch a layer."""

import math

import torch
import triton
import triton.language as tl

from headstart.attention.packed import PackedHeads
from headstart.attention.triton_attention import HeadShape, LayerKV

_MAX_HEADS = 8  # heads of a program
_FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def norm_rope_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, slot_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, eps,
    stride_qkv, stride_rope, k_page, k_head, k_token, v_page, v_head, v_token,
    HQ: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HB: tl.constexpr, NORM: tl.constexpr,
    ROPE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, block) takes HB heads of one kind. Keys and values of a token with a slot below 0 go nowhere."""
    token = tl.program_id(0)
    first = tl.program_id(1) * HB
    HALF: tl.constexpr = D // 2
    h = tl.arange(0, HB)[:, None]
    d = tl.arange(0, HALF)[None, :]
    source = qkv_ptr + token.to(tl.int64) * stride_qkv + (first + h) * D + d
    a = tl.load(source).to(tl.float32)
    b = tl.load(source + HALF).to(tl.float32)
    if first < HQ + KVH:
        if NORM:
            inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            if first < HQ:
                weight_a, weight_b = tl.load(q_norm_ptr + d), tl.load(q_norm_ptr + HALF + d)
            else:
                weight_a, weight_b = tl.load(k_norm_ptr + d), tl.load(k_norm_ptr + HALF + d)
            a = a * inverse * weight_a.to(tl.float32)
            b = b * inverse * weight_b.to(tl.float32)
        if ROPE:
            at = token.to(tl.int64) * stride_rope + d
            turned = a * tl.load(cos_ptr + at).to(tl.float32) - b * tl.load(sin_ptr + at).to(tl.float32)
            b = b * tl.load(cos_ptr + at + HALF).to(tl.float32) + a * tl.load(sin_ptr + at + HALF).to(tl.float32)
            a = turned
    if first < HQ:
        tl.store(source, a.to(qkv_ptr.dtype.element_ty))
        tl.store(source + HALF, b.to(qkv_ptr.dtype.element_ty))
        return
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    page = (slot // PAGE).to(tl.int64)
    if first < HQ + KVH:
        head = first - HQ + h
        target = k_ptr + page * k_page + head * k_head + (slot % PAGE) * k_token + d
        scale_ptr = k_scale_ptr
    else:
        head = first - HQ - KVH + h
        target = v_ptr + page * v_page + head * v_head + (slot % PAGE) * v_token + d
        scale_ptr = v_scale_ptr
    if FP8:
        scale = tl.load(scale_ptr + head)
        a = tl.minimum(tl.maximum(a / scale, -_FP8_MAX), _FP8_MAX)
        b = tl.minimum(tl.maximum(b / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(target, a.to(k_ptr.dtype.element_ty))
    tl.store(target + HALF, b.to(k_ptr.dtype.element_ty))


def norm_rope_write(heads: PackedHeads, shape: HeadShape, kv: LayerKV, slots: torch.Tensor) -> torch.Tensor:
    """Norm and rotate `heads` and store keys and values at `slots`; returns queries [tokens, q_heads, head_dim].

    `slots` int32 [tokens] are page id * page size + place in the page, below 0 for tokens that are not stored. The
    queries are a view of `heads.qkv`. Numbers past e4m3's range are stored as its largest; NaN stays NaN.
    """
    qkv = heads.qkv
    rotates, norms = heads.cos is not None, heads.q_norm is not None
    block = math.gcd(_MAX_HEADS, shape.num_q_heads, shape.num_kv_heads)
    scales = (kv.k_scale, kv.v_scale) if kv.is_fp8 else (qkv, qkv)
    num_heads = shape.num_q_heads + 2 * shape.num_kv_heads
    norm_rope_write_kernel[(qkv.shape[0], num_heads // block)](
        qkv, heads.cos if rotates else qkv, heads.sin if rotates else qkv, heads.q_norm if norms else qkv,
        heads.k_norm if norms else qkv, slots, kv.k, kv.v, *scales, heads.eps, qkv.stride(0),
        heads.cos.stride(0) if rotates else 0, *kv.k.stride()[:3], *kv.v.stride()[:3],
        HQ=shape.num_q_heads, KVH=shape.num_kv_heads, D=shape.head_dim, PAGE=kv.page_size, HB=block, NORM=norms,
        ROPE=rotates, FP8=kv.is_fp8, num_warps=4 if block * shape.head_dim >= 512 else 1,
    )  # fmt: skip
    return qkv[:, : shape.num_q_heads]
