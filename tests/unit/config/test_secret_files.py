"""Keys come from files that their owner alone should be able to read."""

from pathlib import Path

import pytest

from headstart.config.errors import ConfigError
from headstart.config.secret_files import read_secret, with_keys_of_files
from headstart.config.settings import AccessSettings, GatewaySettings


def key_file(directory: Path, content: str, mode: int = 0o600) -> Path:
    path = directory / "keys"
    path.write_text(content)
    path.chmod(mode)
    return path


def read(access: AccessSettings) -> AccessSettings:
    return with_keys_of_files(GatewaySettings(access=access)).access


def test_the_keys_of_a_file_are_those_that_the_command_line_would_name(tmp_path: Path) -> None:
    path = key_file(tmp_path, "alpha\n\n  beta \n")
    access = read(AccessSettings(api_key_file=str(path)))
    assert access.api_keys == AccessSettings(api_key="alpha,beta").api_keys == ("alpha", "beta")
    assert read(AccessSettings(api_key="gamma")).api_keys == ("gamma",)


def test_the_admin_key_comes_from_a_file_of_its_own(tmp_path: Path) -> None:
    path = key_file(tmp_path, " operator\n")
    assert read(AccessSettings(api_key="alpha", admin_key_file=str(path))).admin_api_key == "operator"
    with pytest.raises(ConfigError, match="also a client's"):
        read(AccessSettings(api_key="operator", admin_key_file=str(path)))
    with pytest.raises(ConfigError, match="2 keys, not one"):
        read(AccessSettings(admin_key_file=str(key_file(tmp_path, "one\ntwo\n"))))
    with pytest.raises(ConfigError, match="give one"):
        AccessSettings(admin_api_key="alpha", admin_key_file="key")


@pytest.mark.parametrize(
    ("content", "reason"), [("\n \n", "holds no key"), ("alpha,beta\n", "without commas"), ("sch\u00fcssel\n", "ASCII")]
)
def test_a_file_that_names_no_clear_keys_is_refused_not_taken_for_none(
    tmp_path: Path, content: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(AccessSettings(api_key_file=str(key_file(tmp_path, content))))


def test_a_missing_file_and_two_places_for_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(AccessSettings(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="give one"):
        AccessSettings(api_key="alpha", api_key_file="keys")


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o644, True), (0o640, True)])
def test_a_secret_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    assert read_secret(key_file(tmp_path, "hush", mode), "--cluster-key") == "hush"
    assert ("can be read by other users" in caplog.text) is warns
    assert "hush" not in caplog.text
