"""Secrets in files, so that none need stand on a command line, where every user of the machine can read it."""

import logging
from dataclasses import replace
from pathlib import Path

from headstart.config.errors import ConfigError
from headstart.config.settings import GatewaySettings

log = logging.getLogger("headstart.config")


def read_secret(path: Path, flag: str) -> str:
    """The file's text; warns where others than its owner may read it. Raises ConfigError that names `flag`."""
    try:
        text = path.read_text()
        is_open = bool(path.stat().st_mode & 0o077)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if is_open:
        log.warning("%s %s can be read by other users; chmod 600 keeps it to its owner", flag, path)
    return text


def with_api_keys(settings: GatewaySettings) -> GatewaySettings:
    """`settings` with the keys of --api-key-file as its keys: one a line, empty lines count for nothing."""
    if not settings.api_key_file:
        return settings
    lines = read_secret(Path(settings.api_key_file).expanduser(), "--api-key-file").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file {settings.api_key_file} holds no key")
    if any("," in key for key in keys):
        raise ConfigError(f"--api-key-file {settings.api_key_file}: one key a line, without commas")
    return replace(settings, api_key=",".join(keys), api_key_file="")
