"""The agent's directory in memory: whose it is, and who removes it."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic_etcd.agent import directories
from elastic_etcd.agent.channel import ChannelServer
from elastic_etcd.agent.directories import memory_directory, own_directory

LEAVE_ONE = "import os, sys; from elastic_etcd.agent.directories import memory_directory; "
LEAVE_ONE += "print(memory_directory(sys.argv[1])[0]); os._exit(1)"


def dead_agents(parent: Path) -> Path:
    """A directory whose agent has ended without removing it."""
    command = [sys.executable, "-c", LEAVE_ONE, str(parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return Path(done.stdout.strip())


def test_it_is_this_user_s_only_until_it_is_removed(tmp_path: Path) -> None:
    path, remove = memory_directory(str(tmp_path))
    assert Path(path).parent == tmp_path
    assert Path(path).stat().st_mode & 0o777 == 0o700
    (Path(path) / "step-1-1").mkdir()
    remove()
    assert [*tmp_path.iterdir()] == []


def test_only_what_a_dead_agent_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dead = dead_agents(tmp_path)
    (dead / "step-1-1").mkdir()
    (tmp_path / "elastic_etcd-x").mkdir()
    (tmp_path / "elastic_etcd_memory-link").symlink_to(tmp_path / "elastic_etcd-x")
    (tmp_path / "elastic_etcd_memory-file").touch()
    live, lock = directories._make(str(tmp_path), directories._MEMORY)
    directories._remove_former(tmp_path, directories._MEMORY)
    remaining = {path.name for path in tmp_path.iterdir()}
    others = {"elastic_etcd-x", "elastic_etcd_memory-link", "elastic_etcd_memory-file"}
    assert remaining == others | {Path(live).name}
    assert f"removing what a dead agent left: {dead}" in caplog.text
    os.close(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_user_s_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "elastic_etcd_memory-theirs"
    path.mkdir()
    os.chown(path, 12345, 12345)
    directories._remove_former(tmp_path, directories._MEMORY)
    assert path.exists()


def test_where_none_can_be_made_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, remove = memory_directory(str(tmp_path / "nothing"))
    assert path == ""
    assert f"no directory for ee.memory_checkpoint in {tmp_path}/nothing: No such" in caplog.text
    remove()


def test_one_that_another_agent_took_for_a_dead_one_s_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there for a moment without its lock."""
    real, taken = directories._locked, list[str]()

    def locked(path: str) -> int:
        if not taken:
            taken.append(path)
            Path(path).rmdir()
        return real(path)

    monkeypatch.setattr(directories, "_locked", locked)
    path, lock = directories._make(str(tmp_path), directories._MEMORY)
    assert [str(each) for each in tmp_path.iterdir()] == [path] != taken
    os.close(lock)


def test_a_file_system_without_locks_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Lustre without `-o flock`: it must not be tried for ever."""
    caplog.set_level(logging.INFO)

    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    path, remove = memory_directory(str(tmp_path))
    remove()
    assert path == ""
    assert [*tmp_path.iterdir()] == []
    assert "no directory for ee.memory_checkpoint" in caplog.text


@pytest.mark.parametrize("length", [40, 50, 51, 200])
async def test_the_agents_own_has_a_path_that_is_short_enough_for_its_socket(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """It is in /tmp where TMPDIR is too long; the socket is in it, so that both are removed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = Path(short, "x" * (length - len(short) - 1))
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        folder, remove = own_directory()
        assert Path(folder).parent == (temporary if length <= 50 else Path("/tmp"))
        channels = ChannelServer(lambda *_: None)
        assert Path(channels.open(folder)).is_relative_to(folder)
        channels.close()
        remove()
        assert not Path(folder).exists()
