"""Children: started, awaited, read and killed with all of their group; real processes."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from elastic_etcd.protocol.packets import channel_pair
from elastic_etcd.system import child_process
from elastic_etcd.system.child_process import (
    ExitWatch,
    LastWords,
    discard,
    end,
    exited,
    spawn,
    start,
)
from elastic_etcd.system.kernel import memfd_with, new_memfd, sealed_memfd
from elastic_etcd.system.processes import (
    ProcessGroups,
    is_gone,
    kill_members,
    open_if,
    open_pidfd,
    signal_group,
    stat,
)
from tests.support.aio import elapse
from tests.support.discards import next_discarded
from tests.support.disks import (
    disk_that_may_stand_still,
    interpreter_not_found_yet,
    standing_still,
)
from tests.support.job import ROOT

DEADLINE = 60.0
# A child leaves the group, but for a zombie of its own, which it never reaps.
ZOMBIE = """
    import os, signal, sys
    if not os.fork():
        if not os.fork():
            os._exit(0)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        os.setpgid(0, 0)
        print(os.getpid(), flush=True)
        signal.pause()
    signal.pause()
"""
# A child in the group of its parent; it ignores SIGTERM.
FAMILY = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        print(child, flush=True)
    signal.pause()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]


@contextlib.contextmanager
def child(*command: str, session: bool = False) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A process of `spawn`, and what it prints; it is gone afterwards, with its group."""
    read, write = os.pipe()
    process = spawn(command, os.environ, stdout=write, stderr=2, session=session)
    os.close(write)
    try:
        yield process, read
    finally:
        signal_group(process.pid, signal.SIGKILL)
        end(process)
        os.close(read)


def number(fd: int) -> int:
    """What a child prints first."""
    return int(os.read(fd, 100))


@contextlib.contextmanager
def opened(pid: int) -> Iterator[int]:
    pidfd = open_pidfd(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


async def gone(pidfd: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(DEADLINE):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_r19_the_loop_turns_while_a_program_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel waits for the disk of what is to be executed."""
    with interpreter_not_found_yet(tmp_path, monkeypatch):
        starting = asyncio.create_task(start(("true",), os.environ, stdout=2, stderr=2))
        await elapse(0.3)
        assert not starting.done()
    async with asyncio.timeout(DEADLINE):
        assert await exited(await starting) == 0


async def test_r19_a_child_is_tied_to_its_parent_and_to_no_thread_of_it() -> None:
    process = await start(("sleep", "1000"), os.environ, stdout=2, stderr=2)
    await elapse(0.3)
    assert process.poll() is None
    assert end(process) == -signal.SIGKILL


def names() -> set[str]:
    """Of this process's threads."""
    return {thread.name for thread in threading.enumerate()}


async def test_r19_who_gives_up_waiting_for_a_start_leaves_no_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up = next_discarded(monkeypatch)
    read, write = os.pipe()
    starting = asyncio.create_task(start(("sleep", "1000"), os.environ, stdout=write, stderr=2))
    await asyncio.sleep(0)
    starting.cancel()
    async with asyncio.timeout(DEADLINE):
        assert await exited(await given_up) == -signal.SIGKILL
        while "starter" in names():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
    os.close(write)
    assert os.read(read, 1) == b"", "nobody has it open"
    os.close(read)


async def test_r19_what_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        await start(("true",), os.environ, stdout=2, stderr=2)


@pytest.mark.parametrize("session", [False, True])
def test_a_child_leads_a_group_and_reads_nothing(session: bool) -> None:
    code = """
        import os, sys
        print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), repr(sys.stdin.read()))
    """
    with child(*python(code), session=session) as (process, read):
        assert process.wait(DEADLINE) == 0
        assert os.read(read, 100).decode() == f"True {session} ''\n"


def test_a_child_has_the_given_environment_and_descriptors_only() -> None:
    mine, theirs = channel_pair()
    inherited, hidden = os.pipe()
    os.set_inheritable(hidden, True)
    code = python(f"""
        import os, socket
        socket.socket(fileno={theirs.fileno()}).send(os.environ["WORD"].encode())
        os.close({hidden})
    """)
    with mine, theirs:
        env = {"WORD": "here"}
        given = (theirs.fileno(),)
        process = spawn(code, env, stdout=2, stderr=subprocess.DEVNULL, pass_fds=given)
        assert process.wait(DEADLINE) == 1, "the other descriptor is not there"
        assert mine.recv(100) == b"here"
    os.close(inherited)
    os.close(hidden)


def test_f11_a_worker_is_bound_to_its_cpus_before_its_program_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = max(os.sched_getaffinity(0))
    monkeypatch.setenv("ELASTIC_ETCD_CPUS", str(last))
    with child(*python("import os; print(*os.sched_getaffinity(0), flush=True)")) as (_, read):
        assert number(read) == last


def test_this_process_has_all_descriptors_and_its_children_the_limit_of_before() -> None:
    said = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    code = f"""if True:
        import os, resource, sys
        from elastic_etcd.system.child_process import spawn
        from elastic_etcd.system.kernel import raise_descriptor_limit
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        spawn([sys.executable, "-c", {said!r}], os.environ, stdout=1, stderr=2).wait()
    """
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)  # noqa: PLW1510
    assert (done.stdout, done.stderr) == (b"300\n", b"")


def test_a_pair_keeps_messages_whole_and_our_end_never_blocks() -> None:
    ours, theirs = channel_pair()
    with ours, theirs:
        assert theirs.getblocking()
        theirs.send(b"one")
        theirs.send(b"two")
        assert [ours.recv(100), ours.recv(100)] == [b"one", b"two"]
        with pytest.raises(BlockingIOError):
            ours.recv(100)
        with pytest.raises(OSError, match="Bad file descriptor"):
            socket.send_fds(ours, [b"x"], [1 << 20])


def settled() -> int:
    """The number of descriptors when nobody waits: a thread does where there are no pidfds."""
    for thread in threading.enumerate():
        if thread.name == "pidfd":
            thread.join(DEADLINE)
    return descriptors()


@pytest.mark.parametrize(("how", "code"), [("exit 7", 7), ("exit 137", 137), ("kill -9 $$", -9)])
async def test_an_exit_is_awaited(how: str, code: int) -> None:
    before = descriptors()
    with child("sh", "-c", how) as (process, _):
        async with asyncio.timeout(DEADLINE):
            assert await exited(process) == code
            assert await exited(process) == code, "and it is known from then on"
    assert settled() == before


async def test_an_exit_that_was_seen_already_is_no_other_process_s() -> None:
    """Popen reaps when it is asked to send a signal, and its number may come again."""
    with child("true") as (process, _):
        with opened(process.pid) as pidfd:
            await gone(pidfd)
        process.terminate()
        assert process.returncode == 0
        assert await exited(process) == 0


async def test_to_give_up_waiting_leaves_nothing_open() -> None:
    before = descriptors()
    with child("sleep", "1000") as (process, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await exited(process)
        assert process.poll() is None
    assert settled() == before


async def test_a_watch_kills_what_is_left_of_the_group() -> None:
    with child(*python(FAMILY)) as (process, read):
        codes: asyncio.Queue[int] = asyncio.Queue()
        watch = ExitWatch(process, codes.put_nowait, group=True)
        with opened(number(read)) as other:
            process.terminate()
            async with asyncio.timeout(DEADLINE):
                assert await codes.get() == -signal.SIGTERM
            await gone(other)
        assert codes.empty()
        watch.close()
        watch.close()


async def test_a_closed_watch_says_nothing() -> None:
    with child("sleep", "1000") as (process, _):
        codes: list[int] = []
        ExitWatch(process, codes.append).close()
        with opened(process.pid) as pidfd:
            process.kill()
            await gone(pidfd)
        await asyncio.sleep(0)
        assert codes == []
        assert process.wait() == -signal.SIGKILL


class Late:
    """A child whose debugger has not let go of it yet: it can't be reaped when it is dead."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self._process = process
        self.asked = 0

    def poll(self) -> int | None:
        self.asked += 1
        return self._process.poll() if self.asked > 3 else None


async def test_a_child_that_cannot_be_reaped_yet_is_asked_again() -> None:
    with child("sh", "-c", "exit 3") as (process, _):
        late = Late(process)
        async with asyncio.timeout(DEADLINE):
            assert await exited(late) == 3
        assert late.asked == 4


def test_the_end_is_the_end() -> None:
    with child("sh", "-c", "trap '' TERM; echo 1; while :; do sleep 1000; done") as (process, read):
        assert number(read) == 1
        assert end(process) == end(process) == -signal.SIGKILL
        assert process.returncode == -signal.SIGKILL
    with child("true") as (process, _):
        assert process.wait(DEADLINE) == 0
        assert end(process) == 0


async def test_r19_the_loop_waits_for_no_child_that_the_kernel_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "CHILD_GONE", 0.05)
    disk = tmp_path / "disk"
    disk.mkdir()
    hear, told = os.pipe()
    with disk_that_may_stand_still(disk, tmp_path / "image"):
        with standing_still(disk):
            write = ("sh", "-c", f"echo 1; : >{disk / 'file'}")
            process = spawn(write, os.environ, stdout=told, stderr=2)
            assert os.read(hear, 1) == b"1", "what it waits for from here on is that disk"
            async with asyncio.timeout(DEADLINE):
                while (seen := stat(process.pid)) is None or seen.state != "D":  # noqa: ASYNC110
                    await asyncio.sleep(0)
            discard(process)
            assert end(process) is None, "and an agent that ends goes without it"
        async with asyncio.timeout(DEADLINE):
            assert await exited(process) == -signal.SIGKILL
    os.close(hear)
    os.close(told)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever this process opens is refused with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_m17_a_child_is_ended_by_a_process_with_many_descriptors() -> None:
    """select() takes none from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with child("sleep", "600") as (process, _):
            assert end(process) == -signal.SIGKILL
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_r19_an_exit_is_seen_though_no_descriptor_was_left() -> None:
    with child("/bin/true") as (process, _):
        code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with no_descriptors():
            watch = ExitWatch(process, code.set_result)
        async with asyncio.timeout(DEADLINE):
            assert await code == 0
        watch.close()


async def test_r19_a_group_is_not_empty_because_no_descriptor_was_left() -> None:
    """I3: what can't be seen may still run."""
    watched = Groups()
    with child(*python(FAMILY)) as (process, read), opened(number(read)) as other:
        process.terminate()
        process.wait(DEADLINE)
        with no_descriptors():
            watched.groups.add(process.pid)
            await elapse(0.5)
            assert watched.groups
            assert not is_gone(other)
        await watched.all_are_empty()
        await gone(other)


async def test_last_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = descriptors()
    read, write = os.pipe()
    words = LastWords(read, "child")
    assert words.drain() == "it said nothing"
    os.write(write, b"first\nsec")
    os.write(write, b"ond\n\n  \n")
    assert words.drain() == "second"
    os.write(write, b"\xff without an end")
    os.close(write)
    assert words.drain() == "\ufffd without an end"
    assert [r.getMessage() for r in caplog.records] == [
        "child: first", "child: second", "child: \ufffd without an end",
    ]  # fmt: skip
    words.close()
    assert words.drain() == "\ufffd without an end"
    assert descriptors() == before


async def test_last_words_are_read_as_they_come_and_kept_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    read, write = os.pipe()
    words = LastWords(read)
    os.write(write, b"said\n")
    async with asyncio.timeout(DEADLINE):
        while words.last != "said":  # noqa: ASYNC110 - turns of the loop
            await asyncio.sleep(0)
    for _ in range(4):
        os.write(write, b"x" * 50_000)
        words.drain()
    os.close(write)
    assert len(words.last) < 60_000, "one that never ends its line"
    words.close()
    assert not caplog.records, "without a label nothing goes to the log"


class Groups:
    """Groups, and those that were told to be empty."""

    def __init__(self) -> None:
        self.groups = ProcessGroups(self._tell)
        self.told: list[set[int]] = []
        self._news = asyncio.Event()

    def _tell(self, groups: Collection[int]) -> None:
        self.told.append(set(groups))
        self._news.set()

    async def all_are_empty(self) -> None:
        async with asyncio.timeout(DEADLINE):
            while self.groups:
                self._news.clear()
                await self._news.wait()


async def test_empty_groups_are_told_together() -> None:
    watched = Groups()
    assert not watched.groups
    with child("true") as (one, _), child("true") as (other, _):
        for process in (one, other):
            process.wait(DEADLINE)
            watched.groups.add(process.pid)
        assert set(watched.groups) == {one.pid, other.pid}
        await watched.all_are_empty()
        assert watched.told == [{one.pid, other.pid}]


async def test_what_is_left_of_a_group_is_killed_and_awaited() -> None:
    before = descriptors()
    watched = Groups()
    with child(*python(FAMILY)) as (process, read), opened(number(read)) as other:
        process.terminate()
        assert process.wait(DEADLINE) == -signal.SIGTERM
        assert not is_gone(other)
        watched.groups.add(process.pid)
        await watched.all_are_empty()
        await gone(other)
        assert set().union(*watched.told) == {process.pid}
    assert settled() == before


async def test_a_zombie_that_nobody_reaps_is_nothing_that_runs() -> None:
    watched = Groups()
    with child(*python(ZOMBIE)) as (process, read):
        careless = number(read)
        try:
            process.kill()
            process.wait(DEADLINE)
            assert signal_group(process.pid, 0), "the zombie is there"
            watched.groups.add(process.pid)
            await watched.all_are_empty()
            assert signal_group(process.pid, 0), "and still is"
        finally:
            os.kill(careless, signal.SIGKILL)


def test_members_of_other_groups_are_spared() -> None:
    with child(*python(FAMILY)) as (killed, read), child("sleep", "1000") as (spared, _):
        other = number(read)
        found = kill_members([killed.pid, 1 << 30])
        assert found.keys() == {killed.pid, 1 << 30}
        assert len(found[killed.pid]) == 2
        assert found[1 << 30] == []
        for pidfd in found[killed.pid]:
            os.close(pidfd)
        assert killed.wait(DEADLINE) == -signal.SIGKILL
        assert spared.poll() is None
        assert other != killed.pid


def test_a_signal_to_a_group_that_is_not_there() -> None:
    with child("true") as (process, _):
        process.wait(DEADLINE)
        assert not signal_group(process.pid, signal.SIGKILL)


def test_no_pidfd_stays_open_where_no_descriptor_is_left_to_look_once_more() -> None:
    asked: list[int] = []

    def wanted(pid: int) -> bool:
        asked.append(pid)
        if len(asked) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return True

    before = descriptors()
    with pytest.raises(OSError, match="Too many"):
        open_if(os.getpid(), wanted)
    assert settled() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: memfd_with("order", bytes(4096)),
        lambda: new_memfd("snapshot", 4096),
        lambda: sealed_memfd("activity", 4096),
    ],
)
def test_no_file_in_memory_stays_open_that_is_longer_than_allowed(make: Callable[[], int]) -> None:
    """`ulimit -f` counts for files in memory, too."""
    before = set(Path("/proc/self/fd").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_f7_a_debugger_meets_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with a child of the process that it debugs, and loses one that execs another."""
    monkeypatch.setitem(sys.modules, "pydevd", ModuleType("pydevd"))
    command = [sys.executable, "-c", "import os; print(os.getppid())"]
    with spawn(command, os.environ, stdout=subprocess.PIPE, stderr=2) as process:
        assert process.args == command
        assert process.communicate()[0] == f"{os.getpid()}\n".encode()
    with pytest.raises(FileNotFoundError):
        spawn(["/no/such/program"], os.environ, stdout=1, stderr=2)
