"""The gateway knows its decode workers' model by what they compute with, not by a name."""

import json
from pathlib import Path

import pytest

from headstart.config.settings import GatewaySettings, ModelSettings, WorkerSettings
from headstart.model.info import model_fingerprint
from headstart.model.source import WeightSource
from headstart.worker.gateway_process import served_fingerprint
from headstart.worker.spec import GatewaySpec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


def gateway_of(folder: Path, **model: str) -> GatewaySpec:
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


def test_a_gateway_with_no_weights_lets_its_workers_decide(tmp_path: Path) -> None:
    assert served_fingerprint(gateway_of(tmp_path / "model")) == ""
