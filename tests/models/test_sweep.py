"""Every causal language model of the library is served like `generate` or refused, as docs/models.md says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headstart.model.refusals import refuse_unservable
from headstart.model.refused import ModelRefused
from tests.models.sweep import DOC, judge, quiet_library
from tests.models.tiny import model_types, tiny_config, write_config

SAMPLE = ("llama", "qwen3", "phi3", "gpt2", "opt", "gptj", "olmo", "glm4_moe", "stablelm", "jetmoe", "hunyuan_v1_moe")
"""One of each way through the loader: fused, own rotary, learned positions, clipped, partly rotated, relayed, experts."""


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


def test_the_documented_counts_are_those_of_its_rows() -> None:
    rows = documented().values()
    num_served = sum(row.endswith("| served |") for row in rows)
    assert f"{num_served} are served and {len(rows) - num_served} are refused" in DOC.read_text()
    assert num_served > 60


def test_a_refusal_from_the_configuration_is_the_documented_one(tmp_path: Path) -> None:
    refused = {model_type: reason for model_type in model_types() if (reason := early_refusal(model_type, tmp_path))}
    assert len(refused) > 60
    for model_type, reason in refused.items():
        documented_reason = documented()[model_type].partition("| refused: ")[2].removesuffix(" |")
        assert documented_reason, f"{model_type} is documented as served"
        assert reason.endswith(documented_reason)
        assert "\n" not in reason


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


@pytest.mark.full
@pytest.mark.parametrize("model_type", model_types())
def test_a_class_does_what_the_document_says(model_type: str, tmp_path: Path) -> None:
    assert judge(model_type, tmp_path / "model").row == documented()[model_type]
