"""What is heard of notices, from services that behave as the clouds' do and from files."""

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_etcd.agent.followers.notices import METADATA, SOURCES, Source, Watch
from elastic_etcd.agent.inbox import Notice
from elastic_etcd.etcd.embedded import free_ports
from tests.support.metadata import Service, metadata_service

DEADLINE = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (Source, *SOURCES.values()):
        monkeypatch.setattr(source, "period", 0.05)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not for these


@contextmanager
def watching(name: str) -> Iterator[tuple[Watch, Callable[[], Notice]]]:
    """A watch, and what waits for its notice."""
    found: queue.Queue[Notice] = queue.Queue()
    watch = Watch(name, found.put)
    try:
        yield watch, lambda: found.get(timeout=DEADLINE)
    finally:
        asyncio.run(watch.close())


@pytest.fixture(params=SOURCES)
def service(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Service]]:
    with metadata_service(request.param) as service:
        monkeypatch.setenv(METADATA, service.address)
        yield request.param, service


def asked(service: Service, times: int) -> None:
    """Wait until it was asked so often, with nothing to tell."""
    with service.changed:
        assert service.changed.wait_for(lambda: len(service.asked) >= times, DEADLINE)


def test_a_notice_of_a_cloud(service: tuple[str, Service]) -> None:
    cloud, server = service
    with watching(cloud) as (watch, notice):
        asked(server, times=2 if cloud == "gcp" else 8)  # of aws, that outlasts a token
        server.preempt(25)
        found = notice()
        assert found.what.startswith(f"{cloud}: ")
        assert found.seconds is not None
        assert 0 < found.seconds <= 30
        watch.approve()
        assert server.approved.is_set() == (cloud == "azure")
    if cloud == "aws":
        assert len(server.tokens) > 1


def test_a_time_that_can_not_be_is_not_believed(service: tuple[str, Service]) -> None:
    cloud, server = service
    server.preempt(-600)  # by this machine's clock, which is wrong
    with watching(cloud) as (_, notice):
        assert notice().seconds == (30 if cloud == "gcp" else None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("45\n", 45.0), ("soon", None), ("-1", None), ("nan", None)]
)
def test_a_file_that_appears(tmp_path: Path, text: str, seconds: float | None) -> None:
    path = tmp_path / "notice"
    with watching(f"file:{path}") as (_, notice):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        assert notice() == Notice(f"{path} is there", seconds)


@pytest.mark.parametrize("cloud", SOURCES)
def test_a_service_that_is_missing_is_told_once_and_tried_again(
    cloud: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(METADATA, f"127.0.0.1:{free_ports(1)[0]}")
    tried: queue.Queue[None] = queue.Queue()
    look = SOURCES[cloud].look  # type: ignore[attr-defined] # each is a class

    def counted(self: Source) -> Notice | None:
        tried.put(None)
        return look(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(SOURCES[cloud], "look", counted)
    with watching(cloud):
        for _ in range(3):
            tried.get(timeout=DEADLINE)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(": [")[0] for line in lines] == [
        f"--preemption-watch {cloud}: nothing can be seen there, and it is tried again"
    ]
