"""How much memory is free: of the machine, and within the limit of each cgroup around it.

It errs on the side of more: a file that can't be read is no limit, and memory that the kernel can
take back or swap out is free.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from elastic_etcd.core.words import shown
from elastic_etcd.errors import WrongHere

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (  # the limit and what is used, in version 2 and in version 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
# The same of swap; in version 1 of swap and the memory together.
_SWAP = ("memory.swap.max", "memory.swap.current")
_BOTH = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


class Free(NamedTuple):
    """An amount of free memory."""

    size: int  # bytes
    of: str  # the memory, for a person


UNKNOWN = Free(1 << 62, "a memory whose size is not known")


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Free:
    """The memory that can be had without being killed for it."""
    memory = _meminfo(proc)
    swap = memory.get("SwapFree", 0)
    found = list(_within_limits(proc, cgroups, swap))
    if "MemAvailable" in memory:
        found.append(Free(memory["MemAvailable"] + swap, "the machine's memory"))
    return min(found, default=UNKNOWN, key=lambda free: free.size)


def check_memory(size: int, lacking: int) -> None:
    """Raise UsageError, with the figures, when `lacking` more bytes for two snapshots are not free.

    size: of one snapshot, in bytes.
    """
    if shortage := shortage_of(lacking):
        two = f"a snapshot of this state takes {shown(size)}, and there are two of them"
        raise WrongHere(f"{two}: {shortage}. Give this node more, or keep less in the state")


def shortage_of(size: int) -> str:
    """The figures, if so many bytes are not free; "" if they are."""
    free = free_memory()
    if size <= free.size:
        return ""
    needed = f"{shown(size)} more of host memory are needed"
    return f"{needed}, {shown(free.size)} of {free.of} are free"


def _meminfo(proc: Path) -> dict[str, int]:
    """The lines of /proc/meminfo, in bytes; none where there is no such file."""
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        return {name.rstrip(":"): int(number) * 1024 for name, number, *_ in lines}
    return {}


def _within_limits(proc: Path, cgroups: Path, swap: int) -> Iterator[Free]:
    """The free memory of each cgroup around this process, as far as they are seen.

    `swap` bytes of the machine's could be had, but for the cgroup's own limit.
    """
    for folder in _folders(proc, cgroups):
        for limit, used, prefix in _FILES:
            with suppress(OSError, ValueError):  # not there, or "max": no limit
                most, left = _left(folder, limit, used)
                left += _reclaimable(folder, prefix)
                both = _allowed(folder, *_BOTH) + _reclaimable(folder, prefix)
                free = min(left + min(swap, _allowed(folder, *_SWAP)), both)
                yield Free(max(0, free), f"the {shown(most)} that {folder / limit} allows")


def _left(folder: Path, limit: str, used: str) -> tuple[int, int]:
    most = int((folder / limit).read_text())
    return most, most - int((folder / used).read_text())


def _allowed(folder: Path, limit: str, used: str) -> int:
    with suppress(OSError, ValueError):
        return _left(folder, limit, used)[1]
    return UNKNOWN.size


def _folders(proc: Path, cgroups: Path) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                root = cgroups / controllers
                folder = root / path.lstrip("/")
                yield folder
                yield from (each for each in folder.parents if each.is_relative_to(root))


def _reclaimable(folder: Path, prefix: str) -> int:
    """Bytes that the kernel can take back: files that are cached only, and its own caches."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"{prefix}{kind}", 0)) for kind in _RECLAIMABLE)
