"""Element-wise work of a decoder layer in Triton: each of these is one launch where the model library has several."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x_ptr, update_ptr, weight_ptr, sum_ptr, out_ptr, eps, width, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Program i: row i. The sum is rounded to the row's type before it is normed, as it is stored."""
    row = tl.program_id(0).to(tl.int64) * width
    n = tl.arange(0, BLOCK)
    ok = n < width
    x = tl.load(x_ptr + row + n, mask=ok, other=0.0)
    weight = tl.load(weight_ptr + n, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        x = (x.to(tl.float32) + tl.load(update_ptr + row + n, mask=ok, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + n, x, mask=ok)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + row + n, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Program (row, block): silu(gate) * up, where a row is its gates, then its ups."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = n < width
    gate = tl.load(gate_up_ptr + row * 2 * width + n, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * width + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + n, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=ok)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim of a contiguous `x`, in fp32, rounded once."""
    return _norm(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> x + update, and its RMS norm. Both inputs contiguous and of one shape."""
    return _norm(x, update, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2n]` -> `[..., n]`: silu of the first half times the second, in fp32, rounded once."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.numel() // (2 * width)
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    silu_mul_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def _norm(
    x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    out = torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_rms_norm_kernel[(x.numel() // width,)](
        x, x if update is None else update, weight, total, out, eps, width, ADD=update is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return total, out
