"""All tests share one plugin. What they import from each other is in tests/support, too.

tests/gpu runs without hypothesis and without this file, where there is little but torch.
"""

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.plugin", "tests.support.levels"]

# How fast a busy machine is says nothing about what is tested.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
