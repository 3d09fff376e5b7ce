"""Linear layers with packed float16 weights and float32 activations, for CPUs that cannot multiply bfloat16.

A decode step reads every weight once for a few rows, so it runs at the speed of memory: half the bytes are nearly half
the time. Weights are rounded to float16 (11 significant bits, bfloat16 has 8), products and sums are float32. The
kernels are FBGEMM's, which torch carries on x86. With hundreds of rows the packed product is no faster than the plain
one, and packing takes some 30 ns a weight: a worker that only runs long chunks rounds its weights and packs nothing.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from headstart.core.errors import WorkerError
from headstart.model.forms import reads_parameters_of

_F16_MAX = 65504.0
_SLICE = 4096
"""Outputs packed at a time. Packing walks down columns: of taller weights each step misses the caches."""
_PROJECTIONS = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "qkv_proj",
        "out_proj",
        "query_key_value",
        "dense",
        "c_attn",
        "c_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "fc1",
        "fc2",
        "fc_in",
        "fc_out",
        "c_fc",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "w1",
        "w2",
        "w3",
        "lm_head",
        "embed_out",
    ]
)
"""Names of attention's, feed-forward layers' and output projections in the library."""


def float16_weights_are_built() -> bool:
    """Whether this torch has the kernels."""
    return "fbgemm" in torch.backends.quantized.supported_engines


class Float16Linear(torch.nn.Module):
    """Takes the place of a float32 nn.Linear; `packed` holds slices of its outputs and comes from `pack_linears`."""

    def __init__(self, packed: list[torch.ScriptObject], in_features: int, out_features: int) -> None:
        super().__init__()
        self._packed = packed
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._packed) == 1:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._packed[0])
        return torch.cat([torch.ops.quantized.linear_dynamic_fp16(x, part) for part in self._packed], dim=-1)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every projection in float32 whose weights fit float16; returns how many. Other modules keep float32.

    Raises WorkerError where this torch lacks the kernels.
    """
    if not float16_weights_are_built():
        raise WorkerError("this torch has no float16 weight kernels (FBGEMM); choose --dtype float32 or bfloat16")
    places = _linears(model)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        packed = threads.map(_packed, [linear for _, _, linear in places])
        for (module, name, _), replacement in zip(places, packed, strict=True):
            setattr(module, name, replacement)
    return len(places)


def round_linears(model: torch.nn.Module) -> int:
    """Give every nn.Linear that `pack_linears` would replace the weights it would have; returns how many."""
    places = _linears(model)
    for _, _, linear in places:
        linear.weight.data = linear.weight.detach().half().float()
    return len(places)


def _linears(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """(parent, name, module) of what can be packed: a projection by name, which its parent calls and looks no further
    into. Routers stay as they are: they are small, and rounded scores would pick other experts."""
    return [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear
        and name in _PROJECTIONS
        and not reads_parameters_of(type(module), name)
        and _fits(child)
    ]


def _packed(linear: torch.nn.Linear) -> Float16Linear:
    weights = linear.weight.detach().split(_SLICE)
    biases = [None] * len(weights) if linear.bias is None else linear.bias.detach().split(_SLICE)
    with torch.inference_mode():
        parts = [torch.ops.quantized.linear_prepack_fp16(*part) for part in zip(weights, biases, strict=True)]
    return Float16Linear(parts, linear.in_features, linear.out_features)


def _fits(linear: torch.nn.Linear) -> bool:
    smallest, largest = linear.weight.detach().aminmax()
    return linear.weight.dtype == torch.float32 and max(-float(smallest), float(largest)) <= _F16_MAX
