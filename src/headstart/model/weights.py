"""Weight files checked by their headers, before anything reads the weights. Never imports torch.

A safetensors file is 8 bytes (little-endian length of the header), the header in JSON, and the tensors' bytes, whose
offsets the header gives: https://github.com/huggingface/safetensors#format.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from headstart.model.errors import ModelRefused
from headstart.model.source import weight_files

_LFS = b"version https://git-lfs"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


def check_weight_files(folder: Path) -> None:
    """Raise ModelRefused, naming the file, if weights are absent, incomplete, truncated or Git LFS pointers."""
    files = weight_files(folder)
    _check_index(folder, {path.name for path in files})
    if not files:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        others = f" ({pickled[0]} is in a pickle format, which is not read)" if pickled else ""
        raise ModelRefused(f"{folder} holds no *.safetensors weights{others}; --load-format dummy does without")
    for path in files:
        _check_file(path)


def num_elements(path: Path) -> int:
    """Numbers in all tensors of a safetensors file that `check_weight_files` let through, from its header."""
    with path.open("rb") as file:
        tensors: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(prod(one["shape"]) for name, one in tensors.items() if name != "__metadata__")


def _check_index(folder: Path, present: set[str]) -> None:
    index = folder / _INDEX
    if not index.is_file():
        return
    try:
        wanted = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelRefused(f"{index} is not a readable index of weights: {_pointer_or(index, error)}") from error
    if missing := sorted(wanted - present):
        raise ModelRefused(f"{folder} lacks weight files that {_INDEX} names: {', '.join(missing)}")


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if _LFS.startswith(start) and start:
                raise ModelRefused(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 0 < length <= _MAX_HEADER_BYTES:
                raise ModelRefused(f"{path} is not a safetensors file")
            text = file.read(length)
    except OSError as error:
        raise ModelRefused(f"cannot read {path}: {error.strerror}") from error
    _check_size(path, 8 + length, text)


def _check_size(path: Path, header_bytes: int, text: bytes) -> None:
    size = path.stat().st_size
    if size < header_bytes:
        raise ModelRefused(f"{path} is truncated: {size} bytes, and its header alone has {header_bytes}")
    try:
        tensors: dict[str, Any] = json.loads(text)
        ends = [int(one["data_offsets"][1]) for name, one in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelRefused(f"{path} has an unreadable header: {error}") from error
    wanted = header_bytes + max(ends, default=0)
    if size < wanted:
        raise ModelRefused(f"{path} is truncated: {size} bytes of {wanted}")


def _pointer_or(path: Path, error: Exception) -> str:
    try:
        is_pointer = path.read_bytes()[: len(_LFS)] == _LFS
    except OSError:
        is_pointer = False
    return "it is a Git LFS pointer; run `git lfs pull`" if is_pointer else str(error)
