"""Rendezvous at scale: many simulated agents on one real etcd, and what etcd counts.

    scripts/bench scale --sizes 10,100,1000 --json scale.json

Exit code 1 when a goal is missed.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastic_etcd.etcd.client import Client
from tests.etcd.server import EtcdServer

from .scale_fleet import Counts, Fleet

PHASES = ("setup", "joinable", "frozen", "final")


@dataclass(frozen=True)
class Change:
    """One change of a job. Times are in seconds from the cause until the last agent knows."""

    name: str
    agents: int
    learned: float  # that the old world is over
    final: float  # the new world
    counts: Counts
    took: float = 0  # for a formation: how long all took to join
    claims: int = 0  # generations that were begun


class Job:
    """One job of `nodes` agents, and the changes that it goes through."""

    def __init__(self, etcd: EtcdServer, client: Client, fleet: Fleet, nodes: int) -> None:
        self._etcd = etcd
        self._client = client
        self._fleet = fleet
        self._live = set(range(nodes))
        self._generation = 0
        self._next = nodes
        self.changes: list[Change] = []

    async def go(self) -> None:
        """Every kind of change once."""
        began = time.monotonic()
        before = await self._quiet()
        self._fleet.command("start", self._live)
        await self._reach("formation", None, before, began)
        await self._lose("node lost", self._ordinary())
        await self._add("node joins")
        await self._lose("coordinator lost", self._coordinator())
        await self._add("")
        before = await self._quiet()
        since = time.monotonic()
        self._fleet.command("fail", [self._ordinary()])
        await self._reach("worker fails", since, before)

    async def _add(self, name: str) -> None:
        number, self._next = self._next, self._next + 1
        before = await self._quiet()
        self._live.add(number)
        self._fleet.command("start", [number])
        await self._reach(name, None, before)

    async def _lose(self, name: str, number: int) -> None:
        before = await self._quiet()
        member = next(
            told for told in reversed(self._fleet.told) if told[1:3] == (number, "member")
        )
        self._live.remove(number)
        self._fleet.command("kill", [number])
        await self._client.revoke(int(member.detail, 16))
        await self._reach(name, time.monotonic(), before)

    async def _reach(
        self, name: str, since: float | None, before: Counts, began: float = 0
    ) -> None:
        """Wait until all live agents hold the next final world; count what it took."""
        fleet, wanted = self._fleet, self._generation + 1

        def final() -> bool:
            return self._live <= fleet.first(("final",), wanted).keys()

        await fleet.until(final, name)
        finals = [t for t in fleet.told if t.what == "final" and t.number in self._live]
        last = max(t.generation for t in finals)
        joined = max(t.at for t in fleet.told if t.what == "member")
        since = joined if since is None else since
        learned = fleet.first(PHASES, wanted)
        counts = await self._quiet() - before
        if name:
            change = Change(
                name,
                len(self._live),
                max(learned[n].at for n in self._live) - since,
                max(t.at for t in finals) - since,
                counts,
                joined - began if began else 0,
                last - self._generation,
            )
            self.changes.append(change)
        self._generation = last

    def _coordinator(self) -> int:
        return next(
            t.number
            for t in reversed(self._fleet.told)
            if t.what == "final" and t.detail and t.generation == self._generation
        )

    def _ordinary(self) -> int:
        return max(self._live - {self._coordinator()})

    async def _quiet(self) -> Counts:
        """The counts once nothing but keepalives and the slow comparisons goes on."""
        at, counts = time.monotonic(), Counts.read(self._etcd.metrics_port)
        while True:
            await asyncio.sleep(0.2)
            later, more = time.monotonic(), Counts.read(self._etcd.metrics_port)
            usual = 1 + 2 * len(self._live) * (later - at) / 30
            if (more - counts).requests <= usual and more.events == counts.events:
                return more
            at, counts = later, more


async def measure(nodes: int, ttl: int, processes: int) -> list[Change]:
    """A job of `nodes` agents on an etcd of its own, through every change."""
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder), arguments=())
        etcd.start()
        try:
            fleet = Fleet(etcd.endpoint, f"scale{nodes}", nodes, ttl, processes)
            async with Client(etcd.config) as client, fleet:
                job = Job(etcd, client, fleet, nodes)
                await job.go()
                return job.changes
        finally:
            etcd.kill()


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through the logarithms: total ~ N^exponent."""
    logs = [(math.log(n), math.log(total)) for n, total in points if total > 0]
    if len(logs) < 2:
        return math.nan
    x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    over = sum((a - x) ** 2 for a, _ in logs)
    return sum((a - x) * (b - y) for a, b in logs) / over


def table(changes: list[Change]) -> Table:
    result = Table(title="rendezvous at scale: from the cause until the last agent knows")
    names = ("change", "agents", "learned", "final", "requests/agent", "events/agent")
    for name in (*names, "KB/agent", "etcd CPU"):
        result.add_column(name, justify="left" if name == "change" else "right")
    for c in sorted(changes, key=lambda c: [x.name for x in changes].index(c.name)):
        n, counts = c.agents, c.counts
        result.add_row(
            c.name,
            str(n),
            f"{c.learned:.2f} s",
            f"{c.final:.2f} s",
            f"{counts.requests / n:.1f}",
            f"{counts.events / n:.1f}",
            f"{counts.sent_bytes / n / 1e3:.1f}",
            f"{counts.cpu:.2f} s",
        )
    return result


def growth(changes: list[Change]) -> Table:
    result = Table(title="growth of totals: N^x")
    for name in ("change", "requests", "events", "bytes sent"):
        result.add_column(name, justify="left" if name == "change" else "right")
    for name in dict.fromkeys(c.name for c in changes):
        of = [c for c in changes if c.name == name]
        totals = ("requests", "events", "sent_bytes")
        fits = [exponent([(c.agents, getattr(c.counts, t)) for c in of]) for t in totals]
        result.add_row(name, *(f"{fit:.2f}" for fit in fits))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    parser.add_argument("--sizes", default="10,100,1000")
    parser.add_argument("--ttl", type=int, default=30, help="the leases', in seconds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=120)
    changes: list[Change] = []
    for nodes in map(int, args.sizes.split(",")):
        changes += asyncio.run(measure(nodes, args.ttl, args.processes))
        console.print(table(changes))
    console.print(growth(changes))
    if args.json:
        machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
        found = {"machine": machine, "changes": [asdict(c) for c in changes]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
