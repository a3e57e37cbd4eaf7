"""A job for each test, with what must hold at its end: the invariants, and nothing left."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd.server import EtcdServer

from .harness import Job
from .traces import Traces

passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[passed] = report.passed
    return report


@pytest.fixture
def jobs(
    etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Job]]:
    """Makes jobs on the shared etcd; after a test that passed, checks them and what they left."""
    traces = Traces(etcd)
    made: list[Job] = []

    def make(name: str = "") -> Job:
        made.append(Job(etcd.endpoint, tmp_path / str(len(made)), name))
        return made[-1]

    try:
        yield make
        if request.node.stash.get(passed, False):
            for job in made:
                job.check()
            traces.assert_clean(made)
    finally:
        for job in made:
            job.close()


@pytest.fixture
def job(jobs: Callable[..., Job]) -> Job:
    """One job, as `jobs` makes it."""
    return jobs()
