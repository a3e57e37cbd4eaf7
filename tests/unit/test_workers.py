"""Real processes, waited for by their events; every await has the suite's deadline."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from elastic_etcd.agent import store, termination
from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.core.schema import Limits, Participant, Phase, Round
from elastic_etcd.system import child_process, leftovers, processes
from elastic_etcd.system.child_process import Process
from elastic_etcd.system.leftovers import MARK
from elastic_etcd.system.processes import is_gone, open_pidfd
from elastic_etcd.times import STUCK
from tests.unit.watched import DEADLINE, Watched

if TYPE_CHECKING:
    from elastic_etcd.agent.prefork import Prefork

SHUTDOWN = 15.0


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[Logs]:
    async with Logs.open(LogConfig(log_dir=str(tmp_path)), job="j", node="n", role="r") as logs:
        yield logs


@pytest.fixture
async def watched(logs: Logs) -> AsyncIterator[Watched]:
    async with Watched.open(logs) as watched:
        yield watched


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
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return False
    try:
        return not is_gone(pidfd)
    finally:
        os.close(pidfd)


async def gone(pid: int) -> None:
    """Wait until this process, not a child of ours, has ended."""
    try:
        pidfd = open_pidfd(pid)
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


async def test_exit_codes_and_signals_are_told_apart(watched: Watched) -> None:
    watched.launch(
        ["sh", "-c", "exit 0"],
        ["sh", "-c", "exit 7"],
        ["sh", "-c", "kill -9 $$"],
        ["sh", "-c", "exit 137"],
    )
    await watched.emptied()
    assert len(watched.ends) == 4
    assert {f.rank: f.code for f in watched.failures} == {1: 7, 2: -9, 3: 137}
    assert all(e.generation == 1 and not e.by_peer for e in watched.ends)
    assert all(0 <= f.uptime < SHUTDOWN and f.node == "n" for f in watched.failures)
    assert all(f.message == "" and f.local_rank == f.rank for f in watched.failures)


async def test_no_worker_at_all_is_empty_at_once(watched: Watched) -> None:
    watched.launch()
    assert watched.empties == []  # news come from the loop only
    await watched.emptied()


async def test_the_message_is_the_last_traceback(watched: Watched) -> None:
    watched.launch(python("1 / 0"))
    message = (await watched.failure()).message
    assert message.startswith("Traceback (most recent call last):")
    assert message.endswith("ZeroDivisionError: division by zero")
    await watched.emptied()


async def test_r1_an_error_file_that_never_answers_holds_up_nothing(watched: Watched) -> None:
    """Like a file of a server that is gone: whoever opens it waits."""
    watched.launch(
        python("""
            import os, sys
            os.mkfifo(os.environ["TORCHELASTIC_ERROR_FILE"])
            raise ValueError("told in stderr")
        """)
    )
    await watched.emptied()
    assert "ValueError: told in stderr" in watched.failures[0].message


async def test_the_error_file_is_better_than_stderr(watched: Watched) -> None:
    watched.launch(
        python("""
            import json, os
            record = {"message": {"message": "E: m", "extraInfo": {"py_callstack": "the stack"}}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as f:
                json.dump(record, f)
            1 / 0
        """),
    )
    assert (await watched.failure()).message == "the stack"
    await watched.emptied()


async def test_t11_a_worker_that_lost_its_peer_names_the_one_that_has_ended(
    watched: Watched, fifo: Path
) -> None:
    fails = """
        import sys
        open(sys.argv[1]).read()
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    """
    watched.launch([*python(fails), str(fifo)], python("pass"), ["sleep", "1000"])
    await watched.until(lambda: watched.ends)
    with fifo.open("w"):
        pass
    failure = await watched.failure()
    assert failure.hang == "rank 1 on n ended while rank 0 on n was at work"
    assert (failure.node, failure.rank, failure.pid, failure.code) == ("", 0, 0, 0)
    assert failure.message.endswith("Connection closed by peer")
    assert watched.ends[1].by_peer, "another cause may be known soon"
    watched.kill()
    await watched.emptied()


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [("/no/such/program", 127, "No such file"), ("/etc/passwd", 126, "Permission denied")],
)
async def test_a_program_that_cannot_run_is_an_exit(
    watched: Watched, program: str, code: int, words: str
) -> None:
    watched.launch([program], ["sleep", "1000"])
    failure = await watched.failure()
    assert (failure.rank, failure.code) == (0, code)
    assert program in failure.message
    assert words in failure.message
    watched.kill()
    await watched.emptied()


async def test_a_command_too_long_for_the_kernel_is_an_exit(watched: Watched) -> None:
    watched.launch(["echo", "x" * (1 << 22)])
    assert watched.ends == []
    failure = await watched.failure()
    assert (failure.code, failure.pid) == (126, 0)
    assert "Argument list too long" in failure.message
    await watched.emptied()


async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(
    watched: Watched, fifo: Path
) -> None:
    watched.launch(
        ["sh", "-c", f"trap '' TERM; echo ready > {fifo}; while :; do sleep 1000; done"],
    )
    await line(fifo)
    await watched.started()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    watched.workers.stop(1000)
    watched.workers.stop(0.3)  # the shorter one wins
    watched.workers.stop(1000)
    await watched.emptied()
    assert watched.failures[0].code == -signal.SIGKILL
    assert 0.3 <= loop.time() - begin < 5


async def test_a_worker_may_use_its_grace(watched: Watched, fifo: Path) -> None:
    watched.launch(
        ["sh", "-c", f"trap 'exit 3' TERM; echo ready > {fifo}; while :; do sleep 0.01; done"],
    )
    await line(fifo)
    await watched.started()
    watched.workers.stop(1000)
    await watched.emptied()
    assert watched.failures[0].code == 3


async def test_stop_at_any_moment_is_safe(watched: Watched) -> None:
    watched.workers.stop(1)  # nothing has ever run
    watched.kill()

    watched.launch(*[["sleep", "1000"]] * 4)
    watched.workers.stop(1000)  # they are not even processes
    await watched.emptied()
    assert [f.code for f in watched.failures] == [-signal.SIGKILL] * 4

    watched.launch(*[["sleep", "1000"]] * 4, generation=2)
    assert len(await watched.started()) == 4
    watched.workers.stop(1000)  # the trampoline has hardly begun
    await watched.emptied()
    assert [f.code for f in watched.failures] == [-signal.SIGTERM] * 4

    watched.launch(["true"], generation=3)
    await watched.emptied()
    watched.workers.stop(1)
    watched.kill()
    await watched.emptied()


async def test_children_that_hold_the_pipes_and_ignore_sigterm_go_with_their_leader(
    watched: Watched, fifo: Path, tmp_path: Path
) -> None:
    child = tmp_path / "child.sh"
    child.write_text(f"trap '' TERM\necho $$ > {fifo}\nwhile :; do sleep 1000; done\n")
    watched.launch(["sh", "-c", f"sh {child} & exec sleep 1000"])
    pid = int(await line(fifo))
    (leader,) = await watched.started()
    assert os.getpgid(pid) == leader
    os.kill(leader, signal.SIGTERM)
    assert (await watched.failure()).code == -signal.SIGTERM
    await watched.emptied()
    assert not is_running(pid)


DAEMON = "setsid sh -c 'trap \"\" TERM; echo $$ > {fifo}; while :; do sleep 1000; done' & "


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Counts as an accelerator's."""
    monkeypatch.setattr(leftovers, "_DEVICES", ("/dev/full",))
    return "exec 3< /dev/full; "


def left(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "sessions of their own" in r.getMessage()]


async def test_r18_a_daemon_with_a_device_is_killed_and_awaited(
    watched: Watched, fifo: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched.launch(["sh", "-c", device + DAEMON.format(fifo=fifo) + "exec sleep 1000"])
    pid = int(await line(fifo))
    watched.kill()
    await watched.emptied()
    assert not is_running(pid)
    assert all(line.startswith("generation 1 left ") for line in left(caplog))
    told = sum(f"{pid} (sh)" in line for line in left(caplog))
    assert told == 1, "beside what it has forked since"


async def test_f2_a_daemon_without_a_device_is_not_waited_for(
    watched: Watched, fifo: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a tracker's service. Another daemon's device changes nothing for it."""
    pipe, words = Path(f"{fifo}.2"), Path(f"{fifo}.3")
    os.mkfifo(pipe)
    os.mkfifo(words)
    service = f"setsid sh -c 'echo ready > {pipe}; read line < {words}; echo the rest > {pipe}' & "
    both = service + device + DAEMON.format(fifo=fifo)
    watched.launch(["sh", "-c", both + "exec sleep 1000"])
    holder = int(await line(fifo))
    assert await line(pipe) == "ready"
    watched.kill()
    await watched.emptied()
    assert not is_running(holder)
    watched.launch(["sleep", "1000"], generation=2)
    await watched.started()
    words.write_text("go on\n")
    assert await line(pipe) == "the rest"
    assert sum(f"{holder} (sh)" in line for line in left(caplog)) == 1


async def test_f2_a_daemon_that_does_not_end_soon_is_killed(
    watched: Watched, fifo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what it has started, and nothing of the generation that runs meanwhile."""
    monkeypatch.setattr(leftovers, "LEFTOVERS", 0.1)
    watched.launch(["sh", "-c", DAEMON.format(fifo=fifo) + "exec sleep 1000"])
    pid = int(await line(fifo))
    watched.kill()
    await watched.emptied()
    os.mkfifo(f"{fifo}.2")
    daemon = DAEMON.format(fifo=f"{fifo}.2")
    watched.launch(["sh", "-c", f"({daemon}) ; exec sleep 1000"], generation=2)
    newer = int(await line(Path(f"{fifo}.2")))
    await gone(pid)
    await watched.turns(lambda: left(caplog))
    (told,) = left(caplog)
    assert told.startswith("generation 1 left ")
    assert f"{pid} (sh)" in told
    assert is_running(newer)
    watched.kill()
    await watched.emptied()
    await watched.workers.end_leftovers()
    assert not is_running(newer), "this agent may end"


async def test_f2_a_daemon_is_killed_with_the_tasks_of_its_agent(logs: Logs, fifo: Path) -> None:
    """An agent that is to leave at once waits for nothing."""
    async with Watched.open(logs) as watched:
        watched.launch(["sh", "-c", DAEMON.format(fifo=fifo) + "exec sleep 1000"])
        pid = int(await line(fifo))
        watched.kill()
        await watched.emptied()
        assert is_running(pid)
    await gone(pid)


async def test_r18_a_daemon_without_the_mark_is_left(watched: Watched, fifo: Path) -> None:
    """As a script starts what is to outlive it."""
    watched.launch(["sh", "-c", f"{MARK}= {DAEMON.format(fifo=fifo)} exec sleep 1000"])
    pid = int(await line(fifo))
    watched.kill()
    try:
        await watched.emptied()
        assert is_running(pid)
    finally:
        os.killpg(pid, signal.SIGKILL)
    await gone(pid)


async def test_r18_what_others_have_started_is_left(watched: Watched, fifo: Path) -> None:
    """Also another agent of the same node and job, on this machine."""
    other = replace(watched.workers._mark, pid=1)
    env = {**os.environ, MARK: str(other)}
    stranger = subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True)
    own_child = subprocess.Popen(["sleep", "1000"], env={MARK: str(watched.workers._mark)})
    try:
        watched.launch(["sh", "-c", f"echo 1 > {fifo}"])
        await line(fifo)
        await watched.emptied()
        assert is_running(stranger.pid)
        assert is_running(own_child.pid), "a fork server"
    finally:
        for process in (stranger, own_child):
            process.kill()
            process.wait()


async def test_r18_a_daemon_lives_as_long_as_a_parked_worker(
    watched: Watched, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LEFTOVERS", 0.1)
    parks = [*python(PARKS.replace('["sleep", "1000"]', DAEMONIZED)), str(fifo)]
    watched.launch(parks)
    pid = int(await line(fifo))
    await watched.turns(lambda: watched.workers._parked)
    watched.workers.stop(1000)
    await watched.emptied()
    assert is_running(pid)
    watched.launch(["true"], generation=2)
    (parked,) = watched.groups
    os.kill(parked, signal.SIGKILL)
    await watched.emptied()
    await gone(parked)
    await watched.workers.end_leftovers()
    assert not is_running(pid)


async def test_an_agent_does_not_end_before_what_it_kills(
    watched: Watched, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is dying has no environment any more, by which it would be found."""
    killed = asyncio.Event()

    async def end_late(*_: object) -> None:
        await killed.wait()

    monkeypatch.setattr(termination, "end_late", end_late)
    watched.launch(["sh", "-c", DAEMON.format(fifo=fifo) + "exec sleep 1000"])
    pid = int(await line(fifo))
    watched.kill()
    await watched.emptied()
    os.killpg(pid, signal.SIGKILL)
    await gone(pid)
    ending = asyncio.create_task(watched.workers.end_leftovers())
    await asyncio.wait({ending}, timeout=1)
    assert not ending.done()
    killed.set()
    await ending


async def test_a_dead_child_that_nobody_reaps_delays_nothing(watched: Watched, fifo: Path) -> None:
    # As in a container whose first process is no init: orphans stay in their group as zombies.
    watched.launch(
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
    careless = int(await line(fifo))
    (leader,) = await watched.started()
    try:
        watched.kill()
        await watched.emptied()
        os.killpg(leader, 0)  # the zombie is still there
    finally:
        os.kill(careless, signal.SIGKILL)
    await gone(careless)


async def test_workers_die_with_a_killed_agent(fifo: Path) -> None:
    code = """
        import asyncio, sys
        from elastic_etcd.agent.config import LogConfig
        from elastic_etcd.agent.output.logs import Logs
        from tests.unit.watched import Watched

        async def main() -> None:
            logs = Logs.open(LogConfig(log_dir="/dev/null"), job="j", node="n", role="r")
            async with Watched.open(logs) as watched:
                watched.launch(("sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 1000"))
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(fifo)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        pid = int(await line(fifo))
        assert is_running(pid)
    finally:
        agent.kill()
        agent.wait()
    await gone(pid)


class NoFork:
    """Stands in for a fork server that is about to find out that it can't fork."""

    ready = True
    asked = 0

    async def fork(self, *_: object, **__: object) -> Process:
        self.asked += 1
        raise OSError(11, "the fork server could not fork")

    def close(self) -> None:
        pass


async def test_a_world_whose_store_can_not_even_be_begun_is_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers would call there for half an hour."""

    def none_left() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    master = watched.workers.offer(1, Reached("127.0.0.1"))
    now = Round(1, Phase.FINAL, 0xA, "why", "r", "n", 1, 1, master)
    with monkeypatch.context() as patched:
        patched.setattr(store, "channel_pair", none_left)
        watched.workers.start(now, Participant(0xA, "n", 1, 0, 0), Limits(1, 1))
    await watched.until(lambda: watched.hangs)
    (failure,) = watched.hangs
    assert failure.hang == "the store server on n can't be started: Too many open files"
    assert failure.node == "n", "M20: it is that node's, which is left out if it goes on"
    await watched.emptied()


async def test_what_cannot_be_forked_is_executed(watched: Watched) -> None:
    server = NoFork()
    watched.workers._prefork = cast("Prefork", server)
    watched.launch(["sh", "-c", "exit 3"], ["/no/such/program"])
    await watched.emptied()
    assert server.asked == 2
    assert {f.rank: f.code for f in watched.failures} == {0: 3, 1: 127}


async def test_stdin_is_empty_and_the_group_is_its_own(logs: Logs, watched: Watched) -> None:
    assert logs.directory is not None
    watched.launch(
        python("import os, sys; print(sys.stdin.read() == '', os.getpgrp() == os.getpid())")
    )
    await watched.emptied()
    file = logs.directory / "generation_1/0/stdout.log"
    # A thread writes it, and Python in pieces.
    await watched.turns(lambda: file.exists() and file.read_text().endswith("\n"))
    assert file.read_text() == "True True\n"


@pytest.mark.usefixtures("no_garbage")
async def test_nothing_is_left_open_after_an_exit(watched: Watched) -> None:
    watched.launch(["true"])
    await watched.emptied()
    before = len([*Path("/proc/self/fd").iterdir()])  # with the page of local rank 0
    watched.launch(["sleep", "1000"])
    (pid,) = await watched.started()
    os.kill(pid, signal.SIGKILL)
    await watched.failure()
    await watched.emptied()
    async with asyncio.timeout(DEADLINE):  # a thread closes files
        while len([*Path("/proc/self/fd").iterdir()]) > before:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)


class Lingering:
    """Processes that a worker leaves in its group don't die by SIGKILL: the kernel holds them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._signal_group = processes.signal_group
        for module in (child_process, processes):
            patch.setattr(module, "signal_group", self._but_not_kill)
        patch.setattr(processes, "signal_pidfd", lambda *_: None)  # what kill_members does

    def _but_not_kill(self, group: int, number: int) -> bool:
        return self._signal_group(group, 0 if number == signal.SIGKILL else number)


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> Lingering:
    return Lingering(monkeypatch)


def stuck(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "after SIGKILL" in r.getMessage()]


@pytest.mark.usefixtures("lingering")
async def test_what_is_there_long_after_sigkill_is_told_once(
    watched: Watched, fifo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(termination, "STUCK", 0.05)
    watched.launch(["true"], ["sh", "-c", f"sleep 1000 & echo $! > {fifo}; exit 1"])
    pid = int(await line(fifo))
    await watched.turns(lambda: stuck(caplog))
    assert not watched.empties, "I3: it is not gone"
    os.kill(pid, signal.SIGKILL)
    await watched.emptied()
    (told,) = stuck(caplog)
    assert told.startswith("generation 1: processes of rank 1 are still there ")


@pytest.mark.usefixtures("lingering")
async def test_what_one_worker_leaves_behind_changes_nobody_s_grace(
    watched: Watched, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A leftover's time until it is told was taken for a kill that is about to come anyway."""
    stubborn = f"trap '' TERM; echo ready > {fifo}; while :; do sleep 1000; done"
    os.mkfifo(f"{fifo}.2")
    watched.launch(["sh", "-c", stubborn], ["sh", "-c", f"sleep 1000 & echo $! > {fifo}.2; exit 1"])
    await line(fifo)
    pid = int(await line(Path(f"{fifo}.2")))
    await watched.started()
    await watched.turns(lambda: watched.workers._termination._stuck._handle)
    watched.workers.stop(STUCK + 1)
    watched.workers.stop(1000)
    kill = watched.workers._termination._kill._handle
    assert kill is not None
    assert STUCK < kill.when() - asyncio.get_running_loop().time() <= STUCK + 1
    os.kill(pid, signal.SIGKILL)
    await watched.turns(lambda: watched.workers._termination._stuck._handle is None)
    assert watched.workers._termination._kill._handle is kill
    watched.kill()
    await watched.emptied()
    assert stuck(caplog) == []


async def test_a_worker_that_dies_after_its_agent_s_tasks_is_nobody_s_news(logs: Logs) -> None:
    """An agent that leaves at once waits for none, and one with much memory takes long to die."""
    crashes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, crash: crashes.append(crash))
    async with Tasks() as tasks:
        watched = Watched(logs, tasks)
        watched.launch(python("import time; time.sleep(100)"))
        (pid,) = await watched.started()
    os.kill(pid, signal.SIGKILL)
    await watched.turns(lambda: not (watched.groups or watched.workers._termination._groups))
    watched.workers.close()
    await asyncio.sleep(0.1)
    assert crashes == []


async def test_a_worker_that_dies_while_its_agent_s_tasks_end_is_waited_for_no_more(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what it leaves behind, which the kernel may hold for ever."""
    forever = asyncio.Event()

    async def end_leftovers(*_: object) -> None:
        await forever.wait()

    async def end_late() -> None:
        try:
            await forever.wait()
        finally:
            await agents.turns(lambda: not agents.groups)

    monkeypatch.setattr(termination, "end_leftovers", end_leftovers)
    async with asyncio.timeout(30), Tasks() as tasks:
        agents = Watched(logs, tasks)
        agents.launch(python("import time; time.sleep(100)"))
        await agents.started()
        tasks.create(end_late())
        await asyncio.sleep(0)
        agents.workers.close()


async def test_r12_the_time_until_a_node_gives_up_begins_with_the_sigkill(
    watched: Watched, fifo: Path
) -> None:
    watched.launch(
        ["sh", "-c", f"trap '' TERM; echo ready > {fifo}; while :; do sleep 1000; done"],
    )
    await line(fifo)
    await watched.started()
    watched.workers.stop(1000)
    for _ in range(3):
        await asyncio.sleep(0)
    unkillable = watched.workers._termination._unkillable
    assert unkillable._handle is None
    watched.kill()
    await watched.turns(lambda: unkillable._handle or watched.empties)
    await watched.emptied()
    assert unkillable._handle is None
    assert watched.unkillable == 0


@pytest.mark.usefixtures("lingering")
async def test_r12_what_is_there_longer_than_the_kill_timeout_is_told(
    logs: Logs, fifo: Path
) -> None:
    async with Watched.open(logs, kill_timeout=0.1) as watched:
        watched.launch(["true"], ["sh", "-c", f"sleep 1000 & echo $! > {fifo}; exit 1"])
        pid = int(await line(fifo))
        await watched.started()  # what only starts when it is stopped is really killed
        watched.workers.stop(1000)
        await watched.turns(lambda: watched.unkillable)
        assert not watched.empties, "I3: it is not gone"
        os.kill(pid, signal.SIGKILL)
        await watched.emptied()
        assert watched.unkillable == 1


@pytest.mark.usefixtures("lingering")
async def test_r12_a_daemon_that_is_there_longer_is_told_too(
    logs: Logs, fifo: Path, device: str
) -> None:
    async with Watched.open(logs, kill_timeout=0.1) as watched:
        watched.launch(["sh", "-c", device + DAEMON.format(fifo=fifo) + "exec sleep 1000"])
        pid = int(await line(fifo))
        watched.kill()
        await watched.turns(lambda: watched.unkillable)
        assert not watched.empties, "I3: it is not gone"
        os.killpg(pid, signal.SIGKILL)
        await watched.emptied()


DAEMONIZED = '["sleep", "1000"], start_new_session=True'
PARKS = """
    import os, socket, subprocess, sys
    child = subprocess.Popen(["sleep", "1000"])
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(os.environ["ELASTIC_ETCD_SOCKET"].replace("@", "\\0"))
    agent.send(b'{"type":"hello","v":1,"pid":1,"local_rank":0,"generation":1}')
    agent.send(b'{"type":"elastic"}')
    agent.send(b'{"type":"parked","generation":1,"error":""}')
    with open(sys.argv[1], "w") as file:
        file.write(f"{child.pid}\\n")
    while agent.recv(1 << 16):
        pass
"""


async def test_a_worker_may_speak_before_its_start_is_told(
    watched: Watched, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread, or the fork server, that has started it may be late."""
    spawn, loop = child_process.spawn, asyncio.get_running_loop()

    async def hear() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def spawn_and_tell_late(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = spawn(*args, **kwargs)
        fifo.read_text()
        asyncio.run_coroutine_threadsafe(hear(), loop).result()
        return process

    monkeypatch.setattr(child_process, "spawn", spawn_and_tell_late)
    watched.launch([*python(PARKS), str(fifo)])
    await watched.turns(lambda: watched.workers._parked)
    watched.workers.stop(1000)
    await watched.emptied()
    (parked,) = watched.groups
    os.kill(parked, signal.SIGKILL)


@pytest.mark.usefixtures("lingering")
async def test_a_parked_worker_that_ends_after_its_generation_is_not_told_to_be_stuck(
    watched: Watched, fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched.launch([*python(PARKS), str(fifo)])
    child = int(await line(fifo))
    await watched.turns(lambda: watched.workers._parked)
    watched.workers.stop(1000)
    await watched.emptied()
    (parked,) = watched.groups
    os.kill(parked, signal.SIGKILL)
    await watched.turns(lambda: watched.workers._termination._stuck._handle)
    assert watched.guarded.groups == ()
    os.kill(child, signal.SIGKILL)
    await watched.turns(lambda: watched.workers._termination._stuck._handle is None)
    await watched.emptied()
    assert watched.ends == []
    assert stuck(caplog) == []
