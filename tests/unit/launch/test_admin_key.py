"""The launcher asks the gateway for the cluster's state, so it needs a key wherever the gateway asks for one."""

import pytest

from headstart.config.settings import AccessSettings, GatewaySettings
from headstart.launch.serve import with_admin_key


def admin_key(host: str = "127.0.0.1", **access: str) -> str:
    return with_admin_key(GatewaySettings(host=host, access=AccessSettings(**access))).access.admin_api_key


def test_on_loopback_without_keys_nobody_needs_one() -> None:
    assert admin_key() == ""


@pytest.mark.parametrize("keys", [{"api_key": "alpha"}, {"host": "0.0.0.0"}, {"host": "10.0.0.1", "api_key": "alpha"}])
def test_where_the_user_names_none_the_launcher_makes_one_that_nobody_can_guess(keys: dict[str, str]) -> None:
    assert len(admin_key(**keys)) > 40
    assert admin_key(**keys) != admin_key(**keys)


def test_the_users_own_is_kept() -> None:
    assert admin_key(admin_api_key="operator") == admin_key("0.0.0.0", admin_api_key="operator") == "operator"
