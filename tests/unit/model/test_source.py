"""From names to model folders, and what a folder says of its model."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from headstart.core.errors import WorkerError
from headstart.model.info import model_fingerprint, parse_overrides, read_model_info
from headstart.model.source import DEMO_MODEL, WeightSource, resolve_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": [3, 4],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.arange(12, dtype=np.float32)}, str(folder / "model.safetensors"))
    return folder


Steps = list[tuple[str, int, int]]


def _resolve_demo(cache: str) -> tuple[str, Steps]:
    seen: Steps = []
    return str(resolve_model(DEMO_MODEL, lambda *step: seen.append(step), cache=Path(cache))), seen


@pytest.fixture(scope="module")
def started_together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, Steps]]]:
    """The cache, and what two processes that started with an empty one found and reported."""
    cache = tmp_path_factory.mktemp("cache")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return cache, pool.map(_resolve_demo, [str(cache)] * 2, chunksize=1)


@pytest.fixture
def converted(started_together: tuple[Path, list[tuple[str, Steps]]]) -> Path:
    return Path(started_together[1][0][0])


def test_a_model_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder.resolve()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "absent": "no model",
        "notes.txt": "neither",
        "broken.gguf": "GGUF",
        "empty": "config",
    }.items():
        with pytest.raises(WorkerError, match=reason):
            resolve_model(str(tmp_path / name), cache=tmp_path / "cache")
    assert not [path for path in tmp_path.glob("cache/models/*") if path.is_dir()]


def test_processes_that_start_together_convert_once(
    started_together: tuple[Path, list[tuple[str, Steps]]],
) -> None:
    cache, found = started_together
    folders = {folder for folder, _ in found}
    assert {str(path) for path in (cache / "models").iterdir() if path.is_dir()} == folders
    assert len(folders) == 1
    idle, busy = sorted((steps for _, steps in found), key=len)
    assert idle == []
    assert {what for what, _, _ in busy} == {"dequantising SmolLM2-135M-Instruct.Q4_1.gguf", "writing weights"}
    assert busy[-1][1] == busy[-1][2]


def test_later_starts_do_not_convert(started_together: tuple[Path, list[tuple[str, Steps]]]) -> None:
    cache, found = started_together
    assert _resolve_demo(str(cache)) == (found[0][0], [])


def test_a_converted_folder_is_complete(converted: Path) -> None:
    folder = converted
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    info = read_model_info(folder)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.vocab_size, info.context_len, info.eos_token_ids) == (49152, 8192, (2,))
    assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_the_converted_tokenizer_is_lossless(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    text = "<|im_start|>user\nnaïve 2024 🙂  tabs\tand   spaces<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_description_never_loads_torch(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headstart.model.info import read_model_info;"
        f"read_model_info(Path({str(folder)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_description_follows_the_configuration(folder: Path) -> None:
    info = read_model_info(folder)
    assert (info.num_kv_heads, info.head_dim, info.eos_token_ids) == (4, 8, (3, 4))
    assert read_model_info(folder, {"max_position_embeddings": 32}).context_len == 32
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert read_model_info(folder).eos_token_ids == (9,)


def test_overrides_must_be_a_json_object() -> None:
    assert parse_overrides("") == {}
    for text in ("{", "[1]"):
        with pytest.raises(WorkerError, match="json-model-override-args"):
            parse_overrides(text)


@pytest.mark.behaviour("K6")
def test_the_fingerprint_changes_with_anything_that_changes_kv(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def fingerprint(**changes: object) -> str:
        return model_fingerprint(WeightSource(folder, **changes), cache)

    prints = [fingerprint(), fingerprint(overrides='{"rope_theta": 5.0}')]
    prints += [fingerprint(load_format="dummy", seed=seed) for seed in (0, 1)]
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    before = weights.stat().st_mtime_ns
    weights.write_bytes(changed)
    os.utime(weights, ns=(before + 1_000_000, before + 1_000_000))
    prints.append(fingerprint())
    assert len(set(prints)) == len(prints)
    assert fingerprint() == prints[-1]


def test_the_fingerprint_does_not_depend_on_where_the_folder_lies(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    first = model_fingerprint(WeightSource(folder), tmp_path / "cache")
    folder.rename(moved)
    assert model_fingerprint(WeightSource(moved), tmp_path / "cache") == first
