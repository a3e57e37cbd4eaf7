"""Fixtures for everybody: real etcd servers, started once, and a prefix for each test."""

import gc
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd.server import EtcdCluster, EtcdServer


def pytest_configure() -> None:
    """Ctrl-C is for what the tests start, too: a shell lets what runs beside it ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


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


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster.make(tmp_path_factory.mktemp("cluster"))
    cluster.heal()
    yield cluster
    cluster.kill()


@pytest.fixture
def cluster(_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three members that all tests share; a test may freeze, kill and restart them."""
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
