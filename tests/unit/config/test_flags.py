"""Every flag of `headstart serve` sets what it names, and nothing else, all the way into a worker's process."""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from headstart.cli import Serve, parse
from headstart.config.settings import GatewaySettings, WorkerSettings
from headstart.worker.spec import GatewaySpec, WorkerSpec, encode_spec, read_spec

VALUES = {
    "json_model_override_args": '{"a": 1}',
    "mem_fraction_static": 0.25,
    "tenant_cache_share": 0.5,
    "host": "127.0.0.2",
    "control_host": "127.0.0.3",
    "kv_cache_dtype": "fp8_e4m3",
    "cors_origins": "https://example.org",
    "admin_api_key": "another key",
}
"""Where a field's type does not say what it takes."""
Path = tuple[str, ...]


def leaves(settings: Any, path: Path = ()) -> Iterator[tuple[Path, dataclasses.Field[Any]]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        here = (*path, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, here)
        else:
            yield here, field


def another(field: dataclasses.Field[Any]) -> Any:
    """A value that the field takes and does not have."""
    if field.name in VALUES:
        return VALUES[field.name]
    choices = [choice for choice in get_args(field.type) if isinstance(choice, str) and choice != field.default]
    if choices and "auto" not in choices:
        return choices[0]
    default = field.default
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default + 1.0
    if isinstance(default, int):
        return default + 1
    return 64 if default == "auto" else "something"


def flag(name: str, value: Any) -> list[str]:
    word = "--" + name.replace("_", "-")
    return [word] if value is True else [word, str(value)]


def values(settings: Any) -> dict[Path, Any]:
    def at(path: Path) -> Any:
        found = settings
        for name in path:
            found = getattr(found, name)
        return found

    return {path: at(path) for path, _ in leaves(settings)}


ALL = [
    (group, path, field)
    for group, kind in (("gateway", GatewaySettings), ("worker", WorkerSettings))
    for path, field in leaves(kind())
]


@pytest.mark.parametrize("chosen", [ALL[0::2], ALL[1::2]], ids=["one half", "the other half"])
def test_case_H10_flags_change_their_own_settings_alone_and_reach_the_process(
    chosen: list[tuple[str, Path, dataclasses.Field[Any]]],
) -> None:
    wanted = {(group, path): another(field) for group, path, field in chosen}
    arguments = [word for (_, path), value in wanted.items() for word in flag(path[-1], value)]
    command = parse(["serve", *arguments])
    assert isinstance(command, Serve)
    pairs = (("gateway", GatewaySettings(), command.gateway), ("worker", WorkerSettings(), command.worker))
    changed = {
        (group, path): value
        for group, plain, parsed in pairs
        for path, value in values(parsed).items()
        if value != values(plain)[path]
    }
    assert changed == wanted
    worker = WorkerSpec("decode", "decode-0", "127.0.0.1:1", "model", command.worker)
    assert read_spec(WorkerSpec, io.BytesIO(encode_spec(worker))) == worker
    gateway = GatewaySpec("model", "folder", command.gateway, command.worker)
    assert read_spec(GatewaySpec, io.BytesIO(encode_spec(gateway))) == gateway
