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
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic_etcd.core.keys import PREFIX
from elastic_etcd.core.txn import Delete, Put, Txn
from elastic_etcd.etcd.client import Client
from tests.etcd.server import EtcdServer

from .load_agents import PROBE
from .load_fleet import Job, Processes, Told
from .load_samples import Course, Sample, courses, distribution, late, missed, table, times

# What a user should set, with a longer retention: without it etcd keeps every revision on disk, and
# (before 3.6) the last 100,000 writes in memory.
BOUNDED = (
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=1m",
    "--snapshot-count=10000",
)
CHANGES = 4  # of a job, on average
WARM = 0.3  # of the time, at the beginning


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
        processes.heard[""] = self._saw
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

    def _saw(self, told: Told) -> None:
        if told.what == "probe":
            self._seen.append(told)

    async def _sample(self, processes: Processes) -> None:
        assert self._etcd.process
        pid, port = self._etcd.process.pid, self._etcd.metrics_port
        while not self.stop.is_set():
            if (code := self._etcd.process.poll()) is not None:
                raise RuntimeError(f"etcd exited {code}:\n{self._etcd.log.read_text()[-4000:]}")
            self.samples.append(await asyncio.to_thread(Sample.take, pid, port, processes.pids))
            await self._pause(max(0.5, self._args.minutes * 60 / 200))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is told in the end."""
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder), arguments=BOUNDED)
        await etcd.start_async()
        try:
            processes = Processes(etcd.endpoint, args.agents, args.ttl, args.processes)
            async with Client(etcd.config) as client, processes:
                load = Load(args, etcd, client)
                await load.run(processes)
                left = etcd.ctl("get", "--prefix", "--keys-only", PREFIX).split()
            leases = etcd.ctl("lease", "list").splitlines()[1:]
        finally:
            etcd.kill()
    lives = load.counts["start"] + load.counts["jobs"] * args.agents
    warm = [s for s in load.samples if s.at > load.samples[0].at + WARM * args.minutes * 60]
    found = courses(warm)
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
