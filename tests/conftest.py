"""What holds for all tests: how fast the machine is decides nothing."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("pacecar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pacecar")
