"""`headstart doctor` calls things what users call them."""

import json
from pathlib import Path

import pytest

from headstart.config.settings import ModelSettings, WorkerSettings
from headstart.launch.doctor import examine

SHAPE = {
    "num_attention_heads": 2,
    "hidden_size": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
}


def test_the_model_has_its_served_name_and_weights_are_told_from_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "snapshot-1f2e"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    examine(str(folder), WorkerSettings(ModelSettings(served_model_name="small-model", dtype="float16")))
    text = capsys.readouterr().out
    assert "model small-model" in text
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if "│" in line]
    assert ["weights", "float16"] in rows
    assert ["KV", "float32"] in rows
