"""What is measured while the jobs come and go, and tables of that."""

import math
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

LAG = 0.1  # seconds, the goal
FLAT = 0.01  # of the mean, a minute
LIFE = 16e3  # bytes that a process may keep of an agent that came and went
LONG = 5  # minutes; a slope of less says little


@dataclass(frozen=True)
class Sample:
    """What there is at one time; memory is resident, sizes are in bytes."""

    at: float
    etcd_memory: float
    agents_memory: float
    keys: float
    leases: float
    database: float
    database_used: float

    @classmethod
    def take(cls, etcd: int, metrics_port: int, agents: Iterable[int]) -> "Sample":
        """From /proc and from etcd's own metrics."""
        address = f"http://127.0.0.1:{metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        values = {x.rpartition(" ")[0]: x.rpartition(" ")[2] for x in lines if x[0] != "#"}
        return cls(
            at=time.monotonic(),
            etcd_memory=memory(etcd),
            agents_memory=sum(memory(pid) for pid in agents),
            keys=float(values["etcd_debugging_mvcc_keys_total"]),
            leases=float(values["etcd_debugging_lease_granted_total"])
            - float(values["etcd_debugging_lease_revoked_total"]),
            database=float(values["etcd_mvcc_db_total_size_in_bytes"]),
            database_used=float(values["etcd_mvcc_db_total_size_in_use_in_bytes"]),
        )


def memory(pid: int) -> float:
    """A process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return float(line.split()[1]) * 1024


@dataclass(frozen=True)
class Course:
    """How one thing went: first, last and largest value, and its slope a minute."""

    first: float
    last: float
    most: float
    slope: float

    @classmethod
    def of(cls, samples: Sequence[Sample], name: str) -> "Course":
        values = [getattr(sample, name) for sample in samples]
        times = [sample.at / 60 for sample in samples]
        x, y = sum(times) / len(times), sum(values) / len(values)
        spread = sum((t - x) ** 2 for t in times)
        slope = sum((t - x) * (v - y) for t, v in zip(times, values, strict=True))
        return cls(values[0], values[-1], max(values), slope / spread if spread else 0.0)

    @property
    def share(self) -> float:
        """The slope as a share of the middle value."""
        middle = (self.first + self.last) / 2
        return self.slope / middle if middle else 0.0


def courses(samples: Sequence[Sample]) -> dict[str, Course]:
    """Of everything that is sampled."""
    return {f.name: Course.of(samples, f.name) for f in fields(Sample) if f.name != "at"}


def table(found: dict[str, Course]) -> Table:
    """A row for each."""
    result = Table(title="while jobs and agents come and go, after the warm-up")
    for name in ("", "first", "last", "most", "slope a minute", ""):
        result.add_column(name, justify="right" if name else "left")
    for name, course in found.items():
        scale, unit = (1.0, "") if name in ("keys", "leases") else (1e6, " MB")
        cells = [f"{v / scale:.1f}{unit}" for v in (course.first, course.last, course.most)]
        slope = f"{course.slope / scale:+.2f}{unit}"
        result.add_row(name.replace("_", " "), *cells, slope, f"{course.share:+.1%}")
    return result


def distribution(values: Sequence[float]) -> dict[str, float]:
    """How many, and in milliseconds what half, 99 % and all of them are below."""
    ordered = sorted(values) or [math.nan]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    found = {
        name: 1000 * ordered[min(last, int(share * len(ordered)))] for name, share in shares.items()
    }
    return {"count": len(values), **found}


def late(values: Sequence[float]) -> int:
    """How many of these lags are above the goal."""
    return sum(value > LAG for value in values)


def times(rows: dict[str, dict[str, float]]) -> Table:
    """A row for each distribution."""
    result = Table(title="times")
    for name in ("", "count", "p50", "p99", "max"):
        result.add_column(name, justify="right" if name else "left")
    for name, of in rows.items():
        cells = [f"{of[share]:.1f} ms" for share in ("p50", "p99", "max")]
        result.add_row(name, str(of["count"]), *cells)
    return result


def missed(found: dict[str, Any]) -> list[str]:
    """The goals that are not reached."""
    said = []
    if found["late"]:
        said.append(f"{found['late']} times a watch lag above {LAG * 1000:.0f} ms")
    if found["minutes"] >= LONG and found["life"] > LIFE:
        said.append(f"{found['life'] / 1e3:.0f} kB kept of each agent that came, goal {LIFE / 1e3}")
    for name in ("etcd_memory", "keys", "leases", "database"):
        share = Course(**found["courses"][name]).share
        if found["minutes"] >= LONG and share > FLAT:
            said.append(f"{name} grows by {share:.1%} a minute, goal {FLAT:.0%}")
    for what, count in found["left"].items():
        if count:
            said.append(f"{count} {what} left when all jobs had ended")
    return said
