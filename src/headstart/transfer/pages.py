"""What every backend checks before it posts a write."""

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.transfer.contract import TransferError


def check_pages(src_pages: Int32Array, dst_pages: Int32Array, num_src: int, num_dst: int) -> None:
    """Raise ValueError for what only our own bug can ask, TransferError for target pages the peer does not have."""
    if len(src_pages) != len(dst_pages) or len(src_pages) == 0:
        raise ValueError(f"a write moves at least one page: {len(src_pages)} sources, {len(dst_pages)} targets")
    if src_pages.min() < 0 or src_pages.max() >= num_src:
        raise ValueError(f"source pages lie outside [0, {num_src})")
    targets = np.sort(dst_pages)
    if targets[0] < 0 or targets[-1] >= num_dst:
        raise TransferError(f"target pages lie outside [0, {num_dst})")
    if np.count_nonzero(targets[1:] == targets[:-1]):
        raise TransferError("a target page is named twice")
