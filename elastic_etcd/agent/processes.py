"""Process groups through pidfds: who is left in one, without polling and without pid reuse.

Linux only. A process is gone when its pidfd is readable, even if nobody ever reaps it (in a
container without an init, orphans stay zombies for ever).
"""

import contextlib
import os
import select
import signal
from collections.abc import Collection, Iterator
from pathlib import Path


def signal_group(pgid: int, number: int) -> bool:
    """Whether the group has any process, zombies included; the signal is sent to all of it."""
    try:
        os.killpg(pgid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a member that runs as another user; the rest got the signal
        pass
    return True


def kill_members(groups: Collection[int]) -> dict[int, list[int]]:
    """SIGKILL what still runs in these groups: {group: pidfds of the processes that are dying}.

    One pass over /proc for all of them. The caller closes the pidfds.
    """
    found: dict[int, list[int]] = {group: [] for group in groups}
    for pid, group in _processes():
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
    return found


def is_gone(pidfd: int) -> bool:
    """Whether the process has ended, with all its threads."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                stat = (entry / "stat").read_bytes()
                # "pid (name) state ppid pgrp ...": the name may hold anything, spaces and brackets
                yield int(entry.name), int(stat[stat.rindex(b")") + 2 :].split(maxsplit=3)[2])
