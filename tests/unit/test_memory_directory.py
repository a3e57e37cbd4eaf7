"""The agent's directories: whose they are, where they can be, and who removes them."""

import logging
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from elastic_etcd.agent import directories
from elastic_etcd.agent.directories import Directory, memory_directory

PREFIX = f"{directories._MEMORY}{directories._boot()}-"
LEAVE_ONE = "import os, sys; from elastic_etcd.agent.directories import memory_directory; "
LEAVE_ONE += "print(memory_directory(sys.argv[1]).path); os._exit(1)"


def dead_agents(parent: Path, code: str = "") -> Path:
    """A directory whose agent, which has run `code`, has ended without removing it."""
    command = [sys.executable, "-c", code + LEAVE_ONE, str(parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return Path(done.stdout.strip())


def made(parent: Path) -> Directory:
    parent.mkdir(exist_ok=True)
    return Directory(str(parent), PREFIX)


def test_it_is_this_user_s_only_until_it_is_removed(tmp_path: Path) -> None:
    directory = made(tmp_path)
    path = Path(directory.path)
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "step-1-1").mkdir()
    directory.remove()
    assert [*tmp_path.iterdir()] == []


def test_only_what_a_dead_agent_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dead = dead_agents(tmp_path)
    (dead / "step-1-1").mkdir()
    (tmp_path / "elastic_etcd-x").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elastic_etcd-x")
    (tmp_path / f"{PREFIX}file").touch()
    live = made(tmp_path)
    directories._remove_former(tmp_path, PREFIX)
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {
        *("elastic_etcd-x", f"{PREFIX}link", f"{PREFIX}file"),
        Path(live.path).name,
    }
    assert f"removing what a dead agent left: {dead}" in caplog.text
    live.remove()


def test_an_agent_does_not_take_its_own_for_a_dead_agent_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(100):
        own = memory_directory(str(tmp_path))
        assert own
        for thread in threading.enumerate():
            if thread.name == "directories":
                thread.join()  # as an agent's own, it looks beside one directory that is made
        own.remove()
    assert caplog.text == ""


def test_m8_another_machine_s_is_left_alone(tmp_path: Path) -> None:
    """On a shared file system that does not show its locks, as by default BeeGFS's."""
    other = str(uuid.uuid4()).replace("-", "")[:16]
    code = f"from elastic_etcd.agent import directories; directories._boot = lambda: {other!r}; "
    theirs, ours = dead_agents(tmp_path, code), dead_agents(tmp_path)
    directories._remove_former(tmp_path, PREFIX)
    assert theirs.exists()
    assert not ours.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_user_s_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}theirs"
    path.mkdir()
    os.chown(path, 12345, 12345)
    directories._remove_former(tmp_path, PREFIX)
    assert path.exists()


def test_where_none_can_be_made_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert memory_directory(str(tmp_path / "nothing")) is None
    assert f"no directory for ee.memory_checkpoint in {tmp_path}/nothing: No such" in caplog.text


def test_one_that_another_agent_took_for_a_dead_one_s_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there for a moment without its lock."""
    real, taken = directories.locked, list[str]()

    def locked(path: str, kind: int) -> int:
        if not taken:
            taken.append(path)
            Path(path).rmdir()
        return real(path, kind)

    monkeypatch.setattr(directories, "locked", locked)
    directory = made(tmp_path)
    assert [str(each) for each in tmp_path.iterdir()] == [directory.path] != taken
    directory.remove()


def test_a_file_system_without_locks_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Lustre without `-o flock`: it must not be tried for ever."""
    caplog.set_level(logging.INFO)

    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert memory_directory(str(tmp_path)) is None
    assert [*tmp_path.iterdir()] == []
    assert "no directory for ee.memory_checkpoint" in caplog.text
