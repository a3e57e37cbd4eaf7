"""What processes cost: memory and processor time, from /proc."""

import time
from collections.abc import Iterable
from pathlib import Path
from select import poll


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
    poll().poll(seconds * 1000)  # nothing to wait for but time itself
    after, took = [sum(map(_cpu_seconds, pids)) for pids in groups], time.monotonic() - start
    return [100 * (end - begin) / took for begin, end in zip(before, after, strict=True)]


def _cpu_seconds(pid: int) -> float:
    """Of all threads; schedstat counts nanoseconds, stat ticks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
