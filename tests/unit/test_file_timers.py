"""torch's file timers: served by a child with torch's own server, and who is ended by them."""

import asyncio
import json
import logging
import os
import signal
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.timer import FileTimerClient, expires

from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.file_timers import Expired, FileTimers
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.errors import UsageError
from elastic_etcd.system.child_process import exited
from elastic_etcd.system.processes import is_gone, open_pidfd
from tests.unit.watched import DEADLINE, Watched

LATER = 1000.0


class Pipe:
    """File timers at a path, and those that have expired."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.expired: asyncio.Queue[Expired] = asyncio.Queue()
        self.timers = FileTimers(str(path), self.expired.put_nowait)

    def write(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        assert os.write(fd, data) == len(data)
        os.close(fd)

    async def next(self) -> str:
        """The scope of the timer that expires next."""
        async with asyncio.timeout(DEADLINE):
            return (await self.expired.get()).scope


@pytest.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    pipe = Pipe(tmp_path / "pipe")
    await pipe.timers.serve(None)
    yield pipe
    pipe.timers.close()
    assert not pipe.path.exists()


@pytest.fixture
def child() -> "Iterator[subprocess.Popen[bytes]]":
    """A process that is no worker's."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def line(scope: str = "step", after: float = 0.0, **changes: object) -> bytes:
    """A timer of this very process, if nothing else is said."""
    fields = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": scope,
        "expiration_time": time.time() + after,
        "signal": 9,
    }
    return json.dumps(fields | changes).encode() + b"\n"


async def test_timers_that_torch_sets_and_lets_go_of(pipe: Pipe) -> None:
    client = FileTimerClient(str(pipe.path))
    with expires(after=DEADLINE, scope="let go of", client=client):
        pass
    with expires(after=LATER, client=client), expires(after=0.5, scope="step", client=client):
        found = await asyncio.wait_for(pipe.expired.get(), DEADLINE)
    assert found == Expired(os.getpid(), "step", signal.SIGKILL)
    pipe.write(b"x" * 10_000 + b"\n" + line(pid="1"))
    await asyncio.sleep(0)
    pipe.write(line(pid=os.getppid(), scope="other", signal=-1))
    assert await pipe.next() == "other", "torch's server goes on after a line that is none"
    assert stat.S_IMODE(pipe.path.stat().st_mode) & 0o077 == 0, "only this user may write"
    with pytest.raises(UsageError, match=f"TIMER_FILE={pipe.path}: there can be no pipe: File ex"):
        await Pipe(pipe.path).timers.serve(None)
    assert pipe.path.is_fifo()


@pytest.mark.parametrize("gone", ["pipe", "child"])
async def test_m7_what_is_gone_is_made_anew_for_the_next_start(pipe: Pipe, gone: str) -> None:
    process = pipe.timers._process
    assert process
    if gone == "pipe":
        pipe.path.unlink()
    else:
        os.kill(process.pid, signal.SIGKILL)
        await exited(process)
    await pipe.timers.serve(None)
    again = pipe.timers._process
    await pipe.timers.serve(None)
    assert pipe.timers._process is again is not process
    pipe.write(line())
    assert await pipe.next() == "step"


async def test_the_pipe_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = Pipe(tmp_path / "pipe")
    await pipe.timers.serve(None)
    pipe.write(line())
    assert await pipe.next() == "step"
    pipe.timers.close()


@pytest.mark.parametrize("what", ["a file", "nothing"])
async def test_a_path_at_which_there_can_be_no_pipe(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pipe"
    if what == "nothing":
        path /= "pipe"
    else:
        path.write_text("precious")
    pipe = Pipe(path)
    with pytest.raises(UsageError, match=f"TORCHELASTIC_TIMER_FILE={path}: there can be no pipe: "):
        await pipe.timers.serve(None)
    pipe.timers.close()
    if what == "a file":
        assert path.read_text() == "precious"


# --- what becomes of workers --------------------------------------------------------------


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    config = LogConfig(log_dir=str(tmp_path))
    async with (
        Logs.open(config, job="j", node="n", role="r") as logs,
        Watched.open(logs, timer_file="") as watched,
    ):
        await watched.workers.prestart()
        yield watched


def write(watched: Watched, data: bytes) -> None:
    assert watched.workers._timers
    Path(watched.workers._timers.path).write_bytes(data)


async def test_a_worker_is_killed_and_is_the_failure(watched: Watched) -> None:
    watched.launch(["sleep", "1000"], ["sleep", "1001"])
    _, second = await watched.started()
    write(watched, line("load\nit", 0.4, pid=second))
    await watched.until(lambda: watched.ends)
    (hang,) = watched.hangs
    assert (hang.node, hang.rank, hang.local_rank, hang.pid) == ("n", 1, 1, second)
    assert str(hang).startswith(r"rank 1 on n: timer 'load\nit' expired")
    (ended,) = watched.failures
    assert (ended.rank, ended.code) == (1, -signal.SIGKILL)


async def test_by_the_signal_that_the_timer_has(watched: Watched, tmp_path: Path) -> None:
    """It ends as it likes, as far as it is given the time."""
    trap = f"trap 'exit 7' USR1; touch {tmp_path}/trap; while :; do sleep 0.1; done"
    watched.launch(["sh", "-c", trap])
    (pid,) = await watched.started()
    await watched.turns((tmp_path / "trap").exists)
    write(watched, line(pid=pid, signal=signal.SIGUSR1))
    assert (await watched.failure()).code == 7
    assert [hang.pid for hang in watched.hangs] == [pid]


async def test_a_timer_of_what_a_worker_has_started(watched: Watched, tmp_path: Path) -> None:
    watched.launch(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait; sleep 1001"])
    (pid,) = await watched.started()
    await watched.turns((tmp_path / "pid").exists)
    await watched.turns((tmp_path / "pid").read_text)
    child = int((tmp_path / "pid").read_text())
    pidfd = open_pidfd(child)
    write(watched, line(pid=child, signal=signal.SIGTERM))
    await watched.until(lambda: watched.hangs)
    await watched.turns(lambda: is_gone(pidfd))
    os.close(pidfd)
    assert watched.pids == {0: pid}, "it has the time to end by itself"
    write(watched, line(pid=pid))
    assert (await watched.failure()).code == -signal.SIGKILL


@pytest.mark.parametrize("number", [0, -1])
async def test_without_a_signal_it_is_only_told(
    watched: Watched, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    watched.launch(["sleep", "1000"])
    (pid,) = await watched.started()
    with caplog.at_level(logging.WARNING):
        write(watched, line(pid=pid, signal=number))
        await watched.turns(lambda: "timer 'step' expired" in caplog.text)
    assert watched.pids == {0: pid}
    assert not watched.hangs


async def test_who_is_no_worker_is_left_alone(
    watched: Watched, child: "subprocess.Popen[bytes]"
) -> None:
    watched.launch(["sleep", "1000"])
    (pid,) = await watched.started()
    write(watched, line(pid=child.pid) + line(pid=pid))
    assert (await watched.failure()).pid == pid
    assert [hang.pid for hang in watched.hangs] == [pid]
    assert child.poll() is None


async def test_workers_are_told_where_and_nothing_is_left_there(tmp_path: Path) -> None:
    async with (
        Logs.open(LogConfig(), job="j", node="n", role="r") as logs,
        Watched.open(logs, timer_file="") as watched,
    ):
        await watched.workers.prestart()
        assert watched.workers._timers
        path = Path(watched.workers._timers.path)
        assert path.is_fifo()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()
