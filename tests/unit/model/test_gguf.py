"""A GGUF model is converted whole: every tensor of every part, or it is refused with what is missing."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headstart.core.errors import WorkerError
from headstart.model.load import load_model
from headstart.model.source import WeightSource, resolve_model

WIDTH, BLOCKS, VOCAB = 32, 2, 40
SHAPES = {
    "token_embd.weight": (VOCAB, WIDTH),
    "output_norm.weight": (WIDTH,),
    **{
        f"blk.{block}.{name}.weight": shape
        for block in range(BLOCKS)
        for name, shape in {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (WIDTH // 2, WIDTH),
            "attn_v": (WIDTH // 2, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (48, WIDTH),
            "ffn_up": (48, WIDTH),
            "ffn_down": (WIDTH, 48),
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
        }.items()
    },
}


def write(path: Path, names: list[str] | None = None, split: int = 0) -> Path:
    """A llama of random weights that holds `names`, in parts of `split` tensors. Returns the first file."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(0x21 + i) for i in range(VOCAB - 1)), '!"'])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    for name in SHAPES if names is None else names:
        writer.add_tensor(name, tensors.get(name, np.ones((4, 4), np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(path.parent.glob(f"{path.stem}*.gguf"))
    return files[0]


def converted(path: Path, cache: Path) -> dict[str, torch.Tensor]:
    return load_file(resolve_model(str(path), cache=cache) / "model.safetensors")


def refusal(path: Path, cache: Path) -> str:
    with pytest.raises(WorkerError) as refused:
        resolve_model(str(path), cache=cache)
    assert "\n" not in str(refused.value)
    assert not [path for path in cache.glob("models/*") if path.is_dir()]
    return str(refused.value)


def test_a_complete_file_is_converted_and_loads(tmp_path: Path) -> None:
    folder = resolve_model(str(write(tmp_path / "tiny.gguf")), cache=tmp_path / "cache")
    model = load_model(WeightSource(folder), torch.float32)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"])
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "tiny.gguf", [one for one in SHAPES if one != name])
    assert f"tiny.gguf lacks 1 tensors: {name}" in refusal(path, tmp_path / "cache")


def test_a_tensor_beyond_the_blocks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", [*SHAPES, "blk.2.attn_q.weight"])
    assert "not converted: blk.2.attn_q.weight" in refusal(path, tmp_path / "cache")


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_of_a_split_model_loads_all_of_them(tmp_path: Path, named: int) -> None:
    whole = converted(write(tmp_path / "whole.gguf"), tmp_path / "cache")
    write(tmp_path / "split.gguf", split=8)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [part.name for part in parts] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = converted(parts[named], tmp_path / "cache")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "split.gguf", split=8)
    (tmp_path / "split-00002-of-00003.gguf").unlink()
    assert "is one part of 3; beside it there is no split-00002-of-00003.gguf" in refusal(first, tmp_path / "cache")


def test_a_part_under_another_name_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    alone = write(tmp_path / "split.gguf", split=8).rename(tmp_path / "renamed.gguf")
    assert "states 3 parts (split.count)" in refusal(alone, tmp_path / "cache")


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer" in refusal(path, tmp_path / "cache")


def test_a_truncated_file_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    assert "is not a readable GGUF file" in refusal(path, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    (tmp_path / "cache").write_text("a file where the folder would be")
    with pytest.raises(WorkerError, match="set HEADSTART_CACHE"):
        resolve_model(str(path), cache=tmp_path / "cache")
