"""System calls that a Python is built without, or that a kernel refuses; tests/e2e has jobs."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.errors import UsageError
from elastic_etcd.system import kernel
from elastic_etcd.system.processes import is_gone, open_pidfd, signal_pidfd, wait_until_gone
from tests.support import refused
from tests.support.job import ROOT

OLD_PYTHON = ROOT / "tests" / "support" / "old_python"
REFUSED = (sys.executable, refused.__file__, str(errno.ENOSYS), "pidfd_open,pidfd_send_signal")


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("lacks", ["the Python", "the kernel"])
def test_m1_m2_processes_are_started_watched_and_ended_all_the_same(
    tmp_path: Path, lacks: str
) -> None:
    """The tests of processes and workers, where there are no such calls."""
    path = [str(ROOT)] if lacks == "the kernel" else [str(OLD_PYTHON), str(ROOT)]
    before = REFUSED if lacks == "the kernel" else ()
    tests = [str(ROOT / "tests" / "unit" / name) for name in ("test_process.py", "test_workers.py")]
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*before, *pytest_, f"--basetemp={tmp_path / 'within'}", *tests],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TEST_LEVELS"}
        | {"PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_pidfds", lambda: False)


@pytest.mark.usefixtures("without_pidfds")
def test_m2_a_child_and_what_is_no_child() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    assert child.stdout
    grandchild = int(child.stdout.readline())
    held = [open_pidfd(child.pid), open_pidfd(grandchild)]
    assert not any(map(is_gone, held))
    for pidfd in held:
        signal_pidfd(pidfd, signal.SIGKILL)
        assert wait_until_gone(pidfd, 60)
    late = open_pidfd(child.pid)
    assert is_gone(late), "it is dead, and not reaped"
    assert child.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        signal_pidfd(held[0], signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)
    child.stdout.close()
    for pidfd in (*held, late):
        os.close(pidfd)


@pytest.mark.usefixtures("without_pidfds")
def test_m2_nobody_waits_for_a_process_that_nobody_watches(tmp_path: Path) -> None:
    """A thread that waits for what is no child ends when its descriptor is closed."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHES_ITS_PARENT],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


WATCHES_ITS_PARENT = """
import os, threading
from elastic_etcd.errors import UsageError
from elastic_etcd.system import kernel
from elastic_etcd.system.processes import open_pidfd
kernel.has_pidfds = lambda: False
pidfd = open_pidfd(os.getppid())
(waits,) = (thread for thread in threading.enumerate() if thread.name == "pidfd")
os.close(pidfd)
waits.join(60)
assert not waits.is_alive()
"""


def test_m2_no_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kernel, "memfd_create", refuse)
    with pytest.raises(UsageError, match=r"memfd_create: Operation not permitted: Linux \d"):
        kernel.check()


def test_m19_a_python_with_capabilities_is_told_to_have_no_hang_watch() -> None:
    """A process whose ids have changed is as closed to its user as one with capabilities."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hangs and slow nodes are not found") == 1


CLOSED = """
import ctypes, os, sys
from elastic_etcd import launch
from elastic_etcd.agent import agent
from elastic_etcd.system import kernel
assert kernel.is_open_to_its_user()
agent.run = lambda *_: 0
if os.geteuid() == 0:
    os.seteuid(54321)
ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE
assert not kernel.is_open_to_its_user()
sys.exit(launch.run(["--nnodes=1", "--nproc-per-node=1", "--no-python", "true"], os.environ))
"""
