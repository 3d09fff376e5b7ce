"""Linear layers with packed float16 weights and float32 activations, for CPUs that cannot multiply bfloat16.

A decode step reads every weight once for a few rows, so it runs at the speed of memory: half the bytes are nearly half
the time. Weights are rounded to float16 (11 significant bits, bfloat16 has 8), products and sums are float32. The
kernels are FBGEMM's, which torch carries on x86.
"""

import torch

from headstart.core.errors import WorkerError

_F16_MAX = 65504.0


def float16_weights_are_built() -> bool:
    """Whether this torch has the kernels."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class Float16Linear(torch.nn.Module):
    """Takes the place of a float32 nn.Linear; `packed` comes from `pack_linears`."""

    def __init__(self, packed: torch.ScriptObject, in_features: int, out_features: int) -> None:
        super().__init__()
        self._packed = packed
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every float32 nn.Linear whose weights fit float16; returns how many. Other modules keep float32.

    Raises WorkerError where this torch lacks the kernels.
    """
    if not float16_weights_are_built():
        raise WorkerError("this torch has no float16 weight kernels (FBGEMM); choose --dtype float32 or bfloat16")
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and _fits(child):
                bias = None if child.bias is None else child.bias.detach()
                packed = torch.ops.quantized.linear_prepack_fp16(child.weight.detach(), bias)
                setattr(module, name, Float16Linear(packed, child.in_features, child.out_features))
                replaced += 1
    return replaced


def _fits(linear: torch.nn.Linear) -> bool:
    smallest, largest = linear.weight.detach().aminmax()
    return linear.weight.dtype == torch.float32 and max(-float(smallest), float(largest)) <= _F16_MAX
