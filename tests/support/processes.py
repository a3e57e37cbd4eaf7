"""Processes, found by a mark in their environment: what they do and cost, and waiting for that.

Children inherit the mark: a node is an agent with everything that descends from it, in whatever
session or process group.
"""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

MARK = "E2E_MARK"
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100

T = TypeVar("T")


def marked(mark: str) -> list[int]:
    """Live processes with this mark, a zombie is none."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if any(e.startswith(wanted) for e in environment.split(b"\0")):
                found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    """What a process runs, for a person to read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "gone"


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def resident(pid: int) -> float:
    """Resident memory in MB (10^6 bytes), what is shared included."""
    return _field(Path(f"/proc/{pid}/status"), "VmRSS:")


def proportional(pids: Iterable[int]) -> float:
    """Memory in MB; a page that n processes of the machine share counts 1/n for each."""
    return sum(_field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") for pid in pids)


def _field(path: Path, name: str) -> float:
    lines = path.read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(name)]
    return int(kilobytes) * 1024 / 1e6


def cpu(groups: list[list[int]], seconds: float) -> list[float]:
    """Percent of a core that each group of processes takes over the coming stretch of time."""
    before, start = [sum(map(_cpu_seconds, pids)) for pids in groups], time.monotonic()
    select.poll().poll(seconds * 1000)  # nothing to wait for but time itself
    after, took = [sum(map(_cpu_seconds, pids)) for pids in groups], time.monotonic() - start
    return [100 * (end - begin) / took for begin, end in zip(before, after, strict=True)]


def _cpu_seconds(pid: int) -> float:
    """Of all threads; schedstat counts nanoseconds, stat ticks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Changes:
    """Wakes up when a file in a directory changes or one of some processes ends."""

    def __init__(self, directory: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._poll = select.poll()
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        what = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE
        if self._libc.inotify_add_watch(self._inotify, os.fsencode(directory), what) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(directory))
        self._poll.register(self._inotify, select.POLLIN)
        self._pidfds: list[int] = []

    def follow(self, pid: int) -> None:
        """Wake up, once, when this process ends too."""
        self._pidfds.append(os.pidfd_open(pid))
        self._poll.register(self._pidfds[-1], select.POLLIN)

    def wait(self, until: Callable[[], T | None], seconds: float) -> T | None:
        """The first true value of `until`; None: too late.

        It is asked again after each change, and each second, since it may ask of more than that.
        """
        deadline = time.monotonic() + seconds
        while not (value := until()):
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for fd, _ in self._poll.poll(min(left, 1.0) * 1000):
                if fd == self._inotify:
                    os.read(fd, 1 << 16)
                else:
                    self._poll.unregister(fd)
        return value

    def close(self) -> None:
        for fd in (self._inotify, *self._pidfds):
            os.close(fd)
