"""torch's file timers: what of the lines in the pipe counts, and who is ended by it."""

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
from elastic_etcd.agent.file_timers import FileTimerRequest, FileTimers
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.errors import UsageError
from elastic_etcd.system.processes import is_gone, open_pidfd
from tests.unit.watched import DEADLINE, Watched

LATER = 1000.0


class Pipe:
    """File timers at a path, and those that have expired."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.expired: asyncio.Queue[tuple[int, FileTimerRequest, float]] = asyncio.Queue()
        self.timers = FileTimers(str(path), lambda *found: self.expired.put_nowait(found))

    def write(self, data: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        assert os.write(fd, data) == len(data)
        os.close(fd)

    async def holds(self, timers: int) -> None:
        """Wait until it has read so many."""
        async with asyncio.timeout(DEADLINE):
            while len(self.timers._timers) != timers:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)

    async def next(self) -> str:
        """The scope of the timer that expires next."""
        async with asyncio.timeout(DEADLINE):
            return (await self.expired.get())[1].scope_id


@pytest.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    pipe = Pipe(tmp_path / "pipe")
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


async def test_a_timer_that_torch_sets(pipe: Pipe) -> None:
    client = FileTimerClient(str(pipe.path))
    with expires(after=LATER, client=client), expires(after=0.5, scope="step", client=client):
        session, request, seconds = await asyncio.wait_for(pipe.expired.get(), DEADLINE)
    assert session == os.getsid(0)
    assert (request.pid, request.scope_id, request.signal) == (os.getpid(), "step", signal.SIGKILL)
    assert 0 < seconds <= 0.5


async def test_m7_a_pipe_that_somebody_has_removed_is_made_anew(pipe: Pipe) -> None:
    pipe.path.unlink()
    for _ in range(2):
        await pipe.timers.renew()
        pipe.write(line())
        assert await pipe.next() == "step"


async def test_a_timer_that_is_let_go_of(pipe: Pipe) -> None:
    """Whatever became of it before; another one of this name is another one."""
    client = FileTimerClient(str(pipe.path))
    for _ in range(2):
        with expires(after=DEADLINE, scope="step", client=client):
            pass
    pipe.write(line("late") + line("in time", 0.2) + line("in time", expiration_time=-1))
    assert await pipe.next() == "late"
    pipe.write(line("in time", LATER) + line("last", 0.3))
    assert await pipe.next() == "last"
    assert pipe.expired.empty()


async def test_parts_of_a_line(pipe: Pipe) -> None:
    whole = line()
    for part in (whole[:1], whole[1:40], whole[40:-1]):
        pipe.write(part)
        await asyncio.sleep(0)
    assert pipe.expired.empty()
    pipe.write(whole[-1:] + line("another"))
    assert [await pipe.next(), await pipe.next()] == ["step", "another"]


async def test_many_at_once(pipe: Pipe) -> None:
    scopes = {str(n) for n in range(1000)}
    pipe.write(b"".join(line(scope, 0.1) for scope in scopes) + line("last", 3))
    assert {await pipe.next() for _ in scopes} == scopes
    assert await pipe.next() == "last"


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"x" * 100_000 + b"\n",
        line("s" * 100_000),
        b"\xff\xff\n",
        b"[" * 4000 + b"\n",
        b"[1]\n",
        line(pid=0),
        line(pid=-1),
        line(pid="1"),
        line(pid=1 << 40),
        line(pid=(1 << 31) - 1),  # there is none
        line(signal=65),
        line(expiration_time=float("nan")),
        line(expiration_time=float("-inf")),
        line(scope_id=None),
        b'{"pid": 1}\n',
    ],
)
async def test_what_is_no_timer_changes_nothing(
    pipe: Pipe, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pipe.write(bad)
        pipe.write(bad + line("good"))
        assert await pipe.next() == "good"
    (record,) = caplog.records
    assert "TORCHELASTIC_TIMER_FILE: ignored " in record.message
    assert len(record.message) < 1000
    assert pipe.expired.empty()


async def test_a_line_without_end_is_not_kept(pipe: Pipe) -> None:
    for _ in range(100):
        pipe.write(b"x" * 10_000)
        await asyncio.sleep(0)
    assert len(pipe.timers._rest) < 5000
    pipe.write(b"\n" + line("good"))
    assert await pipe.next() == "good"


async def test_there_are_not_more_than_so_many(pipe: Pipe) -> None:
    for n in range(3000):
        pipe.write(line(str(n), LATER))
        await asyncio.sleep(0)
    pipe.write(line("one too many"))
    pipe.write(line("0"))
    assert await pipe.next() == "0"
    assert pipe.expired.empty()


async def test_an_agent_that_stood_still_hears_first_what_was_let_go_of(pipe: Pipe) -> None:
    """What it finds in the pipe when it goes on may have come after it has looked there."""
    loop = asyncio.get_running_loop()
    pipe.write(line("step", 1.5) + line("last", 1.5))
    await pipe.holds(2)
    loop.call_soon(loop.call_later, 0, pipe.write, line("step", expiration_time=-1))
    loop.call_soon(time.sleep, 2)
    assert await pipe.next() == "last"
    assert pipe.expired.empty()


async def test_a_process_that_has_ended_has_no_timers(
    pipe: Pipe, child: "subprocess.Popen[bytes]"
) -> None:
    pipe.write(line("gone", 1.5, pid=child.pid) + line("last", 1.6))
    await pipe.holds(2)
    child.kill()
    child.wait()
    assert await pipe.next() == "last"


async def test_only_this_user_may_write(pipe: Pipe) -> None:
    assert stat.S_IMODE(pipe.path.stat().st_mode) & 0o077 == 0


async def test_the_pipe_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = Pipe(tmp_path / "pipe")
    pipe.write(line())
    assert await pipe.next() == "step"
    pipe.timers.close()


@pytest.mark.parametrize("what", ["a file", "nothing", "another agent's"])
async def test_a_path_at_which_there_can_be_no_pipe(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pipe"
    if what == "nothing":
        path /= "pipe"
    elif what == "a file":
        path.write_text("precious")
    else:
        other = Pipe(path)
    with pytest.raises(UsageError, match=f"TORCHELASTIC_TIMER_FILE={path}: there can be no pipe: "):
        Pipe(path)
    if what == "a file":
        assert path.read_text() == "precious"
    elif what != "nothing":
        other.write(line())
        assert await other.next() == "step"
        other.timers.close()


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
    assert str(hang).startswith(r"rank 1 on n: timer 'load\nit' expired after 0.")
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


async def test_the_timers_of_who_has_ended_are_forgotten(watched: Watched) -> None:
    watched.launch(["sleep", "1000"], ["sleep", "1001"])
    first, second = await watched.started()
    timers = watched.workers._timers
    assert timers
    write(watched, line(after=LATER, pid=first) + line(after=LATER, pid=second))
    await watched.turns(lambda: len(timers._timers) == 2)
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: watched.ends)
    assert list(timers._timers) == [(second, "step")]


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
