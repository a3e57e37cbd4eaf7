"""What pytest gives all tests: real etcds, keys of one's own, and jobs that are checked."""

import gc
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.job import Job
from tests.support.residue import Residue, passed
from tests.support.ticking import TickingJob


def pytest_configure() -> None:
    """Ctrl-C is for what the tests start, too: a shell lets what runs beside it ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of each later collection of garbage: that takes a second else."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[passed] = report.passed
    return report


@pytest.fixture(scope="session")
def _etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def etcd(_etcd: EtcdServer) -> Iterator[EtcdServer]:
    """A single etcd that all tests share; a test may freeze, kill and restart it."""
    yield _etcd
    _etcd.heal()


@pytest.fixture(scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster.make(tmp_path_factory.mktemp("cluster"))
    cluster.heal()
    yield cluster
    cluster.kill()


@pytest.fixture
def cluster(_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members that a module's tests share; a test may freeze, kill and restart them.

    They end with the module: even idle they take 4 % of a core.
    """
    yield _cluster
    _cluster.heal()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A single etcd for one test, not started yet, so that its arguments can be changed."""
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def no_garbage() -> None:
    """What earlier tests have left open is closed now, and not in the middle of this one."""
    gc.collect()


@pytest.fixture
def prefix() -> str:
    """A prefix of keys that no other test uses."""
    return f"/test/{uuid.uuid4().hex}"


@pytest.fixture
def jobs(
    etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Job]]:
    """Makes jobs on the shared etcd; after a test that passed, checks them and what they left."""
    residue = Residue(etcd)
    made: list[Job] = []

    def make(name: str = "", kind: type[Job] = Job) -> Job:
        made.append(kind(etcd.endpoint, tmp_path / str(len(made)), name))
        return made[-1]

    try:
        yield make
        if request.node.stash.get(passed, False):
            for job in made:
                job.check()
            residue.assert_clean(made)
    finally:
        for job in made:
            job.close()


@pytest.fixture
def job(jobs: Callable[..., Job]) -> Job:
    """One job, as `jobs` makes it."""
    return jobs()


@pytest.fixture
def ticks(jobs: Callable[..., TickingJob]) -> TickingJob:
    """One job whose workers only tick."""
    return jobs(kind=TickingJob)
