"""Children of this process: how they are started, read, awaited and ended, and what ends with whom.

A child dies with the process that starts it. Its exit is an event, and nothing is polled: a process
is gone when its pidfd is readable, even if nobody ever reaps it (in a container without an init,
orphans stay zombies for ever).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, Unpack

from elastic_etcd.system.kernel import (
    NO_DESCRIPTOR,
    OPEN_AGAIN,
    childrens_descriptor_limit,
    new_memfd,
)
from elastic_etcd.system.processes import open_pidfd, signal_group, signal_pidfd, wait_until_gone
from elastic_etcd.system.threads import start_thread
from elastic_etcd.times import CHILD_GONE, KILLED, NOTHING_FREE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

_TRAMPOLINE = str(Path(__file__).with_name("trampoline.py"))
# A dead child that is being debugged can't be reaped until the debugger has seen its end.
_REAP_AGAIN = 0.05
_TAIL = 1 << 13  # bytes of a line that are kept
_END_OF_OUTPUT = 1 << 16  # bytes of it

log = logging.getLogger(__name__)


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, or minus the signal; None while it runs."""


class Given(TypedDict):
    """The descriptors of a child, whether it leads a session, and where it begins."""

    stdout: int
    stderr: int
    stdin: NotRequired[int]  # /dev/null if nothing else is said
    pass_fds: NotRequired[Collection[int]]
    session: NotRequired[bool]
    cwd: NotRequired[Path]


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: int,
    stderr: int,
    stdin: int = subprocess.DEVNULL,
    pass_fds: Collection[int] = (),
    session: bool = False,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` as a child that dies with this process. Raises OSError.

    It has the limit of descriptors with which this process began. It leads a process group of its
    own, out of the reach of the terminal's Ctrl-C, or with `session` a session of its own.
    """
    limit = childrens_descriptor_limit()
    trampoline = [sys.executable, "-I", "-S", _TRAMPOLINE, f"{os.getpid()}", f"{limit}", "--"]
    if "pydevd" in sys.modules:  # an editor's debugger, which goes with a child but not with exec
        trampoline = []  # then the guardian is all that ends it with this process
    return subprocess.Popen(
        [*trampoline, *command],
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        bufsize=0,
        cwd=cwd,
        start_new_session=session,
        process_group=None if session else 0,
    )


async def start(
    command: Sequence[str], env: Mapping[str, str], **given: Unpack[Given]
) -> subprocess.Popen[bytes]:
    """As `spawn`, while the event loop goes on: the program may be on a disk that stands still.

    While no process is to be had, or no thread, it is tried again; raises OSError after that.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + NOTHING_FREE
    while True:
        try:
            return await _start(command, env, **given)
        except BlockingIOError as error:
            if loop.time() >= until:
                raise
            _Refusals.note(error)
        await asyncio.sleep(OPEN_AGAIN)


class _Refusals:
    """Told by one line, though many wait at once for a process or thread."""

    _told = -math.inf

    @classmethod
    def note(cls, error: OSError) -> None:
        if time.monotonic() > cls._told + NOTHING_FREE:
            cls._told = time.monotonic()
            log.warning(
                "no process or thread is to be had: %s: trying again for %.0f s; see `ulimit -u`, "
                "and the pids or tasks limit of the container or the service",
                *(error.strerror, NOTHING_FREE),
            )


async def _start(
    command: Sequence[str], env: Mapping[str, str], **given: Unpack[Given]
) -> subprocess.Popen[bytes]:
    """Start it once.

    The kernel ties the child to the thread that has started it, so that one stays as long as it.
    While it waits the others don't, from Python 3.11.4 on (python/cpython#104372).
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()

    def give(process: subprocess.Popen[bytes]) -> None:
        if started.done():  # who wanted it has gone
            discard(process)
        else:
            started.set_result(process)

    def fail(error: Exception) -> None:
        if not started.done():
            started.set_exception(error)

    def run() -> None:
        try:
            process = spawn(command, env, **given)
        except Exception as error:  # noqa: BLE001 - who waits gets it, whatever it is
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fail, error)
            return
        try:
            loop.call_soon_threadsafe(give, process)
        except RuntimeError:  # the loop is closed
            process.kill()
        with contextlib.suppress(ChildProcessError):  # reaped already
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    start_thread(run, "starter")
    return await started


class ExitWatch:
    """Calls `ended(code)` once, from the event loop, when the child has exited and is reaped.

    With `group` the child leads a process group, of which all else is killed then: before the
    child is reaped, so that its number can't be another group's. While no descriptor is free it
    tries again.
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
            self._pidfd = open_pidfd(self._process.pid)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            self._again = self._loop.call_later(OPEN_AGAIN, self._open)
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

    A child that the kernel holds is left to it: then None.
    """
    if (code := process.poll()) is None:
        pidfd = _killed(process)
        wait_until_gone(pidfd, CHILD_GONE)
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
    pidfd = open_pidfd(process.pid)
    signal_pidfd(pidfd, signal.SIGKILL)
    return pidfd


def run_briefly(command: Sequence[str], timeout: float, **variables: str) -> tuple[int | None, str]:
    """A command's exit code, None if it was killed after so many seconds, and its output's end.

    It writes into memory: the end of a pipe comes with the last process that it has left running.
    Raises OSError if no process is to be had.
    """
    code = None
    with os.fdopen(new_memfd("elastic_etcd-check"), "rb") as said:
        process = spawn(command, os.environ | variables, stdout=said.fileno(), stderr=said.fileno())
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
            try:
                process.wait(KILLED)
            except subprocess.TimeoutExpired:  # it hangs in a driver: nobody waits for its end
                process.returncode = -signal.SIGKILL
        said.seek(max(0, said.seek(0, os.SEEK_END) - _END_OF_OUTPUT))
        return code, said.read().decode(errors="replace")


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
