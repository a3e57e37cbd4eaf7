"""The fork server from the agent's side: when it is ready, what is forked, and how it ends."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from elastic_etcd.agent import prefork
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.prefork import Prefork, _Preforked
from elastic_etcd.children.guardian_process import IGNORED
from elastic_etcd.errors import UsageError
from elastic_etcd.system.child_process import Process, exited
from elastic_etcd.system.processes import open_pidfd
from tests.support.aio import elapse
from tests.support.discards import next_discarded
from tests.support.disks import interpreter_not_found_yet
from tests.unit.prefork import DEADLINE, exit_of, put_torch, python

pytestmark = pytest.mark.timeout(600)

NOT_UTF_8 = b"/m\xfcll"


class News:
    """What happens to fork servers and their workers, as an event to wait for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._event = asyncio.Event()
        for kind, name in ((Prefork, "_take_message"), (Prefork, "_lost"), (_Preforked, "arrive")):
            patch.setattr(kind, name, self._then_tell(getattr(kind, name)))

    def _then_tell(self, method: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: object) -> None:
            method(*args)
            self._event.set()

        return wrapped

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._event.clear()
                await self._event.wait()


@pytest.fixture
async def news(monkeypatch: pytest.MonkeyPatch) -> News:
    return News(monkeypatch)


@asynccontextmanager
async def forking(
    folder: Path, *preload: str, size: int = 1, torch: bool = False, env: Mapping[str, str] = {}
) -> AsyncIterator[Prefork]:
    """A started one; `torch` is a stand-in where a test isn't about it, so that it's quick."""
    whole = {**os.environ, "PYTHONPATH": str(folder), **env}
    if not torch:
        put_torch(folder)
    started = Prefork(python(folder / "script.py"), whole, preload, size, asyncio.create_task)
    started.start()
    try:
        yield started
    finally:
        started.close()


async def fork(
    server: Prefork, folder: Path, script: str, given: Sequence[int] = ()
) -> tuple[Process, int]:
    """The process that runs `script`, and the pipe of its stdout."""
    (folder / "script.py").write_text(script)
    read, write = os.pipe()
    argv = python(folder / "script.py")
    try:
        async with asyncio.timeout(DEADLINE):
            return await server.fork(argv, os.environ, write, 2, given=given), read
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)


def slow_module(folder: Path) -> Path:
    """Make a module `slow`, whose import ends when somebody writes to this pipe."""
    disk = folder / "disk"
    os.mkfifo(disk)
    (folder / "slow.py").write_text(f"open({str(disk)!r}).close()")
    return disk


async def run(server: Prefork, folder: Path, script: str, given: Sequence[int] = ()) -> str:
    process, read = await fork(server, folder, script, given)
    assert await exit_of(process) == 0
    with os.fdopen(read) as file:
        return file.read()


async def test_workers_are_its_children_and_their_ends_are_exact(tmp_path: Path) -> None:
    async with forking(tmp_path) as server:
        await server.imported()
        script = f"import os; assert os.getppid() == {os.getpid()}; os.kill(os.getpid(), 9)"
        for _ in range(3):
            process, read = await fork(server, tmp_path, script)
            os.close(read)
            assert await exit_of(process) == process.poll() == -signal.SIGKILL


async def test_r19_the_loop_turns_while_its_program_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel waits for the disk of what is to be executed."""
    given_up = next_discarded(monkeypatch)
    with interpreter_not_found_yet(tmp_path, monkeypatch):
        async with forking(tmp_path) as server:
            await elapse(0.3)
            assert server.pid is None, "and nobody waits for it at the end"
    async with asyncio.timeout(DEADLINE):
        await exited(await given_up)


async def test_it_forks_more_than_wait_and_waits_for_no_answer(tmp_path: Path) -> None:
    async with forking(tmp_path, size=1) as server:
        await server.imported()
        (tmp_path / "script.py").write_text("import os; os.write(1, b'%d\\n' % os.getpid())")
        argv, read = python(tmp_path / "script.py"), os.pipe()
        async with asyncio.timeout(DEADLINE):
            started = await asyncio.gather(
                *(server.fork(argv, os.environ, read[1], 2) for _ in range(4))
            )
        os.close(read[1])
        assert [await exit_of(process) for process in started] == [0] * 4
        pids = {process.pid for process in started}
        with os.fdopen(read[0]) as file:
            assert {int(line) for line in file} == pids
        assert len(pids) == 4


async def test_a_worker_gets_descriptors_by_number(tmp_path: Path) -> None:
    async with forking(tmp_path) as server:
        await server.imported()
        (tmp_path / "file").write_text("inside")
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        script = "import os, sys; print(os.read(int(sys.argv[-1]), 99), len(sys.argv))"
        assert await run(server, tmp_path, script, [fd]) == "b'inside' 2\n"
        os.close(fd)


async def test_f11_a_worker_is_bound_to_its_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(os.sched_getaffinity(0))
    async with forking(tmp_path) as server:
        await server.imported()
        script = "import os; print(*os.sched_getaffinity(0))"
        every = await run(server, tmp_path, script)
        assert set(map(int, every.split())) == os.sched_getaffinity(0)
        monkeypatch.setenv("ELASTIC_ETCD_CPUS", str(last))
        assert await run(server, tmp_path, script) == f"{last}\n"


async def test_r19_a_fork_server_that_dies_again_and_again_is_replaced_more_and_more_slowly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, news: News
) -> None:
    """Each one imports torch, on the machine that trains."""
    async with forking(tmp_path, size=0) as server:
        await server.imported()
        dead: set[int | None] = {None}
        for when in ("now", "in 1 s", "in 2 s"):
            assert server.pid is not None
            dead.add(server.pid)
            os.kill(server.pid, signal.SIGKILL)
            await news.until(lambda: server.ready and server.pid not in dead)
            assert caplog.messages[-1].endswith(f"it is replaced {when}")
        assert await run(server, tmp_path, "print(1)") == "1\n"


async def test_one_that_dies_before_its_order_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, news: News
) -> None:
    monkeypatch.setattr(prefork, "_REFILL_AFTER", 0.0)
    async with forking(tmp_path) as one:
        await one.imported()
        pids: set[int] = set()
        for n in range(3):
            await news.until(lambda: one._waiting and one._waiting[0].pid not in {None, *pids})
            pid = one._waiting[0].pid
            assert pid is not None
            pids.add(pid)
            os.kill(pid, signal.SIGTERM)
            assert len(pids) == n + 1
        await news.until(lambda: one._waiting and one._waiting[0].pid not in {None, *pids})
        assert await run(one, tmp_path, "print(1)") == "1\n"


async def test_it_outlives_what_a_scheduler_sends_to_all(tmp_path: Path) -> None:
    async with forking(tmp_path) as server:
        await server.imported()
        assert server.pid is not None
        for number in IGNORED:
            os.kill(server.pid, number)
        pid = server.pid
        assert await run(server, tmp_path, "print(1)") == "1\n"
        assert server.pid == pid


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import sys; sys.exit('usage: ...')", "SystemExit: usage: ..."),
    ],
)
async def test_a_module_that_cannot_be_imported_is_the_users_error(
    tmp_path: Path, text: str, error: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    async with forking(tmp_path, "broken") as server:
        with pytest.raises(UsageError) as raised:
            await server.imported()
        assert not server.ready
    message = str(raised.value)
    assert message.startswith("--preload broken: ")
    assert message.endswith(error)


async def test_m15_a_fork_server_that_does_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, news: News
) -> None:
    """It is stopped, or its pages are on a file system that stands still."""
    monkeypatch.setattr("elastic_etcd.agent.prefork.ANSWER", 0.5)
    async with forking(tmp_path, size=0) as server:
        await server.imported()
        stopped = server.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(OSError, match="the fork server could not fork"):
            await fork(server, tmp_path, "")
        await news.until(lambda: server.ready)
        assert server.pid not in {None, stopped}
        assert await run(server, tmp_path, "print(1)") == "1\n"
        (line,) = [line for line in caplog.messages if "is replaced" in line]
        assert line.startswith(f"the fork server (pid {stopped}) has not answered for 0.5 s")


async def test_an_import_that_takes_some_time_is_told_while_this_node_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Prefork._tell_slow

    def tell_and_let_go_on(server: Prefork, seconds: float) -> None:
        real(server, seconds)
        disk.open("w").close()

    caplog.set_level("INFO", "elastic_etcd")
    monkeypatch.setattr("elastic_etcd.agent.prefork._TELLS", 0.1)
    monkeypatch.setattr(Prefork, "_tell_slow", tell_and_let_go_on)
    disk = slow_module(tmp_path)
    async with forking(tmp_path, "slow") as server:
        await server.imported()
        assert server.ready
        told = f"the fork server (pid {server.pid}) imports torch; then this node joins"
        assert re.search(rf"waiting for \d+ s: {re.escape(told)}", caplog.text)


async def test_m15_what_is_imported_for_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, news: News
) -> None:
    monkeypatch.setattr("elastic_etcd.agent.prefork.IMPORTED", 0.1)
    disk = slow_module(tmp_path)
    async with forking(tmp_path, "slow") as server:
        await server.imported()
        assert not server.ready
        assert f"the fork server (pid {server.pid}) has not imported all in " in caplog.text
        disk.open("w").close()
        await news.until(lambda: server.ready)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "thread"),
        ("import os; os._exit(3)", "exited 3 before it was warm"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV before it was warm"),
    ],
)
async def test_without_a_fork_server_it_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    (tmp_path / "unsafe.py").write_text(text)
    async with forking(tmp_path, "unsafe") as server:
        await server.imported()
        assert not server.ready
        with pytest.raises(OSError, match="the fork server is not ready"):
            await fork(server, tmp_path, "")
    said = [r.message for r in caplog.records if "without the fork server" in r.message]
    assert len(said) == 1
    assert re.search(reason, said[0])


async def test_a_python_without_torch_has_no_fork_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    async with forking(tmp_path, torch=True) as server:
        await server.imported()
        assert not server.ready
    assert "cannot import torch: ImportError: none here" in caplog.text


async def test_threads_that_come_later_are_found_before_a_fork(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, news: News
) -> None:
    # A module can start a thread when the collector runs, or by a signal, as here. The
    # thread's name is cut inside a character, and the name of a mapped file is no UTF-8.
    (tmp_path / "later.py").write_text(
        "import ctypes, mmap, signal, threading as t\n"
        "start = lambda *_: t.Thread(target=t.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGWINCH, start)\n"
        "ctypes.CDLL(None).prctl(15, 'bücher-lesen-ür'.encode()[:15])\n"
        f"with open({os.fsencode(tmp_path) + NOT_UTF_8!r}, 'w+b') as file:\n"
        "    file.truncate(4096)\n"
        "    mapped = mmap.mmap(file.fileno(), 0)\n"
    )
    async with forking(tmp_path, "later", size=0) as server:
        await server.imported()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGWINCH)
        # It may have refused, and hung up, before the order was on its way.
        with pytest.raises(OSError, match=r"the fork server could not fork|Broken pipe"):
            await fork(server, tmp_path, "")
        await news.until(lambda: not server.ready)
    assert "something after the imports started 1 threads (bücher-lesen-\ufffd)" in caplog.text


async def test_everything_dies_with_the_agent(tmp_path: Path) -> None:
    """The fork server, the workers that wait and those that run, when the agent is SIGKILLed."""
    (tmp_path / "script.py").write_text("import threading; print('up'); threading.Event().wait()")
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "import pytest\n"
        "from tests.unit.test_prefork import News, fork, forking\n"
        "async def main():\n"
        "    news = News(pytest.MonkeyPatch())\n"
        "    folder = Path(sys.argv[1])\n"
        "    async with forking(folder, size=2) as server:\n"
        "        await server.imported()\n"
        "        process, read = await fork(server, folder, (folder / 'script.py').read_text())\n"
        "        assert await asyncio.to_thread(os.read, read, 2) == b'up'\n"
        "        await news.until(lambda: all(each.pid for each in server._waiting))\n"
        "        pids = [server.pid, process.pid, *(each.pid for each in server._waiting)]\n"
        "        print(*pids, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, agent, tmp_path, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stdout is not None
    pids = [int(pid) for pid in (await process.stdout.readline()).split()]
    assert len(pids) == 3
    ends = [open_pidfd(pid) for pid in pids]
    process.kill()
    await process.wait()
    for pidfd in ends:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        async with asyncio.timeout(DEADLINE):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_who_gives_up_waiting_for_a_worker_leaves_none(tmp_path: Path, news: News) -> None:
    children = own_children()
    async with forking(tmp_path, size=0) as server:
        await server.imported()
        ordering = asyncio.create_task(
            run(server, tmp_path, "import threading; threading.Event().wait()")
        )
        await asyncio.sleep(0)
        assert _Preforked._on_their_way
        ordering.cancel()
        await news.until(lambda: not _Preforked._on_their_way)
        async with asyncio.timeout(DEADLINE):
            while own_children() != {*children, str(server.pid)}:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await ordering


@pytest.mark.usefixtures("no_garbage")
async def test_nothing_is_left_when_it_is_closed(tmp_path: Path) -> None:
    before, children = len(list(Path("/proc/self/fd").iterdir())), own_children()
    async with forking(tmp_path, size=2) as server:
        await server.imported()
        assert await run(server, tmp_path, "print(1)") == "1\n"
        async with asyncio.timeout(30):
            while any(each.pid is None for each in server._waiting):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
    assert own_children() == children
    async with asyncio.timeout(DEADLINE):
        while len(list(Path("/proc/self/fd").iterdir())) != before:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)


def own_children() -> set[str]:
    """Zombies included."""
    return {
        pid
        for file in Path("/proc/self/task").glob("*/children")
        for pid in file.read_text().split()
    }


async def test_an_error_of_the_start_is_not_waited_out(tmp_path: Path) -> None:
    """An environment that no process can have, as an example of what nobody has thought of."""
    spoilt = Prefork(python(tmp_path / "script.py"), {"NAME": "a\0b"}, (), 1, asyncio.create_task)
    spoilt.start()
    with pytest.raises(ValueError, match="null byte"):
        async with asyncio.timeout(DEADLINE):
            await spoilt.imported()
    spoilt.close()


async def test_a_crash_of_a_later_start_ends_the_scope_that_it_began_in(tmp_path: Path) -> None:
    """Nobody waits for that start."""

    async def replace() -> None:
        async with asyncio.timeout(DEADLINE), Tasks() as tasks:
            argv, env = python(tmp_path / "script.py"), {"NAME": "a\0b"}
            with closing(Prefork(argv, env, (), 1, tasks.create)) as spoilt:
                spoilt.start()
                await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await replace()
    assert "null byte" in str(raised.value.exceptions[0])
