"""The file that --preemption-watch waits for, and the programs that make it of a cloud's notice."""

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_etcd.agent.followers import notices
from elastic_etcd.agent.inbox import Notice
from tests.support.metadata import SERVICES, metadata_service

DEADLINE = 60.0
SPOT = Path(__file__).parents[2] / "examples" / "spot"


@contextmanager
def watching(path: Path) -> Iterator[Callable[[], Notice]]:
    """A watch of this file; gives what waits for its notice."""
    found: queue.Queue[Notice] = queue.Queue()
    watch = notices.Watch(str(path), found.put)
    try:
        yield lambda: found.get(timeout=DEADLINE)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("45\n", 45.0), ("soon", None), ("-1", None), ("nan", None)]
)
def test_a_file_that_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None
) -> None:
    monkeypatch.setattr(notices, "_PERIOD", 0.05)
    path = tmp_path / "notice"
    with watching(path) as notice:
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)
        assert notice() == Notice(f"{path} is there", seconds)


def test_a_place_that_can_not_be_read_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_PERIOD", 0.001)
    path = tmp_path / "folder" / "notice"
    path.mkdir(parents=True)
    with watching(path) as notice:
        with caplog.at_level("WARNING"):
            while not caplog.records:
                pass
        path.rmdir()
        path.write_text("3")
        assert notice() == Notice(f"{path} is there", 3.0)
    [record] = caplog.records
    assert "can't be read, and is tried again: [Errno 21] Is a directory" in record.getMessage()


@pytest.mark.parametrize("cloud", SERVICES)
def test_an_example_makes_the_file_of_a_clouds_notice(cloud: str, tmp_path: Path) -> None:
    path = tmp_path / "notice"
    with metadata_service(cloud) as service:
        env = {"METADATA": f"http://{service.address}", "http_proxy": "http://127.0.0.1:9"}
        program = [sys.executable, str(SPOT / f"{cloud}.py"), str(path)]
        with subprocess.Popen(program, env=env, stderr=subprocess.PIPE, text=True) as process:
            with service.changed:
                assert service.changed.wait_for(lambda: service.asked, DEADLINE)
            assert not path.exists()
            service.preempt(25)
            assert process.wait(DEADLINE) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
    assert 0 < float(path.read_text()) < 120
