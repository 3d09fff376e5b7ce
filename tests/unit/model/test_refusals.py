"""What cannot be served is refused from its files in one line that names the model type, the rule or the file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headstart.core.errors import WorkerError
from headstart.model.info import geometry, read_model_info
from headstart.model.refusals import refuse_unservable
from headstart.model.refused import ModelRefused

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    save_file({"w": np.arange(12, dtype=np.float32)}, str(tmp_path / "model.safetensors"))
    return tmp_path


def write(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def refusal(folder: Path, **arguments: str) -> str:
    with pytest.raises(ModelRefused) as refused:
        refuse_unservable(folder, **arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_ordinary_model_is_not_refused(folder: Path) -> None:
    refuse_unservable(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layers_block_type": ["attention", "mamba"]}, "types that are not built: mamba"),
        ({"sliding_window": 64}, "sliding window of 64"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (quantization_config: gptq)"),
        ({"compression_config": {"format": "x"}}, "quantised weights (compression_config"),
        ({"rope_scaling": {"type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "odd"}}}, "rope type 'odd'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"alibi": True}, "ALiBi"),
        ({"model_type": "bloom"}, "'bloom' biases attention scores by distance (ALiBi)"),
        ({"model_type": "mamba"}, "'mamba' keeps a recurrent state"),
        ({"model_type": "gpt_neox_japanese"}, "'gpt_neox_japanese' computes attention in its own code"),
        ({"model_type": "bert"}, "attends in both directions"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": {}, "vision_config": {}}, "several parts"),
        ({"kv_lora_rank": 64}, "MLA, kv_lora_rank"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"num_attention_heads": None}, "'llama' states no number of attention heads; looked for num_attention_heads"),
        ({"max_position_embeddings": None}, "'llama' states no context length"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_a_configuration_is_refused_by_its_rule(folder: Path, changes: dict[str, object], words: str) -> None:
    write(folder, **changes)
    assert words in refusal(folder)


def test_overrides_are_looked_at_too(folder: Path) -> None:
    assert "sliding window of 8" in refusal(folder, overrides='{"sliding_window": 8}')
    write(folder, sliding_window=8)
    refuse_unservable(folder, overrides='{"sliding_window": null}')


def test_a_window_that_is_switched_off_is_no_reason(folder: Path) -> None:
    write(folder, sliding_window=8, use_sliding_window=False)
    refuse_unservable(folder)


def test_a_folder_without_weights_is_refused_unless_they_are_random(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin is in a pickle format" in refusal(folder)
    refuse_unservable(folder, load_format="dummy")


def test_a_pointer_of_git_lfs_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "model.safetensors is a Git LFS pointer" in refusal(folder)


@pytest.mark.parametrize("kept", [0, 3, 8, 40, -1])
def test_a_truncated_weights_file_is_named(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in refusal(folder)


def test_a_file_of_another_format_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]}{}")
    assert "unreadable header" in refusal(folder)


def test_a_part_that_the_index_names_and_the_folder_lacks_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}))
    assert "lacks weight files that model.safetensors.index.json names: model-00002.safetensors" in refusal(folder)
    index.write_text("[]")
    assert "not a readable index" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128}, (128, 3, 4, 4, 8)),
        ({"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}, (128, 3, 4, 4, 8)),
        ({"hidden_size": 32, "num_heads": 4, "num_layers": 3, "max_position_embeddings": 128}, (128, 3, 4, 4, 8)),
        ({"d_model": 32, "attention_heads": 4, "num_layers": 3, "n_ctx": 128}, (128, 3, 4, 4, 8)),
        ({"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "multi_query": True}, (128, 3, 4, 1, 8)),
        (
            {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 9, "attn_config": {"kv_n_heads": 2}},
            (9, 3, 4, 2, 8),
        ),
        ({"hidden_size": 32, "n_head": 4, "n_layer": 3, "seq_length": 128, "head_dim": 16}, (128, 3, 4, 4, 16)),
    ],
)
def test_sizes_are_read_under_the_names_of_every_family(config: dict[str, object], sizes: tuple[int, ...]) -> None:
    found = geometry(config)
    assert (found.context_len, found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim) == sizes


def test_what_config_json_does_not_state_is_named_with_where_it_was_looked_for(folder: Path) -> None:
    write(folder, vocab_size=None)
    with pytest.raises(WorkerError, match=r"config\.json: model type 'llama' states no vocabulary size"):
        read_model_info(folder)


def test_refusing_never_loads_torch(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headstart.model.refusals import refuse_unservable;"
        f"refuse_unservable(Path({str(folder)!r})); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
