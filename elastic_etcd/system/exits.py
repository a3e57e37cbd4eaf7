"""Children of this process: how the exit of one is awaited, and how one is ended at once.

An exit is an event, and nothing is polled: a process is gone when its pidfd is readable, even if
nobody ever reaps it (in a container without an init, orphans stay zombies for ever).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from typing import TYPE_CHECKING, Protocol

from elastic_etcd.system.pidfds import NO_DESCRIPTOR, OPEN_AGAIN
from elastic_etcd.system.processes import signal_group
from elastic_etcd.times import CHILD_GONE

if TYPE_CHECKING:
    from collections.abc import Callable

# A dead child that is being debugged can't be reaped until the debugger has seen its end.
_REAP_AGAIN = 0.05


class Process(Protocol):
    """A child of this process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, or minus the signal; None while it runs."""


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
            self._pidfd = os.pidfd_open(self._process.pid)
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
