"""Case K1: what is compared at connect is the same in every process, whatever its hash seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

CODE = """
import sys
from pathlib import Path
from headstart.model.info import model_fingerprint, read_model_config, rope_settings
from headstart.model.source import WeightSource
folder, cache = Path(sys.argv[1]), Path(sys.argv[2])
print(model_fingerprint(WeightSource(folder), cache), model_fingerprint(WeightSource(folder, load_format="dummy"), cache))
print(rope_settings(read_model_config(folder)))
"""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 10000.0,
}


@pytest.mark.behaviour("K1")
def test_a_model_has_one_fingerprint_in_processes_of_different_hash_seeds(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.arange(12, dtype=np.float32)}, str(folder / "model.safetensors"))
    said = {
        subprocess.run(
            [sys.executable, "-c", CODE, str(folder), str(tmp_path / f"cache-{seed}")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(said) == 1
    weights, random = next(iter(said)).split()[:2]
    assert weights != random
