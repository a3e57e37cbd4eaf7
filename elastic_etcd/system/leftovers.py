"""Finds and kills leftovers: processes that workers have started, and that left their groups.

A daemon has a session of its own, no parent that is known here, and none of its starter's
descriptors (subprocess closes them). It inherits its environment, so there is a mark in it, which
also says after an agent's death whose it was; Jenkins finds what a build leaves in the same way. A
process whose environment is another one, or was written over (setproctitle), is not found.

A tracker's service ends by itself, some time after its worker, and writes the rest out before.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.system.kernel import OPEN_AGAIN
from elastic_etcd.system.processes import (
    environment,
    gone,
    is_gone,
    kill,
    open_if,
    pids,
    stat,
)
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import LEFTOVERS, STUCK

# In the environment of an agent's workers, and of all that they start: which agent that is. Its
# guardian has it under another name, as that is to end by itself.
MARK, GUARDS = "ELASTIC_ETCD_AGENT", "ELASTIC_ETCD_GUARDS"
# Python's resource tracker, and that of torch's sharing strategy "file_system".
_REMOVERS = (b"from multiprocessing.resource_tracker import main;", b"torch_shm_manager\0")
# Accelerators: NVIDIA's, AMD's and Intel's, AWS's, Habana's, TPUs and Linux's own kind, Ascend's.
_DEVICES = (
    *("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/neuron", "/dev/hl", "/dev/accel", "/dev/vfio/"),
    *("/dev/davinci", "/dev/dxg"),
)
_NAMED = 5  # processes, in a line of the log

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """An agent, as its workers' environment names it."""

    pid: int
    started: int  # see `Stat`
    node: str
    job: str

    @classmethod
    def own(cls, node: str, job: str) -> Self:
        """This process's."""
        seen = stat(os.getpid())
        return cls(os.getpid(), seen.started if seen else 0, node, job)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The inverse of `str`; None for any other text."""
        pid, started, rest = [*text.split(":", 2), "", ""][:3]
        node, _, job = rest.rpartition("@")
        if not (pid.isdecimal() and started.isdecimal()):
            return None
        return cls(int(pid), int(started), node, job)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}:{self.node}@{self.job}"

    @property
    def lives(self) -> bool:
        """Whether that agent still runs."""
        seen = stat(self.pid)
        return seen is not None and seen.started == self.started and not seen.is_dead


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that was found, held by its pidfd."""

    pid: int
    pidfd: int
    name: str
    group: int
    has_device: bool
    guards: bool  # a guardian, which ends by itself

    def __str__(self) -> str:
        return f"{self.pid} ({self.name})"


async def end_leftovers(mark: Mark, generation: int) -> list[Leftover]:
    """SIGKILL to those with an accelerator, and wait for their end, however long the kernel takes.

    Gives the others, for `end_late`. Call it when the groups of a generation's workers are empty,
    and none is parked. Whatever then has the mark, and does not descend from this process, was left
    by a worker.
    """
    is_leftover = partial(_is_left, is_marked=partial(_is_marked, mark=str(mark)))
    while True:
        found = await _find(is_leftover)
        groups = {each.group for each in found if each.has_device}  # who started it may do so again
        if not groups:
            return found
        for each in found:
            if each.group not in groups:
                os.close(each.pidfd)
        await _end_with_warning([each for each in found if each.group in groups], generation)


async def end_late(mark: Mark, generation: int, found: Collection[Leftover]) -> None:
    """SIGKILL to those of `found` that do not end by themselves soon, and to what these started.

    When it is cancelled they are killed at once.
    """
    try:
        if await gone([each.pidfd for each in found], LEFTOVERS):
            return
        late = {each.pid for each in found if not is_gone(each.pidfd)}
        if left := await _find(partial(_descends, late, str(mark))):
            await _end_with_warning(left, generation)
    finally:
        for each in found:
            kill(each.pidfd)
            os.close(each.pidfd)


async def end_former_agents_leftovers(own: Mark, patience: float) -> None:
    """End all that a dead agent of this node and job has left, and wait for its guardian to end.

    Raises ElasticEtcdError when something is still there after `patience` seconds.
    """
    is_leftover = partial(_is_left, is_marked=partial(_is_former, own))
    found, names = await _find(is_leftover), ""
    try:
        async with asyncio.timeout(patience):
            while found:
                names = _names(found)
                log.info("waiting for what a former agent of this node left: %s", names)
                await _end(found, "a former agent")
                found = await _find(is_leftover)
    except TimeoutError:
        raise ElasticEtcdError(
            f"what a former agent of this node left is still there after {patience:g} s: {names} "
            "(a hung driver or file system?).\nWorkers would meet it at their devices: end it, or "
            "start the machine anew"
        ) from None


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to every process with this mark; gives their pidfds. Call it in a thread."""
    is_leftover = partial(_is_left, is_marked=partial(_is_marked, mark=mark))
    found = [pidfd for pid in pids() if (pidfd := open_if(pid, is_leftover)) >= 0]
    for pidfd in found:
        kill(pidfd)
    return found


def _descends(pids: Collection[int], mark: str, pid: int) -> bool:
    """Whether it is among `pids`, or was started by such a one and does not end by itself."""
    if not _is_marked(pid, mark) or _removes_and_ends(pid):
        return False
    return bool({pid, *_ancestors(pid)} & set(pids))


def _is_marked(pid: int, mark: str) -> bool:
    return environment(pid, {MARK}).get(MARK) == mark


def _is_left(pid: int, is_marked: Callable[[int], bool]) -> bool:
    """Whether it is marked, and is an orphan or descends from a marked one that is.

    Schedulers copy the environment to what a worker submits: that has the mark, too, and its first
    process is a scheduler's child. An orphan's parent is an ancestor of its agent: init, or a
    subreaper. This process and its ancestors may have the mark of the agent that submitted them.
    """
    if not is_marked(pid) or _removes_and_ends(pid):
        return False
    first, seen = pid, stat(pid)
    while seen and is_marked(seen.parent):
        first, seen = seen.parent, stat(seen.parent)
    ours = _ancestors(os.getpid())
    return seen is not None and first not in {os.getpid(), *ours} and seen.parent in ours


def _removes_and_ends(pid: int) -> bool:
    """Whether it removes what its process has left in /dev/shm, and ends then by itself."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(words in command for words in _REMOVERS)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and (seen := stat(pid)):
        pid = seen.parent
        found.add(pid)
    return found


def _is_former(own: Mark, pid: int) -> bool:
    """Whether an agent of the same node and job, which is dead, has started it."""
    found = environment(pid, {MARK, GUARDS})
    mark = Mark.parse(found.get(MARK) or found.get(GUARDS, ""))
    if mark is None or (mark.node, mark.job) != (own.node, own.job):
        return False
    return _pid_namespace(pid) == _pid_namespace(os.getpid()) and not mark.lives


def _pid_namespace(pid: int) -> str:
    """The pids of another one say nothing here."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:  # gone meanwhile
        return ""


def _has_device(pid: int) -> bool:
    """Whether it has an accelerator open, or its memory mapped; also if that can't be seen."""
    folder = Path(f"/proc/{pid}")
    try:
        maps = (folder / "maps").read_text(errors="replace")
        if any(f" {device}" in maps for device in _DEVICES):
            return True
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if str(link.readlink()).startswith(_DEVICES):
                    return True
    except PermissionError:
        return True
    except (FileNotFoundError, ProcessLookupError):  # it is gone
        pass
    return False


async def _find(wanted: Callable[[int], bool]) -> list[Leftover]:
    """Those that are `wanted`; none if the kernel does not say in time."""
    while True:
        try:
            return await in_thread(partial(_look_for, wanted), STUCK)
        except TimeoutError:
            log.warning("what workers have left can't be seen: /proc does not answer")
            return []
        except OSError as error:  # no descriptor is free, and what can't be seen may still run
            log.warning("what workers have left can't be seen: %s; trying again", error.strerror)
            await asyncio.sleep(OPEN_AGAIN)


def _look_for(wanted: Callable[[int], bool]) -> list[Leftover]:
    found: list[Leftover] = []
    with contextlib.ExitStack() as on_error:
        for pid in pids():
            if (pidfd := open_if(pid, wanted)) >= 0:
                on_error.callback(os.close, pidfd)
                seen = stat(pid)
                guards = bool(environment(pid, {GUARDS}))
                name, group = (seen.name, seen.group) if seen else ("?", 0)
                found.append(Leftover(pid, pidfd, name, group, _has_device(pid), guards))
        on_error.pop_all()
    return found


async def _end_with_warning(found: Collection[Leftover], generation: int) -> None:
    log.warning(
        "generation %d left processes in sessions of their own, which are killed; what is "
        "to be kept has to be started with %s empty: %s",
        *(generation, MARK, _names(found)),
    )
    await _end(found, f"generation {generation}")


async def _end(found: Collection[Leftover], whose: str) -> None:
    """Kill all but guardians, and wait until they are gone."""
    pidfds = [each.pidfd for each in found]
    try:
        for each in found:
            if not each.guards:
                kill(each.pidfd)
        if not await gone(pidfds, STUCK):
            left = _names([each for each in found if not is_gone(each.pidfd)])
            log.warning(
                "%s: still there %g s after SIGKILL, stuck in the kernel (a hung device or network "
                "file system?); this node waits for it: %s",
                *(whose, STUCK, left),
            )
            await gone(pidfds, None)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _names(found: Collection[Leftover]) -> str:
    named = [str(each) for each in found][:_NAMED]
    more = len(found) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more else [])])
