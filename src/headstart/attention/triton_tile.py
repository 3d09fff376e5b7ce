"""The inner loop that every Triton kernel here shares: one tile of query rows over a range of paged keys.

A query row is a (query token, head of the KV head's group) pair. Softmax runs in base 2 on fp32 scores; log-sum-exps
are base 2 throughout. KV is read as one (page, head) block `[page, head_dim]` at a time. Elements that lie past the
range are never loaded: freed pages may hold NaN, and 0 * NaN is NaN.

fp8 (e4m3) KV is read as 16-bit pairs and unpacked into fp16, even and odd columns apart: a transposed 8-bit operand
would be loaded byte by byte. Queries come split the same way, and outputs are interleaved once at the end.

In tiles of 64 rows and more the tensor cores read keys from shared memory, as the e4m3 they are: queries are split into
two e4m3 parts for that, and only values are unpacked.
"""

import triton
import triton.language as tl

_UNPACK: tl.constexpr = tl.constexpr(
    """{
    .reg .b16 lo, hi;
    .reg .b32 a, b;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $1, a, b, 0x7632;
    }"""
)


@triton.jit
def unpack_e4m3(pairs, ASM: tl.constexpr):
    """int16 pairs of e4m3 -> (low bytes, high bytes) as fp16."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:  # the same in arithmetic: e4m3 bits are fp16 bits shifted, with an exponent bias 8 lower
        bits = pairs.to(tl.int32)
        low = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
        high = ((bits & 0x8000) | ((bits & 0x7F00) >> 1)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return low, high


@triton.jit
def split_e4m3(q):
    """[rows, D] -> e4m3 `high` and `low`, and fp32 [rows, 1] `unscale`: q = (high + low) * unscale.

    e4m3 keeps four significant bits, so two hold the eight of a bf16 number. A row is scaled by a power of two to end
    below 256: what is lost lies under 2**-17 of its largest element. `high` is rounded by its bits, not packed and
    unpacked: ptxas 12.8 was seen to move such an unpacking before its packing.
    """
    q = q.to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    exponent = tl.floor(tl.log2(peak))[:, None]
    q *= tl.exp2(7.0 - exponent)
    bits = q.to(tl.int32, bitcast=True)
    high = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    return high.to(tl.float8e4nv), (q - high).to(tl.float8e4nv), tl.exp2(exponent - 7.0)


@triton.jit
def softmax_step(scores, peak, mass, MASKED: tl.constexpr):
    """Online softmax over one more block of base-2 scores. -> weights, peak, mass, factor for earlier sums."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # In a masked block a row may have no key yet.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    decay = tl.exp2(peak - shift)
    weights = tl.exp2(scores - shift[:, None])
    return weights, new_peak, mass * decay + tl.sum(weights, 1), decay[:, None]


@triton.jit
def load_pages(table_ptr, token, end, PAGE: tl.constexpr, BN: tl.constexpr):
    """Page of `token` where a block lies in one page, else the pages of its BN tokens. None is read past `end`."""
    if PAGE % BN == 0:
        return tl.load(table_ptr + tl.minimum(token, end - 1) // PAGE)
    else:
        return tl.load(table_ptr + tl.minimum(token + tl.arange(0, BN), end - 1) // PAGE)


@triton.jit
def scan(
    acc_a,
    acc_b,
    peak,
    mass,
    q_a,
    q_b,
    k_ptr,
    v_ptr,
    table_ptr,
    tok0,
    lo,
    hi,
    end,
    q_pos,
    scale_log2,
    stride_page,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    DW: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend blocks [lo, hi) of BN keys, counted from token `tok0`, which begins a page.

    `k_ptr` and `v_ptr` are this layer's and head's place in page 0, a token being DW elements (fp8: pairs).
    `table_ptr` is the row's page table. Masked blocks leave out keys at `end` and later and, with CAUSAL, those past
    a query row's `q_pos`.
    """
    n = tl.arange(0, BN)
    d = tl.arange(0, DW)
    page = load_pages(table_ptr, tok0 + lo * BN, end, PAGE, BN)
    for i in tl.range(lo, hi, num_stages=STAGES):
        token = tok0 + i * BN
        # Page ids are loaded a block ahead: a load whose address waits for another load is pipelined half as deep.
        following = load_pages(table_ptr, token + BN, end, PAGE, BN)
        if PAGE % BN == 0:
            offsets = page.to(tl.int64) * stride_page + (token % PAGE) * DW + (n[:, None] * DW + d[None, :])
        else:
            offsets = (page.to(tl.int64) * stride_page + (token + n) % PAGE * DW)[:, None] + d[None, :]
        page = following
        if MASKED:
            inside = (token + n < end)[:, None]
            k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        if PAIRS:
            k_a, k_b = unpack_e4m3(k, ASM)
            scores = tl.dot(q_b, tl.trans(k_b), tl.dot(q_a, tl.trans(k_a)))
        elif FP8:
            scores = tl.dot(q_a, tl.trans(k), tl.dot(q_b, tl.trans(k)))
        else:
            scores = tl.dot(q_a, tl.trans(k))
        scores *= scale_log2
        if MASKED:
            keys = (token + n)[None, :]
            seen = keys < end
            if CAUSAL:
                seen = seen & (keys <= q_pos[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, peak, mass, decay = softmax_step(scores, peak, mass, MASKED)
        if PAIRS:
            v_a, v_b = unpack_e4m3(v, ASM)
            acc_a = tl.dot(weights.to(tl.float16), v_a, acc_a * decay)
            acc_b = tl.dot(weights.to(tl.float16), v_b, acc_b * decay)
        elif FP8:
            acc_a = tl.dot(weights.to(tl.float16), v.to(tl.float16), acc_a * decay)
        else:
            acc_a = tl.dot(weights.to(v.dtype), v, acc_a * decay)
    return acc_a, acc_b, peak, mass


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ok,
    token,
    head,
    q_pos,
    tok0,
    end,
    num_clear,
    scale_log2,
    stride_q,
    stride_page,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    MT: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
    CAUSAL: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys [tok0, end) for MT query rows (token, head), of which `rows_ok` exist. -> output [MT, D], log-sum-exp [MT].

    The first `num_clear` blocks of BN keys are whole and seen by all rows. A row without keys has output 0 and
    log-sum-exp -inf.
    """
    base = q_ptr + token.to(tl.int64) * stride_q + head * D
    PAIRS: tl.constexpr = FP8 and MT < 64
    if PAIRS:
        DW: tl.constexpr = D // 2
        pair = base[:, None] + tl.arange(0, DW)[None, :] * 2
        q_a = tl.load(pair, mask=rows_ok[:, None], other=0.0).to(tl.float16)
        q_b = tl.load(pair + 1, mask=rows_ok[:, None], other=0.0).to(tl.float16)
    else:
        DW: tl.constexpr = D
        q_a = tl.load(base[:, None] + tl.arange(0, D)[None, :], mask=rows_ok[:, None], other=0.0)
        q_b = q_a
        if FP8:
            q_a, q_b, unscale = split_e4m3(q_a)
            scale_log2 *= unscale
    acc_a = tl.zeros((MT, DW), tl.float32)
    acc_b = tl.zeros((MT, DW), tl.float32)
    peak = tl.full((MT,), float("-inf"), tl.float32)
    mass = tl.zeros((MT,), tl.float32)
    acc_a, acc_b, peak, mass = scan(
        acc_a, acc_b, peak, mass, q_a, q_b, k_ptr, v_ptr, table_ptr, tok0, 0, num_clear, end, q_pos, scale_log2,
        stride_page, PAGE, BN, DW, FP8, PAIRS, False, False, ASM, STAGES,
    )  # fmt: skip
    num_blocks = tl.cdiv(end - tok0, BN)
    acc_a, acc_b, peak, mass = scan(
        acc_a, acc_b, peak, mass, q_a, q_b, k_ptr, v_ptr, table_ptr, tok0, num_clear, num_blocks, end, q_pos,
        scale_log2, stride_page, PAGE, BN, DW, FP8, PAIRS, True, CAUSAL, ASM, 1,
    )  # fmt: skip
    scaled = 1.0 / tl.where(mass == 0.0, 1.0, mass)[:, None]
    out = tl.reshape(tl.join(acc_a * scaled, acc_b * scaled), (MT, D)) if PAIRS else acc_a * scaled
    return out, peak + tl.log2(mass)
