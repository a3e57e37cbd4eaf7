"""How much memory, and how many processes, are left: of the machine, and within its cgroups.

It errs on the side of more: a file that can't be read is no limit, and memory that the kernel can
take back or swap out is free.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = (  # the limit and what is used, in version 2 and in version 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
# The same of swap; in version 1 of swap and the memory together.
_SWAP = ("memory.swap.max", "memory.swap.current")
_BOTH = ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")
_KILLS = ("memory.events", "memory.oom_control")  # in version 2 and in version 1
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


def free_processes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """How many more processes and threads the cgroups around this process allow."""
    folders = _folders("pids", proc, cgroups)
    allowed = (_allowed(folder, "pids.max", "pids.current") for folder in folders)
    return min(allowed, default=UNKNOWN.size)


def oom_kills() -> int:
    """How many processes of this one's cgroup the kernel has killed for want of memory.

    0 if it does not say. In a container the cgroup may be the root of what is mounted there.
    """
    for folder in _folders("memory", _PROC, _CGROUPS):
        for name in _KILLS:
            with suppress(OSError, IndexError):
                return int(re.findall(r"(?m)^oom_kill (\d+)$", (folder / name).read_text())[0])
    return 0


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
    for folder in _folders("memory", proc, cgroups):
        for limit, used, prefix in _FILES:
            with suppress(OSError, ValueError):  # not there, or "max": no limit
                most, left = _left(folder, limit, used)
                left += _reclaimable(folder, prefix)
                both = _allowed(folder, *_BOTH) + _reclaimable(folder, prefix)
                free = min(left + min(swap, _allowed(folder, *_SWAP)), both)
                yield Free(max(0, free), f"the {most >> 20} MiB that {folder / limit} allows")


def _left(folder: Path, limit: str, used: str) -> tuple[int, int]:
    most = int((folder / limit).read_text())
    return most, most - int((folder / used).read_text())


def _allowed(folder: Path, limit: str, used: str) -> int:
    with suppress(OSError, ValueError):
        return _left(folder, limit, used)[1]
    return UNKNOWN.size


def _folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The cgroups around this process that this controller limits, the innermost first."""
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = cgroups / controllers
                folder = root / path.lstrip("/")
                yield folder
                yield from (each for each in folder.parents if each.is_relative_to(root))


def _reclaimable(folder: Path, prefix: str) -> int:
    """Bytes that the kernel can take back: files that are cached only, and its own caches."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(stat.get(f"{prefix}{kind}", 0)) for kind in _RECLAIMABLE)
