"""GatewayLiveness of which nothing is heard."""

from headstart.scheduler.decode.gateway_liveness import OWN_STALL_S, GatewayLiveness


def test_a_gateway_is_given_up_once_when_it_has_been_silent_for_long_enough():
    gateways = GatewayLiveness(5.0, 0.0)
    assert gateways.silent_at == float("inf")
    gateways.heard("a", 0.0)
    gateways.heard("b", 0.5)
    gateways.heard("b", 1.0)
    for tenth in range(50):
        assert gateways.look(tenth / 10) == []
    assert gateways.silent_at == 5.0
    assert gateways.look(5.0) == [("a", 5.0)]
    assert gateways.names() == ["b"]
    assert gateways.silent_at == 6.0
    assert gateways.look(5.5) == []
    assert gateways.look(6.25) == [("b", 5.25)]


def test_a_time_in_which_the_worker_stood_still_is_nobodys_silence():
    gateways = GatewayLiveness(5.0, 0.0)
    gateways.heard("a", 0.0)
    stood_still = OWN_STALL_S + 10.0
    assert gateways.look(stood_still) == []
    assert gateways.silent_at == stood_still + 5.0
