"""What a node's machine takes away from an agent while it lives, for a while or for good.

Nothing here is a signal: those are in nemesis.py. A function gives what ends the fault, if that
is not over at once.
"""

import itertools
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.support.processes import marked

PIDS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))  # version 1, version 2
MEMORY = "elastic_etcd_memory-"
SHORTAGES = itertools.count(1)
MADE: set[Path] = set()  # cgroups that are there


def empty(folder: Path) -> None:
    """Remove all that is in it, as who cleans a machine does."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_memory(pid: int) -> None:
    """Remove the directory for memory checkpoints on which this agent has a lock."""
    for path in _held(pid).values():
        if Path(path).name.startswith(MEMORY):
            shutil.rmtree(path, ignore_errors=True)


def no_process(mark: str) -> tuple[str, Callable[[], None] | None]:
    """Let the processes of a node start no other and no thread; what was done, in words."""
    folder = _cgroup()
    if folder is None:
        return ", left out: it takes root and a cgroup with pids.max", None
    while _move(set(marked(mark)) - _in(folder), folder):
        continue
    (folder / "pids.max").write_text("0")
    return "", lambda: _let_go(folder)


def no_descriptor(pid: int) -> Callable[[], None]:
    """Let a process open nothing more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = next(fd for fd in itertools.count() if fd not in _held(pid))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))

    def give_back() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    return give_back


def reset_links(pid: int, agents: Iterable[int]) -> str:
    """Reset all connections between this agent and the others; how many, in words."""
    if not shutil.which("ss"):
        return "left out: it takes ss, of iproute2"
    ends = {ports: owner for owner in {pid, *agents} for ports in _connections(owner)}
    links = [(here, there) for (here, there), owner in ends.items() if owner == pid]
    links = [(here, there) for here, there in links if (there, here) in ends]
    for here, there in links:
        which = f"sport = :{here} and dport = :{there}"
        subprocess.run(["ss", "-KtnH", which], check=True, capture_output=True)
    left = {*_connections(pid)} & {*links}
    return f"{len(links)} of them" if not left else "left out: it takes root, and a kernel that can"


def _connections(pid: int) -> Iterator[tuple[int, int]]:
    """The local and the remote port of each that this process has open."""
    listed = subprocess.run(
        ["ss", "-tnpH", "state", "established"], check=True, capture_output=True, text=True
    )
    for line in listed.stdout.splitlines():
        if f"pid={pid}," in line:
            here, there = re.findall(r":(\d+)(?=\s)", line)[:2]
            yield int(here), int(there)


def _held(pid: int) -> dict[int, str]:
    """The descriptors of a process, and what they lead to."""
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found[int(entry.name)] = str(entry.readlink())
    return found


def _cgroup() -> Path | None:
    """Make one in which processes are counted."""
    for root in PIDS:
        folder = root / f"elastic_etcd-chaos-{os.getpid()}-{next(SHORTAGES)}"
        with suppress(OSError):
            folder.mkdir()
            if (folder / "pids.max").exists():
                MADE.add(folder)
                return folder
            folder.rmdir()
    return None


def _in(folder: Path) -> set[int]:
    return {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}


def _move(pids: Iterable[int], folder: Path) -> int:
    """Have these processes in a cgroup; how many of them there are still."""
    moved = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))
            moved += 1
    return moved


def _let_go(folder: Path) -> None:
    """Have its processes where this one is, and remove the cgroup."""
    (folder / "pids.max").write_text("max")
    controller = "pids" if folder.parent == PIDS[0] else ""
    fields = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    (own,) = (path for _, name, path in fields if name == controller)
    while folder in MADE:
        _move(_in(folder), folder.parent / own.lstrip("/"))
        with suppress(OSError):  # one that ends just now keeps it for a moment
            folder.rmdir()
            MADE.discard(folder)


def end_shortages() -> None:
    """End those that a burst has not come to end."""
    for folder in [*MADE]:
        _let_go(folder)
