"""Every causal language model of the library is served like `generate` or refused, as docs/models.md says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.model.errors import ModelRefused
from headstart.model.refusals import refuse_unservable
from tests.models.sweep import DOC, Verdict, document, judge, quiet_library
from tests.models.tiny import model_types, tiny_config, write_config

SAMPLE = ("llama", "qwen3", "phi3", "gpt2", "opt", "gptj", "olmo", "glm4_moe", "stablelm", "jetmoe", "hunyuan_v1_moe")
"""One of each way through the loader: fused, own rotary, learned positions, clipped, partly rotated, relayed, experts."""

ALL_FULL = {"layer_types": ["full_attention"] * 2}
ROPE = {"rope_theta": 10000.0}
OF_128 = {"original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def documented() -> dict[str, str]:
    """The rows of docs/models.md by model type."""
    rows = re.findall(r"^\| `(.+?)` \|.*$", DOC.read_text(), re.MULTILINE)
    lines = [line for line in DOC.read_text().splitlines() if line.startswith("| `")]
    return dict(zip(rows, lines, strict=True))


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet_library():
        yield
    torch.set_num_threads(threads)


def test_every_class_of_the_library_is_in_the_document_and_no_other() -> None:
    assert sorted(documented()) == sorted(model_types())


def test_the_document_is_current_and_early_refusals_are_its_reasons(tmp_path: Path) -> None:
    early = {model_type: early_refusal(model_type, tmp_path) for model_type in model_types()}
    verdicts = []
    for model_type, row in documented().items():
        reason = row.partition("| refused: ")[2].removesuffix(" |")
        verdicts.append(Verdict(model_type, reason, is_early=bool(early[model_type])))
        if early[model_type]:
            assert reason, f"{model_type} is documented as served"
            assert early[model_type].endswith(reason)
            assert "\n" not in early[model_type]
    assert document(verdicts) == DOC.read_text()
    assert sum(verdict.is_served for verdict in verdicts) > 60


def early_refusal(model_type: str, folder: Path) -> str:
    try:
        refuse_unservable(write_config(folder / model_type, tiny_config(model_type)), load_format="dummy")
    except ModelRefused as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_class_of_the_sample_is_served_like_generate(model_type: str, tmp_path: Path) -> None:
    verdict = judge(model_type, tmp_path / "model")
    assert verdict.is_served
    assert verdict.row == documented()[model_type]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, **OF_128}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "llama3", **LLAMA3, **OF_128}}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 32, "hidden_act": "gelu"}),
        ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
        ("exaone4", ALL_FULL),
        ("lfm2", ALL_FULL),
        ("granitemoehybrid", ALL_FULL),
        ("qwen3_next", ALL_FULL),
    ],
)
def test_a_configuration_of_another_kind_is_served_like_generate(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert judge(model_type, tmp_path / "model", **changes).is_served


@pytest.mark.full
@pytest.mark.parametrize("model_type", model_types())
def test_a_class_does_what_the_document_says(model_type: str, tmp_path: Path) -> None:
    assert judge(model_type, tmp_path / "model").row == documented()[model_type]
