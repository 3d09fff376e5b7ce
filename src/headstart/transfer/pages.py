"""What every backend checks before it posts a write."""

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.transfer.contract import TransferError


def check_pages(src_pages: Int32Array, dst_pages: Int32Array, num_src: int, num_dst: int) -> None:
    """Raise ValueError for what only our own bug can ask, TransferError for target pages the peer does not have."""
    if len(src_pages) != len(dst_pages) or len(src_pages) == 0:
        raise ValueError(f"a write moves at least one page: {len(src_pages)} sources, {len(dst_pages)} targets")
    if np.min(src_pages) < 0 or np.max(src_pages) >= num_src:
        raise ValueError(f"source pages lie outside [0, {num_src})")
    if np.min(dst_pages) < 0 or np.max(dst_pages) >= num_dst:
        raise TransferError(f"target pages lie outside [0, {num_dst})")
    if len(np.unique(dst_pages)) != len(dst_pages):
        raise TransferError("a target page is named twice")
