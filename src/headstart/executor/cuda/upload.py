"""Small host arrays on their way to the device, behind what was launched before."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`, made on the current stream. The host does not wait: pinned memory is reused only
    after the stream has read it."""
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory that holds `tensor` once the current stream has come this far."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
