"""Jobs as the end-to-end tests have them."""

from tests.e2e.conftest import job, jobs, pytest_runtest_makereport

__all__ = ["job", "jobs", "pytest_runtest_makereport"]
