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
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from elastic_etcd.etcd.client import Client
from tests.etcd.server import EtcdServer

from .scale_fleet import PATIENCE, Counts, Fleet
from .scale_table import Change, beside, exponents, growth, missed, table

WAVE = 100  # agents that start at once: a thousand from two processes would wait for processors
PHASES = ("setup", "joinable", "frozen", "final")


class Job:
    """One job of `nodes` agents, and the changes that it goes through."""

    def __init__(self, etcd: EtcdServer, client: Client, fleet: Fleet, nodes: int) -> None:
        self._etcd = etcd
        self._client = client
        self._fleet = fleet
        self._live = set(range(nodes))
        self._generation = 0
        self._next = nodes
        self._cpu = 0.0
        self.changes: list[Change] = []

    async def go(self) -> None:
        """Every kind of change once."""
        began = time.monotonic()
        before = await self._quiet()
        for first in range(0, len(self._live), WAVE):
            wave = self._live & set(range(first, first + WAVE))
            self._fleet.command("start", wave)
            await self._fleet.until(partial(self._joined, wave), "all join")
        await self._reach("formation", None, before, began)
        await self._lose("node lost", self._ordinary())
        await self._add("node joins")
        await self._lose("coordinator lost", self._coordinator())
        await self._add("")
        before = await self._quiet()
        since = time.monotonic()
        self._fleet.command("fail", [self._ordinary()])
        await self._reach("worker fails", since, before)

    def _joined(self, wave: set[int]) -> bool:
        return wave <= self._fleet.first(("member",), 0).keys()

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
        cpu = self._cpu
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
                self._cpu - cpu,
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
        """The counts once nothing but keepalives goes on."""
        counts = Counts.read(self._etcd.metrics_port)
        async with asyncio.timeout(PATIENCE):
            while True:
                await asyncio.sleep(0.2)
                more = Counts.read(self._etcd.metrics_port)
                if (more - counts).requests == 0 and more.events == counts.events:
                    self._cpu = self._fleet.cpu()
                    return more
                counts = more


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


def of_torch(nodes: int, processes: int, bound: float) -> dict[str, float] | None:
    """A formation by scale_torch.py, None when it takes longer than `bound` seconds."""
    program = (sys.executable, "-m", "bench_lib.scale_torch")
    command = [*program, str(nodes), str(processes), str(bound)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: dict[str, float] | None = json.loads(done.stdout)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", default="10,100,1000")
    parser.add_argument("--ttl", type=int, default=30, help="the leases', in seconds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--torch", default="10,100,200", help="its sizes; empty: leave it out")
    parser.add_argument("--bound", type=float, default=90, help="seconds that torch gets")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main() -> int:
    args = arguments()
    console, progress = Console(width=110), Console(stderr=True)
    changes: list[Change] = []
    for nodes in sizes(args.sizes):
        progress.log(f"{nodes} agents")
        changes += asyncio.run(measure(nodes, args.ttl, args.processes))
    fits = exponents(changes)
    console.print(table(changes))
    console.print(growth(fits))
    torch: list[tuple[int, dict[str, float] | None]] = []
    for nodes in sizes(args.torch):
        progress.log(f"{nodes} of torch's handlers")
        torch.append((nodes, of_torch(nodes, args.processes, args.bound)))
    if torch:
        console.print(beside(torch, args.bound))
    if args.json:
        told = {
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "changes": [asdict(c) for c in changes],
            "growth": {
                name: {total: None if math.isnan(fit) else fit for total, fit in of.items()}
                for name, of in fits.items()
            },
            "torch": [{"agents": n, "formation": of} for n, of in torch],
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    late = missed(changes, fits)
    for line in late:
        console.print(f"missed: {line}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
