"""The gateway knows its decode workers' model by what they compute with, not by a name."""

import json
from pathlib import Path

import pytest

from headstart.config.settings import GatewaySettings, ModelSettings, WorkerSettings
from headstart.model.info import fix_context, model_fingerprint
from headstart.model.source import WeightSource
from headstart.worker.gateway_process import served_fingerprint
from headstart.worker.spec import GatewaySpec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


def gateway_of(folder: Path, **model: str | int) -> GatewaySpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))
    return GatewaySpec("small", str(folder), GatewaySettings(), WorkerSettings(ModelSettings(**model)))


def test_the_gateway_has_the_fingerprint_of_workers_with_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    spec = gateway_of(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert served_fingerprint(spec) == model_fingerprint(WeightSource(folder))
    random = gateway_of(folder, load_format="dummy", json_model_override_args='{"hidden_size": 4}')
    source = WeightSource(folder, load_format="dummy", overrides='{"hidden_size": 4}')
    assert served_fingerprint(random) == model_fingerprint(source)


@pytest.mark.parametrize("context_length", ["auto", 300])
def test_it_covers_the_context_that_position_scaling_is_fixed_for(tmp_path: Path, context_length: str | int) -> None:
    spec = gateway_of(tmp_path / "model", load_format="dummy", context_length=context_length)
    folder = Path(spec.model_folder)
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(sizes | {"rope_parameters": scaling}))
    of_workers = WeightSource(folder, load_format="dummy", overrides=fix_context(folder, "", context_length))
    assert served_fingerprint(spec) == model_fingerprint(of_workers)
    assert served_fingerprint(spec) != model_fingerprint(WeightSource(folder, load_format="dummy"))


def test_a_gateway_with_no_weights_lets_its_workers_decide(tmp_path: Path) -> None:
    assert served_fingerprint(gateway_of(tmp_path / "model")) == ""
