"""Load a causal language model of the model library with our attention in it."""

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from headstart.core.errors import WorkerError
from headstart.model.hook import ATTENTION_NAME, register_attention
from headstart.model.info import parse_overrides, read_model_config
from headstart.model.source import WeightSource, weight_files

_FULL_ATTENTION = "full_attention"


def load_model(source: WeightSource, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model in eval mode on its device. Raises WorkerError for what cannot be loaded or is not built."""
    register_attention()
    disable_progress_bar()
    config = load_config(source)
    if source.load_format == "dummy":
        model = _random_model(config, source, dtype)
    else:
        if not weight_files(source.folder):
            raise WorkerError(f"{source.folder} holds no *.safetensors weights; --load-format dummy does without")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise WorkerError(f"cannot load {source.folder}: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def load_config(source: WeightSource) -> PreTrainedConfig:
    """The library's configuration with overrides applied. Raises WorkerError where a layer type is not built."""
    content = read_model_config(source.folder, parse_overrides(source.overrides))
    try:
        config = AutoConfig.for_model(**content)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise WorkerError(f"{source.folder / 'config.json'} is not usable: {error}") from error
    _refuse_unbuilt(config)
    return config


def _refuse_unbuilt(config: PreTrainedConfig) -> None:
    layer_types = getattr(config, "layer_types", None) or []
    unbuilt = sorted({kind for kind in layer_types if kind != _FULL_ATTENTION})
    if unbuilt:
        raise WorkerError(f"{config.model_type} has layers of types that are not built: {', '.join(unbuilt)}")
    window = getattr(config, "sliding_window", None)
    if window is not None and not layer_types and getattr(config, "use_sliding_window", True):
        raise WorkerError(f"{config.model_type} attends within a sliding window of {window} tokens, which is not built")
    if getattr(config, "is_encoder_decoder", False):
        raise WorkerError(f"{config.model_type} is an encoder-decoder model; only causal language models are built")


def _random_model(config: PreTrainedConfig, source: WeightSource, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        except ValueError as error:
            raise WorkerError(f"{source.folder} is no causal language model: {error}") from error
