"""How much of a card's memory is left for a KV pool."""

import torch
from transformers import AutoModelForCausalLM

from headstart.executor.build import DTYPES, choose_dtype
from headstart.executor.cuda.errors import worker_error
from headstart.model.load import load_config
from headstart.model.source import WeightSource

WORKSPACE_BYTES = 3 << 30
"""What steps need beside weights and pool: graphs, logits, partial results of attention, activations of chunks."""


def bytes_for_pool(source: WeightSource, dtype: str, device: str) -> int:
    """Bytes that are free on `device` once the weights of `source` are there. Raises WorkerError without a usable card."""
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise worker_error(error, "asking for its free memory") from error
    return max(0, free - weight_bytes(source, DTYPES[choose_dtype(dtype, device)]) - WORKSPACE_BYTES)


def weight_bytes(source: WeightSource, dtype: torch.dtype) -> int:
    """Of all parameters, as `dtype`. Nothing is read but the configuration."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(source), dtype=dtype)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
