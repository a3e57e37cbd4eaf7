"""What an agent costs: resident memory and processor time, from /proc."""

from pathlib import Path


def resident(pid: int) -> float:
    """VmRSS in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kilobytes) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    """Time on a processor so far, of all threads; schedstat counts nanoseconds, stat ticks."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
