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


def with_keys_of_files(settings: GatewaySettings) -> GatewaySettings:
    """`settings` with the keys of --api-key-file and --admin-key-file as its keys."""
    access = settings.access
    if access.api_key_file:
        keys = _keys(access.api_key_file, "--api-key-file")
        access = replace(access, api_key=",".join(keys), api_key_file="")
    if access.admin_key_file:
        keys = _keys(access.admin_key_file, "--admin-key-file")
        if len(keys) > 1:
            raise ConfigError(f"--admin-key-file {access.admin_key_file} holds {len(keys)} keys, not one")
        access = replace(access, admin_api_key=keys[0], admin_key_file="")
    return replace(settings, access=access)


def _keys(path: str, flag: str) -> list[str]:
    """One a line; empty lines count for nothing. Raises ConfigError where there is none."""
    lines = read_secret(Path(path).expanduser(), flag).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key")
    if any("," in key for key in keys):
        raise ConfigError(f"{flag} {path}: one key a line, without commas")
    return keys
