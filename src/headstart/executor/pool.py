"""The KV pool: one tensor, page first, so that a page is one contiguous block for transfers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.core.errors import WorkerError
from headstart.core.layout import PoolRegion


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`[num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]`; index 2 is key, then value."""

    num_pages: int
    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_pages, self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)

    def page_bytes(self, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim * dtype.itemsize


class KVPool:
    """Owns the tensor. Its memory is not cleared: attention never reads a position that no row has written."""

    def __init__(self, shape: PoolShape, data: torch.Tensor) -> None:
        self.shape = shape
        self.data = data

    @classmethod
    def allocate(cls, shape: PoolShape, dtype: torch.dtype, device: str) -> "KVPool":
        """Reserve the pool; the system hands out its memory as pages are first written. Raises WorkerError."""
        try:
            return cls(shape, torch.empty(shape.sizes, dtype=dtype, device=device))
        except RuntimeError as error:
            size = shape.num_pages * shape.page_bytes(dtype)
            raise WorkerError(f"no memory for a KV pool of {shape.num_pages} pages, {size} bytes") from error

    @property
    def region(self) -> PoolRegion:
        return PoolRegion(
            address=self.data.data_ptr(),
            num_pages=self.shape.num_pages,
            page_bytes=self.shape.page_bytes(self.data.dtype),
            device=str(self.data.device),
        )

    def host_bytes(self) -> NDArray[np.uint8]:
        """`[num_pages, page_bytes]`, the memory itself. Only for a pool on the CPU."""
        return self.data.view(torch.uint8).reshape(self.shape.num_pages, -1).numpy()

    def layer(self, layer: int) -> torch.Tensor:
        """One layer as a strided view `[num_pages, 2, num_kv_heads, page_size, head_dim]`."""
        return self.data[:, layer]
