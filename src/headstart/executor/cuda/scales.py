"""Scales of fp8 KV: those of the checkpoint if it has them, else 1."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headstart.core.errors import WorkerError

_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$")

Scales = list[tuple[torch.Tensor, torch.Tensor]]
"""By layer, of keys and of values: float32 [kv_heads]. A stored number times its scale is the key or value."""


def read_scales(folder: Path, num_layers: int, kv_heads: int, device: str) -> tuple[Scales, bool]:
    """Scales, and whether the checkpoint in `folder` has any. Raises WorkerError if one has an unusable shape."""
    ones = [[torch.ones(kv_heads) for _ in range(2)] for _ in range(num_layers)]
    found = False
    for layer, part, scale in _stored(folder):
        if layer >= num_layers or scale.numel() not in (1, kv_heads):
            raise WorkerError(f"{folder} has a KV scale of {tuple(scale.shape)} for layer {layer}; 1 or {kv_heads} fit")
        ones[layer][part] = scale.float().reshape(-1).expand(kv_heads).clone()
        found = True
    return [(keys.to(device), values.to(device)) for keys, values in ones], found


def _stored(folder: Path) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(layer, 0 for keys or 1 for values, scale)."""
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    if match := _NAME.search(name):
                        yield int(match[1]), int((match[2] or match[3]) == "v"), file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WorkerError(f"cannot read {path}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """Weight files that name a scale; all of them if there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return sorted({folder / file for name, file in names.items() if _NAME.search(name)})
