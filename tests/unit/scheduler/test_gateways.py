"""Gateways that are silent."""

from headstart.scheduler.decode.gateway_port import OWN_STALL_S, GatewayLiveness


def test_a_gateway_is_dropped_once_when_it_has_been_silent_for_long_enough():
    gateways = GatewayLiveness(5.0, 0.0)
    assert gateways.silent_at == float("inf")
    gateways.on_message("a", 0.0)
    gateways.on_message("b", 0.5)
    gateways.on_message("b", 1.0)
    for tenth in range(50):
        assert gateways.check(tenth / 10) == []
    assert gateways.silent_at == 5.0
    assert gateways.check(5.0) == [("a", 5.0)]
    assert gateways.names() == ["b"]
    assert gateways.silent_at == 6.0
    assert gateways.check(5.5) == []
    assert gateways.check(6.25) == [("b", 5.25)]


def test_a_time_in_which_the_worker_stood_still_is_nobodys_silence():
    gateways = GatewayLiveness(5.0, 0.0)
    gateways.on_message("a", 0.0)
    stood_still = OWN_STALL_S + 10.0
    assert gateways.check(stood_still) == []
    assert gateways.silent_at == stood_still + 5.0
