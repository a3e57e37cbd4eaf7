"""Other processes by their pidfd, which is readable when the process is gone.

A process id that belongs to another process by now is never used. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# No descriptor is free: nothing can be watched until something else is closed, and a process that
# can't be seen may still run. So it is tried again after so many seconds.
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
OPEN_AGAIN = 0.2


def open_if(pid: int, wanted: Callable[[int], object]) -> int:
    """A pidfd of this process if it is `wanted` and runs, else -1; its number may come again."""
    if not wanted(pid):
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    keep = False
    try:
        keep = bool(wanted(pid)) and not is_gone(pidfd)
    finally:
        if not keep:
            os.close(pidfd)
    return pidfd if keep else -1


def kill(pidfd: int) -> None:
    """SIGKILL, if it is there and this user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


async def gone(pidfds: Collection[int], timeout: float | None) -> bool:
    """Wait until all of these processes have ended; False if some have not after `timeout` s."""
    loop = asyncio.get_running_loop()
    ends = []

    def note_end(pidfd: int, ended: asyncio.Future[None]) -> None:
        loop.remove_reader(pidfd)
        ended.set_result(None)

    for pidfd in pidfds:
        ends.append(loop.create_future())
        loop.add_reader(pidfd, note_end, pidfd, ends[-1])
    try:
        return not ends or not (await asyncio.wait(ends, timeout=timeout))[1]
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)


def is_gone(pidfd: int) -> bool:
    """Whether the process has ended, with all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
