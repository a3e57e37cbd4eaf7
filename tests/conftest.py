"""All tests share one plugin. What they import from each other is in tests/support, too."""

pytest_plugins = ["tests.support.plugin"]
