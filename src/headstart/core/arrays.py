"""The one array type of the control plane: read-only one-dimensional int32 (token ids, page ids)."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


def int32_array(values: Iterable[int] | Int32Array) -> Int32Array:
    """Copy `values` into a fresh read-only int32 array of shape [n]."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
    array.setflags(write=False)
    return array


EMPTY: Int32Array = int32_array(())
