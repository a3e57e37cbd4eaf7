"""Children of this process: how they are started, awaited and killed, with all of their group.

Linux only. An exit is an event: a process is gone when its pidfd is readable, even if nobody ever
reaps it (in a container without an init, orphans stay zombies for ever). Nothing is polled, and a
process id that belongs to another process by now is never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, Unpack

from elastic_etcd.system import trampoline
from elastic_etcd.times import CHILD_GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

# A dead child that is being debugged can't be reaped until the debugger has seen its end.
_REAP_AGAIN = 0.05
# Without a free descriptor nothing can be watched, until something else is closed.
_WATCH_AGAIN = 0.2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_TAIL = 1 << 13
# What an agent's workers, and all that they start, have in their environment: which agent that is.
# Its guardian has it under another name, as that is to end by itself.
MARK, GUARDS = "ELASTIC_ETCD_AGENT", "ELASTIC_ETCD_GUARDS"

log = logging.getLogger(__name__)


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, or minus the signal; None while it runs."""


class Given(TypedDict):
    """What a child gets besides its command; `stdin` is /dev/null if nothing else is said."""

    stdout: int
    stderr: int
    stdin: NotRequired[int]
    pass_fds: NotRequired[Collection[int]]
    session: NotRequired[bool]


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
    session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `command` as a child that dies with this process. Raises OSError.

    It leads a process group of its own, out of the reach of the terminal's Ctrl-C, or with
    `session` a session of its own.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--", *command],
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        bufsize=0,
        start_new_session=session,
        process_group=None if session else 0,
    )


async def start(
    command: Sequence[str], env: Mapping[str, str], **given: Unpack[Given]
) -> subprocess.Popen[bytes]:
    """As `spawn`, while the event loop goes on: the program may be on a disk that stands still.

    The kernel ties the child to the thread that has started it, so that one stays as long as it.
    Where that thread waits the others don't, from Python 3.11.4 on (python/cpython#104372).
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()

    def run() -> None:
        try:
            process = spawn(command, env, **given)
        except Exception as error:  # noqa: BLE001 - who waits gets it, whatever it is
            _call_soon(loop, partial(_fail, started, error))
            return
        if not _call_soon(loop, partial(_give, started, process)):
            process.kill()
        with contextlib.suppress(ChildProcessError):  # reaped already
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=run, name="starter", daemon=True).start()
    return await started


def _call_soon(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> bool:
    """From a thread; False when the loop is closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        return False
    return True


def _fail(started: asyncio.Future[subprocess.Popen[bytes]], error: Exception) -> None:
    if not started.done():
        started.set_exception(error)


def _give(
    started: asyncio.Future[subprocess.Popen[bytes]], process: subprocess.Popen[bytes]
) -> None:
    if started.done():  # who wanted it has gone
        discard(process)
    else:
        started.set_result(process)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """(our end, a child's end) of a Unix socket that keeps packets whole; ours never blocks.

    On a SOCK_SEQPACKET a message and its descriptors arrive together.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


class ExitWatch:
    """Calls `ended(code)` once, from the event loop, when the child has exited and is reaped.

    With `group` the child leads a process group, of which all else is killed then: before the
    child is reaped, so that its number can't be another group's. While there is no descriptor to be
    had it tries again.
    """

    def __init__(
        self, process: Process, ended: Callable[[int], None], *, group: bool = False
    ) -> None:
        self._process = process
        self._ended = ended
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._again: asyncio.TimerHandle | None = None
        self._open()

    def close(self) -> None:
        """Watch no more."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _open(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            self._again = self._loop.call_later(_WATCH_AGAIN, self._open)
        else:
            self._loop.add_reader(self._pidfd, self._on_readable)

    def _on_readable(self) -> None:
        if self._group:
            signal_group(self._process.pid, signal.SIGKILL)
        code = self._process.poll()
        if code is None:
            self._loop.remove_reader(self._pidfd)
            self._loop.call_later(_REAP_AGAIN, self._look_again)
            return
        self.close()
        self._ended(code)

    def _look_again(self) -> None:
        if self._pidfd >= 0:
            self._on_readable()


async def exited(process: Process) -> int:
    """Wait for a child's exit, without a thread; gives its status. It may be reaped already."""
    if (known := process.poll()) is not None:
        return known
    code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    watch = ExitWatch(process, code.set_result)
    try:
        return await code
    finally:
        watch.close()


def end(process: Process) -> int | None:
    """SIGKILL a child of an agent that ends, and reap it; gives its status.

    One that the kernel holds is left to it: then None.
    """
    if (code := process.poll()) is None:
        pidfd = _killed(process)
        select.select([pidfd], [], [], CHILD_GONE)
        os.close(pidfd)
        code = process.poll()
    return code


def discard(process: Process) -> None:
    """SIGKILL a child, which is reaped when it is dead; the event loop goes on."""
    if process.poll() is None:
        os.close(_killed(process))
        ExitWatch(process, lambda _: None)


def _killed(process: Process) -> int:
    """A pidfd of this child, which has got SIGKILL."""
    pidfd = os.pidfd_open(process.pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return pidfd


class LastWords:
    """Reads what a child writes into a pipe, line by line; owns the descriptor until `close`.

    With a `label` each line that is not empty goes to the log, behind it.
    """

    def __init__(self, fd: int, label: str = "") -> None:
        self.last = "it said nothing"
        self._fd = fd
        self._label = label
        self._rest = b""
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def drain(self) -> str:
        """Read what lies in the pipe now; gives the last line."""
        while self._fd >= 0 and self._read():
            pass
        rest, self._rest = self._rest, b""
        self._take_line(rest)
        return self.last

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> bool:
        """Whether there was anything to read."""
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_TAIL:]
        for line in lines:
            self._take_line(line)
        return bool(chunk)

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        if text:
            self.last = text
            if self._label:
                log.info("%s: %s", self._label, text)


class ProcessGroups:
    """Kills what is left of process groups whose leader is dead, and watches it until it is gone.

    `emptied(pids)` is called from the event loop with the groups that are empty by now. While there
    is no descriptor to be had none counts as empty, because what can't be seen may still run.
    """

    def __init__(self, emptied: Callable[[Collection[int]], None]) -> None:
        self._emptied = emptied
        self._groups: set[int] = set()
        self._dying: dict[int, set[int]] = {}  # group -> pidfds
        self._looking = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def add(self, group: int) -> None:
        """Take the group of a leader that has just been reaped."""
        self._groups.add(group)
        self._look_soon()

    def _look_soon(self) -> None:
        """Look at the groups once for all the leaders that die in this turn."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look_at_groups)

    def _look_at_groups(self) -> None:
        self._looking = False
        left = [pid for pid in self._groups if pid not in self._dying and signal_group(pid, 0)]
        try:
            self._dying.update(self._watch(left))
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            log.warning("no descriptor is free to see what is left of the workers: trying again")
            self._looking = True
            asyncio.get_running_loop().call_later(_WATCH_AGAIN, self._look_at_groups)
            return
        empty = self._groups - self._dying.keys()
        self._groups -= empty
        self._emptied(empty)

    def _watch(self, groups: list[int]) -> dict[int, set[int]]:
        """{group: pidfds} of those in which something still runs."""
        members = kill_members(groups) if groups else {}
        for group, pidfds in members.items():
            for pidfd in pidfds:
                asyncio.get_running_loop().add_reader(pidfd, self._on_gone, group, pidfd)
        return {group: set(pidfds) for group, pidfds in members.items() if pidfds}

    def _on_gone(self, group: int, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._dying[group].remove(pidfd)
        if not self._dying[group]:
            del self._dying[group]
            self._look_soon()


def signal_group(pgid: int, number: int) -> bool:
    """Send a signal to all of the group; whether it has any process, zombies included."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a member that runs as another user; the rest got the signal
        pass
    return True


def members_of(group: int) -> list[int]:
    """The processes of a group; one pass over /proc."""
    return [pid for pid, pgid in _process_table() if pgid == group]


def kill_members(groups: Collection[int]) -> dict[int, list[int]]:
    """SIGKILL what still runs in these groups; gives {group: pidfds of what is dying}.

    One pass over /proc for all of them. The caller closes the pidfds. Raises OSError when there is
    no descriptor to be had.
    """
    found: dict[int, list[int]] = {group: [] for group in groups}
    try:
        _kill_members(found)
    except OSError:
        for pidfds in found.values():
            for pidfd in pidfds:
                os.close(pidfd)
        raise
    return found


def _kill_members(found: dict[int, list[int]]) -> None:
    for pid, group in _process_table():
        if group not in found:
            continue
        with contextlib.suppress(ProcessLookupError):  # gone meanwhile
            pidfd = os.pidfd_open(pid)
            if is_gone(pidfd):
                os.close(pidfd)
                continue
            found[group].append(pidfd)
            with contextlib.suppress(PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to every process with this mark; gives their pidfds. In a thread only."""
    found = [pidfd for pid in pids() if (pidfd := open_if(pid, lambda it: marked(it, mark))) >= 0]
    for pidfd in found:
        kill(pidfd)
    return found


def marked(pid: int, mark: str) -> bool:
    """Whether this process has this mark. In a thread only."""
    return environment(pid, {MARK}).get(MARK) == mark


def open_if(pid: int, wanted: Callable[[int], object]) -> int:
    """A pidfd of this process if it is `wanted` and runs, else -1; its number may come again."""
    if not wanted(pid):
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    if wanted(pid) and not is_gone(pidfd):
        return pidfd
    os.close(pidfd)
    return -1


def kill(pidfd: int) -> None:
    """SIGKILL, if it is there and this user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def gone(pidfds: Collection[int], timeout: float | None) -> bool:
    """Wait until all of these processes have ended; False if some have not after `timeout` s."""
    loop = asyncio.get_running_loop()
    ends = []
    for pidfd in pidfds:
        ends.append(loop.create_future())
        loop.add_reader(pidfd, _tell_end, pidfd, ends[-1])
    try:
        return not ends or not (await asyncio.wait(ends, timeout=timeout))[1]
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)


def _tell_end(pidfd: int, end: asyncio.Future[None]) -> None:
    asyncio.get_running_loop().remove_reader(pidfd)
    end.set_result(None)


def is_gone(pidfd: int) -> bool:
    """Whether the process has ended, with all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(frozen=True, slots=True)
class Stat:
    """A process as the kernel shows it; `started` is in its clock's ticks since the boot."""

    name: str
    state: str
    parent: int
    group: int
    started: int


def stat(pid: int) -> Stat | None:
    """What is known of a process; None if it is gone, or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return None
    # "pid (name) state ppid pgrp ...": the name may hold anything, spaces and brackets
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split(maxsplit=20)
    name = text[begin + 1 : end].decode(errors="replace")
    return Stat(name, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[19]))


def environment(pid: int, names: Collection[str]) -> dict[str, str]:
    """Those of these variables that a process of this user had when it began; {} if it is gone.

    In a thread only: the kernel makes readers wait for a process that it holds at a bad moment.
    """
    folder = Path(f"/proc/{pid}")
    try:
        own = folder.stat().st_uid == os.geteuid()
        text = (folder / "environ").read_bytes() if own else b""
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return {}  # gone meanwhile, or hidden
    if not any(name.encode() in text for name in names):  # most processes: there may be thousands
        return {}
    items = text.decode(errors="surrogateescape").split("\0")
    pairs = (item.partition("=") for item in items)
    return {name: value for name, _, value in pairs if name in names}


def pids() -> Iterator[int]:
    """Every process that is to be seen."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _process_table() -> Iterator[tuple[int, int]]:
    """(pid, process group) of every process that is to be seen."""
    for pid in pids():
        if seen := stat(pid):
            yield pid, seen.group
