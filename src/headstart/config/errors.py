"""The one exception of this package."""

from headstart.core.errors import HeadstartError


class ConfigError(HeadstartError):
    """Settings that cannot work; the message names every setting involved. Raised before anything starts."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
