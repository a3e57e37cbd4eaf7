"""Real processes, waited for by their events; every await has the suite's deadline."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.logs import Logs
from elastic_etcd.agent.processes import is_gone
from elastic_etcd.agent.worker import WorkerSpec
from elastic_etcd.agent.workers import WorkerExit, WorkerGroup

SHUTDOWN = 15.0


class Watched:
    """A group whose callbacks can be awaited."""

    def __init__(self, logs: Logs, *commands: Sequence[str], generation: int = 1) -> None:
        self.exits: list[WorkerExit] = []
        self.empties: list[int] = []
        self._news = asyncio.Event()
        specs = []
        for n, command in enumerate(commands):
            file = logs.error_file(generation, n)
            env = {**os.environ, "TORCHELASTIC_ERROR_FILE": file}
            specs.append(WorkerSpec(tuple(command), env, n, n, file))
        self.group = WorkerGroup(generation, specs, logs, self._exited, self._emptied)

    def _exited(self, exit_: WorkerExit) -> None:
        assert not self.empties, "an exit after emptied"
        self.exits.append(exit_)
        self._news.set()

    def _emptied(self, generation: int) -> None:
        self.empties.append(generation)
        self._news.set()

    async def exit(self) -> WorkerExit:
        async with asyncio.timeout(SHUTDOWN):
            while not self.exits:
                self._news.clear()
                await self._news.wait()
        return self.exits[0]

    async def emptied(self) -> None:
        async with asyncio.timeout(SHUTDOWN):
            while not self.empties:
                self._news.clear()
                await self._news.wait()
        await asyncio.sleep(0)  # one turn of the loop in which nothing more may come
        assert self.empties == [self.group.generation]


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[Logs]:
    async with Logs.open(LogConfig(log_dir=str(tmp_path)), job="j", node="n", role="r") as logs:
        yield logs


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code)]


async def line(path: Path) -> str:
    """The first line of a file or FIFO that a worker writes."""
    loop = asyncio.get_running_loop()
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    arrived = asyncio.Event()
    loop.add_reader(fd, arrived.set)
    try:
        async with asyncio.timeout(SHUTDOWN):
            await arrived.wait()
        return os.read(fd, 4096).decode().split("\n")[0]
    finally:
        loop.remove_reader(fd)
        os.close(fd)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def is_running(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not is_gone(pidfd)
    finally:
        os.close(pidfd)


async def gone(pid: int) -> None:
    """Wait until this process, not a child of ours, has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(SHUTDOWN):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_exit_codes_and_signals_are_told_apart(logs: Logs) -> None:
    watched = Watched(
        logs,
        ["sh", "-c", "exit 0"],
        ["sh", "-c", "exit 7"],
        ["sh", "-c", "kill -9 $$"],
        ["sh", "-c", "exit 137"],
    )
    watched.group.start()
    await watched.emptied()
    assert {e.rank: e.code for e in watched.exits} == {0: 0, 1: 7, 2: -9, 3: 137}
    assert all(0 < e.uptime < SHUTDOWN and e.generation == 1 for e in watched.exits)
    assert all(e.message == "" for e in watched.exits)


async def test_no_worker_at_all_is_empty_at_once(logs: Logs) -> None:
    watched = Watched(logs)
    watched.group.start()
    assert watched.empties == []  # callbacks come from the loop only
    await watched.emptied()


async def test_the_message_is_the_last_traceback(logs: Logs) -> None:
    watched = Watched(logs, python("1 / 0"))
    watched.group.start()
    message = (await watched.exit()).message
    assert message.startswith("Traceback (most recent call last):")
    assert message.endswith("ZeroDivisionError: division by zero")
    await watched.emptied()


async def test_the_error_file_is_better_than_stderr(logs: Logs) -> None:
    watched = Watched(
        logs,
        python("""
            import json, os
            record = {"message": {"message": "E: m", "extraInfo": {"py_callstack": "the stack"}}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as f:
                json.dump(record, f)
            1 / 0
        """),
    )
    watched.group.start()
    assert (await watched.exit()).message == "the stack"
    await watched.emptied()


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [("/no/such/program", 127, "No such file"), ("/etc/passwd", 126, "Permission denied")],
)
async def test_a_program_that_cannot_run_is_an_exit(
    logs: Logs, program: str, code: int, words: str
) -> None:
    watched = Watched(logs, [program], ["sleep", "1000"])
    watched.group.start()
    exit_ = await watched.exit()
    assert (exit_.rank, exit_.code) == (0, code)
    assert program in exit_.message
    assert words in exit_.message
    watched.group.kill()
    await watched.emptied()


async def test_a_command_too_long_for_the_kernel_is_an_exit(logs: Logs) -> None:
    watched = Watched(logs, ["echo", "x" * (1 << 22)])
    watched.group.start()
    assert watched.exits == []
    exit_ = await watched.exit()
    assert (exit_.code, exit_.pid) == (126, 0)
    assert "Argument list too long" in exit_.message
    await watched.emptied()


async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(
    logs: Logs, fifo: Path
) -> None:
    watched = Watched(
        logs,
        ["sh", "-c", f"trap '' TERM; echo ready > {fifo}; while :; do sleep 1000; done"],
    )
    watched.group.start()
    await line(fifo)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    watched.group.stop(1000)
    watched.group.stop(0.3)  # the shorter one wins
    watched.group.stop(1000)
    await watched.emptied()
    assert watched.exits[0].code == -signal.SIGKILL
    assert 0.3 <= loop.time() - begin < 5


async def test_a_worker_may_use_its_grace(logs: Logs, fifo: Path) -> None:
    watched = Watched(
        logs,
        ["sh", "-c", f"trap 'exit 3' TERM; echo ready > {fifo}; while :; do sleep 0.01; done"],
    )
    watched.group.start()
    await line(fifo)
    watched.group.stop(1000)
    await watched.emptied()
    assert watched.exits[0].code == 3


async def test_stop_at_any_moment_is_safe(logs: Logs) -> None:
    before = Watched(logs, ["sleep", "1000"])
    before.group.stop(1)
    before.group.start()
    await before.emptied()
    assert before.exits == []

    in_exec = Watched(logs, *[["sleep", "1000"]] * 4, generation=2)
    in_exec.group.start()
    in_exec.group.stop(1000)  # the trampoline has hardly begun
    await in_exec.emptied()
    assert [e.code for e in in_exec.exits] == [-signal.SIGTERM] * 4

    after = Watched(logs, ["true"], generation=3)
    after.group.start()
    await after.emptied()
    after.group.stop(1)
    after.group.kill()
    await after.emptied()


async def test_children_that_hold_the_pipes_and_ignore_sigterm_go_with_their_leader(
    logs: Logs, fifo: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child.sh"
    child.write_text(f"trap '' TERM\necho $$ > {fifo}\nwhile :; do sleep 1000; done\n")
    watched = Watched(logs, ["sh", "-c", f"sh {child} & exec sleep 1000"])
    watched.group.start()
    pid = int(await line(fifo))
    (leader,) = watched.group.pids.values()
    assert os.getpgid(pid) == leader
    os.kill(leader, signal.SIGTERM)
    assert (await watched.exit()).code == -signal.SIGTERM
    await watched.emptied()
    assert not is_running(pid)


async def test_a_grandchild_that_left_the_group_delays_nothing(logs: Logs, fifo: Path) -> None:
    watched = Watched(
        logs,
        ["sh", "-c", f"setsid sh -c 'echo $$ > {fifo}; exec sleep 1000' & wait $!"],
    )
    watched.group.start()
    pid = int(await line(fifo))
    try:
        watched.group.kill()
        await watched.emptied()
        assert is_running(pid), "it is its own session's business"
    finally:
        os.kill(pid, signal.SIGKILL)
    await gone(pid)


async def test_a_dead_child_that_nobody_reaps_delays_nothing(logs: Logs, fifo: Path) -> None:
    # As in a container whose first process is no init: orphans stay in their group as zombies.
    watched = Watched(
        logs,
        python(f"""
            import os, signal
            if not os.fork():
                if not os.fork():
                    signal.pause()  # in the worker's group, but a child of the one below
                os.setpgid(0, 0)
                with open({str(fifo)!r}, "w") as f:
                    f.write(f"{{os.getpid()}}\\n")
                signal.pause()
            signal.pause()
        """),
    )
    watched.group.start()
    careless = int(await line(fifo))
    (leader,) = watched.group.pids.values()
    try:
        watched.group.kill()
        await watched.emptied()
        os.killpg(leader, 0)  # the zombie is still there
    finally:
        os.kill(careless, signal.SIGKILL)
    await gone(careless)


async def test_workers_die_with_a_killed_agent(tmp_path: Path, fifo: Path) -> None:
    agent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import asyncio, os, sys
                from elastic_etcd.agent.config import LogConfig
                from elastic_etcd.agent.logs import Logs
                from elastic_etcd.agent.workers import WorkerGroup, WorkerSpec

                async def main() -> None:
                    logs = Logs.open(LogConfig(log_dir="/dev/null"), job="j", node="n", role="r")
                    command = ("sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 1000")
                    spec = WorkerSpec(command, os.environ, 0, 0, "")
                    WorkerGroup(1, [spec], logs, print, print).start()
                    await asyncio.Event().wait()

                asyncio.run(main())
            """),
            str(fifo),
        ]
    )
    try:
        pid = int(await line(fifo))
        assert is_running(pid)
    finally:
        agent.kill()
        agent.wait()
    await gone(pid)


async def test_stdin_is_empty_and_the_group_is_its_own(logs: Logs) -> None:
    assert logs.directory is not None
    watched = Watched(
        logs, python("import os, sys; print(sys.stdin.read() == '', os.getpgrp() == os.getpid())")
    )
    watched.group.start()
    await watched.emptied()
    assert (logs.directory / "generation_1/0/stdout.log").read_text() == "True True\n"


@pytest.mark.usefixtures("no_garbage")
async def test_nothing_is_left_open_after_an_exit(logs: Logs) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    watched = Watched(logs, ["sleep", "1000"])
    watched.group.start()
    (pid,) = watched.group.pids.values()
    os.kill(pid, signal.SIGKILL)
    await watched.exit()
    await watched.emptied()
    assert set(Path("/proc/self/fd").iterdir()) == before
