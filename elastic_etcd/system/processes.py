"""Process groups: signalled, and killed with all that is in them."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from elastic_etcd.system.pidfds import NO_DESCRIPTOR, OPEN_AGAIN, kill, open_if
from elastic_etcd.system.procfs import pids, stat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

log = logging.getLogger(__name__)


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
