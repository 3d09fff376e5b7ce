"""x @ weight.T for a few rows in Triton: bound by reading the weight once, so blocks of the weight are what is spread."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16


@triton.jit
def small_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_out,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program i: BN outputs of all rows. GATED: silu of output n times output `num_out` + n."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, 16)
    k = tl.arange(0, BK)
    inside = n < num_out
    weight = weight_ptr + tl.minimum(n, num_out - 1).to(tl.int64)[:, None] * K + k[None, :]
    x = x_ptr + tl.minimum(m, num_rows - 1)[:, None] * K + k[None, :]
    acc = tl.zeros((16, BN), tl.float32)
    up = tl.zeros((16, BN), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        part = tl.load(x + at)
        acc = tl.dot(part, tl.trans(tl.load(weight + at)), acc)
        if GATED:
            up = tl.dot(part, tl.trans(tl.load(weight + num_out * K + at)), up)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + num_out + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    ok = (m < num_rows)[:, None] & inside[None, :]
    tl.store(out_ptr + m[:, None] * num_out + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=ok)


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Blocks of one launch: outputs of a program, inputs of a step, warps, and steps in flight."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: LinearTile, gated: bool = False
) -> torch.Tensor:
    """`x` [rows <= 16, K] contiguous, `weight` [outputs, K], K a multiple of `tile.inputs`."""
    num_out, width = weight.shape
    num_out //= 2 if gated else 1
    out = torch.empty(x.shape[0], num_out, dtype=x.dtype, device=x.device)
    small_linear_kernel[(triton.cdiv(num_out, tile.outputs),)](
        x, weight, weight if bias is None else bias, out, x.shape[0], num_out, K=width, BN=tile.outputs,
        BK=tile.inputs, BIAS=bias is not None, GATED=gated, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
