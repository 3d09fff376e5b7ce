"""The KV pool: one tensor in the order of its `KVLayout`, so that a page is one contiguous block for transfers."""

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.core.errors import WorkerError
from headstart.core.kv_layout import KVLayout
from headstart.core.layout import PoolRegion

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""How torch calls the types that KV can be stored in."""


class KVPool:
    """Owns the tensor `[num_pages, kv_heads, layers, 2, page_size, head_dim]`. Its memory is not cleared: attention never
    reads a position that no row has written."""

    def __init__(self, layout: KVLayout, data: torch.Tensor) -> None:
        self.layout = layout
        self.data = data

    @classmethod
    def allocate(cls, layout: KVLayout, num_pages: int, device: str) -> "KVPool":
        """Reserve the pool; a CPU hands out its memory as pages are first written. Raises WorkerError."""
        try:
            data = torch.empty(layout.pool_shape(num_pages), dtype=TORCH_DTYPES[layout.dtype], device=device)
        except RuntimeError as error:
            size = num_pages * layout.page_bytes
            raise WorkerError(
                f"no memory for a KV pool of {num_pages} pages, {size} bytes on {device}; lower --mem-fraction-static or "
                "--max-total-tokens"
            ) from error
        return cls(layout, data)

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def region(self) -> PoolRegion:
        return PoolRegion(self.data.data_ptr(), self.num_pages, self.layout.page_bytes, str(self.data.device))

    def host_bytes(self) -> NDArray[np.uint8]:
        """`[num_pages, page_bytes]`, the memory itself. Only for a pool on the CPU."""
        return self.data.view(torch.uint8).reshape(self.num_pages, -1).numpy()
