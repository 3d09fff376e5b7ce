"""What holds for every test: how fast the machine is at this moment decides about none."""

from hypothesis import HealthCheck, settings

settings.register_profile("headstart", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headstart")
