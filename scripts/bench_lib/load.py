"""Many jobs on one etcd, whose agents and runs come and go: what grows, and how late news come.

    scripts/bench load --jobs 100 --agents 3 --minutes 10 --json load.json

Each job changes every --period seconds: an agent leaves, crashes, fails or joins. After some
changes it ends, what it leaves behind is removed, and another begins. Exit code 1 when a goal is
missed.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elastic_etcd.core.schema import PREFIX
from elastic_etcd.core.txn import Delete, Put, Txn
from elastic_etcd.etcd.client import Client
from tests.support.etcd import EtcdServer
from tests.support.processes import resident

from .figures import grid
from .simulated import Processes, Setup, SimulatedJob, Told

# What a user should set, with a longer retention: without it etcd keeps every revision on disk, and
# (before 3.6) the last 100,000 writes in memory.
BOUNDED = (
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=1m",
    "--snapshot-count=10000",
)
CHANGES = 4  # of a job, on average
BEGINNING = 0.3  # of the time: what is sampled then is not told
PROBE = "/probe"
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
    def take(cls, etcd: EtcdServer, agents: Iterable[int]) -> "Sample":
        """From /proc and from etcd's own metrics."""
        assert etcd.process
        values = etcd.metrics()
        return cls(
            at=time.monotonic(),
            etcd_memory=1e6 * resident(etcd.process.pid),
            agents_memory=sum(1e6 * resident(pid) for pid in agents),
            keys=values["etcd_debugging_mvcc_keys_total"],
            leases=values["etcd_debugging_lease_granted_total"]
            - values["etcd_debugging_lease_revoked_total"],
            database=values["etcd_mvcc_db_total_size_in_bytes"],
            database_used=values["etcd_mvcc_db_total_size_in_use_in_bytes"],
        )


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


class Job(SimulatedJob):
    """One run of a job: `begin`, some `change`s, `finish`."""

    def __init__(self, processes: Processes, name: str, agents: int) -> None:
        super().__init__(processes, name)
        self.live: set[int] = set()
        self._agents = agents
        self._next = agents
        self._final: dict[int, float] = {}

    async def begin(self) -> None:
        """All agents start and form the first world."""
        self.live = set(range(self._agents))
        self.command("start", self.live)
        await self._world(time.monotonic())

    async def change(self, chance: random.Random) -> tuple[str, float]:
        """One agent comes, goes or fails; which, and the seconds to the next final world."""
        kinds = ["leave", "kill", "fail"] if len(self.live) > 1 else ["fail"]
        what = "start" if len(self.live) < self._agents else chance.choice(kinds)
        number = chance.choice(sorted(self.live))
        if what == "start":
            number, self._next = self._next, self._next + 1
            self.live.add(number)
        elif what != "fail":
            self.live.remove(number)
        began = time.monotonic()
        self.command(what, [number])
        await self._world(began)
        return what, max(self._final[n] for n in self.live) - began

    async def finish(self) -> None:
        """All workers exit 0, the run is over and every agent ends."""
        self.command("finish", self.live)
        await self.until(lambda: not self.live, "the end")
        del self._processes.heard[self.name]

    async def _world(self, since: float) -> None:
        def whole() -> bool:
            return all(self._final.get(n, 0) > since for n in self.live)

        await self.until(whole, "a world")

    def _heard(self, told: Told) -> None:
        if told.what == "final":
            self._final[told.number] = told.at
        elif told.what == "left":
            self.live.discard(told.number)
        super()._heard(told)


class Load:
    """Jobs that come and go on `etcd` until `stop` is set."""

    def __init__(self, args: argparse.Namespace, etcd: EtcdServer, client: Client) -> None:
        self.counts: Counter[str] = Counter()
        self.changes: dict[str, list[float]] = {}
        self.puts: list[float] = []
        self.samples: list[Sample] = []
        self.stop = asyncio.Event()
        self._args, self._etcd, self._client = args, etcd, client
        self._answered: dict[str, float] = {}
        self._seen: list[Told] = []

    async def run(self, processes: Processes) -> None:
        """For the minutes that were asked for, and until the last job has ended."""
        processes.heard[""] = self._seen.append
        async with asyncio.TaskGroup() as group:
            for number in range(self._args.jobs):
                group.create_task(self._slot(processes, number))
            group.create_task(self._probe())
            group.create_task(self._sample(processes))
            await asyncio.sleep(self._args.minutes * 60)
            self.stop.set()

    def lags(self, pids: Sequence[int]) -> list[float]:
        """From a Txn's answer until its event is seen in each of these processes."""
        seen = [t for t in self._seen if t.number in pids and t.detail in self._answered]
        return [max(0.0, told.at - self._answered[told.detail]) for told in seen]

    async def _slot(self, processes: Processes, number: int) -> None:
        """One job after the other."""
        chance = random.Random(f"{self._args.seed} {number}")  # noqa: S311 - chance, no secret
        await self._pause(self._args.period * number / self._args.jobs)
        while not self.stop.is_set():
            self.counts["jobs"] += 1
            job = Job(processes, f"load-{number}-{self.counts['jobs']}", self._args.agents)
            await job.begin()
            for _ in range(chance.randint(1, 2 * CHANGES - 1)):
                await self._pause(chance.expovariate(1 / self._args.period))
                if self.stop.is_set():
                    break
                what, seconds = await job.change(chance)
                self.counts[what] += 1
                self.changes.setdefault(what, []).append(seconds)
            await job.finish()
            await self._client.txn(Txn((), (Delete(f"{PREFIX}/{job.name}/", prefix=True),)))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stop.wait()

    async def _probe(self) -> None:
        """Write a key that every process watches, five times a second."""
        while not self.stop.is_set():
            value, began = str(len(self.puts)), time.monotonic()
            await self._client.txn(Txn((), (Put(PROBE, value),)))
            self._answered[value] = time.monotonic()
            self.puts.append(self._answered[value] - began)
            await self._pause(0.2)

    async def _sample(self, processes: Processes) -> None:
        assert self._etcd.process
        while not self.stop.is_set():
            if (code := self._etcd.process.poll()) is not None:
                raise RuntimeError(f"etcd exited {code}:\n{self._etcd.log.read_text()[-4000:]}")
            self.samples.append(await asyncio.to_thread(Sample.take, self._etcd, processes.pids))
            await self._pause(max(0.5, self._args.minutes * 60 / 200))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is told in the end."""
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder), arguments=BOUNDED)
        await etcd.start_async()
        try:
            setup = Setup(etcd.endpoint, args.agents, args.ttl, settle=1.0, probe=PROBE)
            processes = Processes(setup, args.processes)
            async with Client(etcd.config) as client, processes:
                load = Load(args, etcd, client)
                await load.run(processes)
                left = etcd.ctl("get", "--prefix", "--keys-only", PREFIX).split()
            leases = etcd.ctl("lease", "list").splitlines()[1:]
        finally:
            etcd.kill()
    lives = load.counts["start"] + load.counts["jobs"] * args.agents
    steady = [s for s in load.samples if s.at > load.samples[0].at + BEGINNING * args.minutes * 60]
    found = courses(steady)
    return {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg(),
        "jobs": args.jobs,
        "agents": args.agents,
        "minutes": args.minutes,
        "etcd": BOUNDED,
        "counts": dict(load.counts),
        "courses": {name: asdict(course) for name, course in found.items()},
        "life": found["agents_memory"].slope * args.minutes / lives,
        "lag": distribution(load.lags([processes.bystander])),
        "lag_of_agents": distribution(load.lags(processes.pids)),
        "late": late(load.lags([processes.bystander])),
        "put": distribution(load.puts),
        "changes": {name: distribution(found) for name, found in load.changes.items()},
        "left": {"keys": len(left), "leases": len(leases)},
    }


# --- tables


def courses(samples: Sequence[Sample]) -> dict[str, Course]:
    """Of everything that is sampled."""
    return {f.name: Course.of(samples, f.name) for f in fields(Sample) if f.name != "at"}


def table(found: dict[str, Course]) -> Table:
    """A row for each."""
    rows = []
    for name, course in found.items():
        scale, unit = (1.0, "") if name in ("keys", "leases") else (1e6, " MB")
        cells = [f"{v / scale:.1f}{unit}" for v in (course.first, course.last, course.most)]
        slope = f"{course.slope / scale:+.2f}{unit}"
        rows.append((name.replace("_", " "), *cells, slope, f"{course.share:+.1%}"))
    columns = ("", "first", "last", "most", "slope a minute", "")
    return grid("while jobs and agents come and go, but for the beginning", columns, rows)


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
    shares = ("p50", "p99", "max")
    cells = [
        (name, str(of["count"]), *(f"{of[share]:.1f} ms" for share in shares))
        for name, of in rows.items()
    ]
    return grid("times", ("", "count", *shares), cells)


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


# --- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--agents", type=int, default=3, help="of each job")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--period", type=float, default=30, help="seconds between a job's changes")
    parser.add_argument("--ttl", type=int, default=5, help="the leases', in seconds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    console = Console(width=110)
    found = asyncio.run(measure(args))
    counts = ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    console.print(f"{args.jobs} jobs of {args.agents} agents, {args.minutes:g} minutes: {counts}")
    console.print(table({name: Course(**of) for name, of in found["courses"].items()}))
    rows = {"watch lag": found["lag"], "beside agents": found["lag_of_agents"], "put": found["put"]}
    rows |= {f"{what} to final": of for what, of in found["changes"].items()}
    console.print(times(rows))
    console.print(f"kept of each agent that came, by its process: {found['life'] / 1e3:.1f} kB")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    said = missed(found)
    for line in said:
        console.print(f"missed: {line}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
