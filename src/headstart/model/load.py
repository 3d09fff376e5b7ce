"""Load a causal language model of the model library with our attention in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as library_logging

from headstart.model.hook import ATTENTION_NAME, pass_step_on, register_attention
from headstart.model.info import parse_overrides, read_model_config
from headstart.model.positions import fix_position_scaling
from headstart.model.refusals import refuse_config, refuse_unservable
from headstart.model.refused import ModelRefused, shortened
from headstart.model.source import WeightSource

_IGNORED_BUFFERS = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and models compute themselves."""


def load_model(source: WeightSource, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model in eval mode on its device, every tensor of it read from the source. Raises WorkerError; ModelRefused
    for what cannot be loaded or is not built."""
    refuse_unservable(source.folder, source.overrides, source.load_format)
    register_attention()
    library_logging.disable_progress_bar()
    config = load_config(source)
    try:
        model = _random_model(config, source, dtype) if source.load_format == "dummy" else _read(config, source, dtype)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise ModelRefused(f"cannot load {source.folder} ({config.model_type}): {_first_line(error)}") from error
    fix_position_scaling(model)
    pass_step_on(model)
    return model.to(device).eval().requires_grad_(False)


def load_config(source: WeightSource) -> PreTrainedConfig:
    """The library's configuration with overrides applied. Raises ModelRefused where a layer type is not built."""
    content = read_model_config(source.folder, parse_overrides(source.overrides))
    try:
        config = AutoConfig.for_model(**content)
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelRefused(f"{source.folder / 'config.json'} is not usable: {_first_line(error)}") from error
    refuse_config(_with_defaults(config))
    return config


def _with_defaults(config: PreTrainedConfig) -> dict[str, Any]:
    """config.json with what it left out, as the library fills it in."""
    return config.to_dict() | {"model_type": config.model_type}


def _read(config: PreTrainedConfig, source: WeightSource, dtype: torch.dtype) -> PreTrainedModel:
    with _quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that all of them are named, below
            output_loading_info=True,
        )
    _refuse_incomplete(report, source)
    return model


def _refuse_incomplete(report: dict[str, Any], source: WeightSource) -> None:
    """Raise ModelRefused unless the files held every tensor of the model, in its shape, and no other."""
    found = []
    if missing := sorted(report["missing_keys"]):
        found.append(f"lacks {len(missing)} tensors: {shortened(missing)}")
    beyond = sorted(name for name in report["unexpected_keys"] if not name.endswith(_IGNORED_BUFFERS))
    if beyond:
        found.append(f"holds {len(beyond)} tensors that the model has no place for: {shortened(beyond)}")
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [f"{name} {list(there)} for {list(wanted)}" for name, there, wanted in mismatched]
        found.append(f"holds {len(shapes)} tensors of another shape: {shortened(shapes)}")
    found += [_first_line(text) for text in report["error_msgs"]]
    if found:
        raise ModelRefused(f"{source.folder} {'; '.join(found)}")


def _random_model(config: PreTrainedConfig, source: WeightSource, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(source.seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's reports of many lines off standard error: what they tell is raised instead."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if len(lines) > 1 and text.endswith(":"):
        text += f" {lines[1]}"
    return text if not isinstance(error, KeyError) else f"no {text}"


def num_parameters(source: WeightSource) -> int:
    """Parameters of the model, counted without drawing or reading one. Raises ModelRefused."""
    config = load_config(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())
