"""Other processes: as /proc shows them, held by their pidfds, and killed with all of their group.

A process may end between two reads of /proc, and its number may belong to another process by then.
Such a number is never used: a process is opened as a pidfd, which is readable when the process is
gone, and then looked at once more (`open_if`). Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_etcd.system import kernel
from elastic_etcd.system.kernel import NO_DESCRIPTOR, OPEN_AGAIN
from elastic_etcd.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_LOOK_AGAIN = 0.02  # seconds; at a process that is no child, where there are no pidfds
_DEAD = "ZX"  # states of a process

log = logging.getLogger(__name__)


# --- in /proc ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stat:
    """A process as the kernel shows it."""

    name: str
    state: str
    parent: int
    group: int
    threads: int
    started: int  # in ticks of the kernel's clock since the boot

    @property
    def is_dead(self) -> bool:
        """Whether all of its threads have ended; it may be left to be reaped."""
        return self.state in _DEAD and self.threads <= 1


def stat(pid: int) -> Stat | None:
    """How the kernel shows a process; None if it is gone, or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    # "pid (name) state ppid pgrp ...": the name may hold anything, spaces and brackets
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split(maxsplit=20)
    name = text[begin + 1 : end].decode(errors="replace")
    parent, group, threads, started = (int(fields[number]) for number in (1, 2, 17, 19))
    return Stat(name, fields[0].decode(), parent, group, threads, started)


def environment(pid: int, names: Collection[str]) -> dict[str, str]:
    """Those of these variables that a process of this user had when it began; {} if it is gone.

    Call it in a thread: the kernel makes readers wait for a process that it holds at a bad moment.
    """
    folder = Path(f"/proc/{pid}")
    try:
        own = folder.stat().st_uid == os.geteuid()
        text = (folder / "environ").read_bytes() if own else b""
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return {}  # gone meanwhile, or hidden
    if not any(name.encode() in text for name in names):  # most processes: there may be thousands
        return {}
    items = text.decode(errors="surrogateescape").split("\0")
    pairs = (item.partition("=") for item in items)
    return {name: value for name, _, value in pairs if name in names}


def pids() -> Iterator[int]:
    """The number of every process that this one may see."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


# --- by their pidfds --------------------------------------------------------------------


_stand_ins: dict[int, tuple[int, int]] = {}  # descriptor -> pid and start, without pidfds


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable when this process has ended. Raises OSError.

    It is a pipe if the kernel refuses pidfds: a thread holds the other end until then.
    """
    if kernel.has_pidfds():
        return kernel.pidfd_open(pid)
    seen = stat(pid)
    if seen is None:
        raise ProcessLookupError(pid)
    ended, lives = os.pipe()
    if seen.is_dead:
        os.close(lives)
    else:
        try:
            start_thread(functools.partial(_wait_for_end, pid, seen.started, lives), "pidfd")
        except BlockingIOError as error:
            os.close(ended)
            os.close(lives)
            raise OSError(NO_DESCRIPTOR[0], error.strerror) from None
    _stand_ins[ended] = pid, seen.started
    return ended


def signal_pidfd(pidfd: int, number: int) -> None:
    """Send a signal to the process of a descriptor of `open_pidfd`. Raises OSError."""
    if kernel.has_pidfds():
        kernel.pidfd_send_signal(pidfd, number)
        return
    pid, started = _stand_ins[pidfd]
    seen = stat(pid)
    if seen is None or seen.started != started:
        raise ProcessLookupError(pid)
    os.kill(pid, number)


def _wait_for_end(pid: int, started: int, lives: int) -> None:
    """Close `lives` when the process has ended; earlier if nobody has the other end any more."""
    poll = select.poll()
    poll.register(lives, 0)  # what is always reported: an error, when the other end is closed
    try:
        with contextlib.suppress(ChildProcessError):  # it is no child, or was reaped
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            return
        while not poll.poll(1000 * _LOOK_AGAIN):
            with contextlib.suppress(OSError):  # no descriptor is free to look now
                seen = stat(pid)
                if seen is None or seen.started != started or seen.is_dead:
                    return
    finally:
        os.close(lives)


def open_if(pid: int, wanted: Callable[[int], object]) -> int:
    """A pidfd of this process if it is `wanted` and runs, else -1; its number may come again."""
    if not wanted(pid):
        return -1
    try:
        pidfd = open_pidfd(pid)
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
        signal_pidfd(pidfd, signal.SIGKILL)


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
    return wait_until_gone(pidfd, 0)


def wait_until_gone(pidfd: int, timeout: float) -> bool:
    """Wait for the process's end, not longer than `timeout` s; whether it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


# --- in their groups --------------------------------------------------------------------


class ProcessGroups:
    """Kills what is left of process groups whose leader is dead, and watches it until it is gone.

    `emptied(pids)` is called from the event loop with the groups that are empty by now. While no
    descriptor is free none counts as empty, because what can't be seen may still run.
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
            if error.errno not in NO_DESCRIPTOR:
                raise
            log.warning("no descriptor is free to see what is left of the workers: trying again")
            self._looking = True
            asyncio.get_running_loop().call_later(OPEN_AGAIN, self._look_at_groups)
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
    return [pid for pid in pids() if _group_of(pid) == group]


def kill_members(groups: Collection[int]) -> dict[int, list[int]]:
    """SIGKILL what still runs in these groups; gives {group: pidfds of what is dying}.

    It passes over /proc once for all of them. The caller closes the pidfds. Raises OSError when no
    descriptor is free.
    """
    found: dict[int, list[int]] = {group: [] for group in groups}
    try:
        for pid in pids():
            group = _group_of(pid)
            if group in found and (pidfd := open_if(pid, lambda it: _group_of(it) in found)) >= 0:
                found[group].append(pidfd)
                kill(pidfd)
    except OSError:
        for pidfds in found.values():
            for pidfd in pidfds:
                os.close(pidfd)
        raise
    return found


def _group_of(pid: int) -> int:
    """0 when the process is gone; no group has that number."""
    seen = stat(pid)
    return seen.group if seen else 0
