"""Starts children that die with this process, and reads what they say last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from elastic_etcd.system.exits import discard

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_TRAMPOLINE = str(Path(__file__).with_name("trampoline.py"))
_TAIL = 1 << 13  # bytes of a line that are kept

log = logging.getLogger(__name__)


class Given(TypedDict):
    """The descriptors of a child, and whether it leads a session."""

    stdout: int
    stderr: int
    stdin: NotRequired[int]  # /dev/null if nothing else is said
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
        [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), "--", *command],
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

    threading.Thread(target=run, name="starter", daemon=True).start()
    return await started


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
