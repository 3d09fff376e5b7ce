"""Puts a model's weights on the card without a copy of them in the host's memory."""

import importlib.util
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from headstart.executor.cuda.errors import worker_error
from headstart.model.load import load_model
from headstart.model.source import WeightSource


def load_on_card(source: WeightSource, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model in eval mode on `device`. Random weights are drawn there. Files are read shard by shard onto the card
    where `accelerate` is installed, which the library asks for; else they pass through the host's memory.

    Raises WorkerError.
    """
    straight = source.load_format == "dummy" or importlib.util.find_spec("accelerate") is not None
    try:
        with torch.device(device) if straight else nullcontext():
            return load_model(source, dtype, device)
    except torch.cuda.OutOfMemoryError as error:
        raise worker_error(error, f"loading {source.folder}") from error
