"""What is left of process groups whose leader is dead: killed, and watched until it is gone."""

import asyncio
import os
from collections.abc import Callable

from elastic_etcd.agent.processes import kill_members, signal_group
from elastic_etcd.agent.worker import Worker


class Leftovers:
    """The groups of dead workers. `changed()` comes from the loop whenever some have got empty."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._groups: dict[int, Worker] = {}
        self._dying: dict[int, set[int]] = {}  # group -> pidfds
        self._looking = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def ranks(self) -> list[int]:
        return [worker.spec.rank for worker in self._groups.values()]

    def add(self, worker: Worker) -> None:
        """A worker whose leader has been reaped just now."""
        self._groups[worker.pid] = worker
        self._look_soon()

    def _look_soon(self) -> None:
        """Look at the groups once for all the workers that die in this turn."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        left = [pid for pid in self._groups if pid not in self._dying and signal_group(pid, 0)]
        self._dying.update(self._watch(left))
        for pid in self._groups.keys() - self._dying.keys():
            self._groups.pop(pid).output.close()
        self._changed()

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
