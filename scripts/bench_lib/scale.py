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
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from elastic_etcd.etcd.client import Client
from tests.support.etcd import EtcdServer

from .figures import grid
from .simulated import PATIENCE, Processes, Setup, SimulatedJob, Told

WAVE = 100  # agents that start at once: a thousand from two processes would wait for processors
PHASES = ("setup", "joinable", "frozen", "final")
SETUP: dict[str, Any] = {
    "settle": 60.0,  # longer than all can take to come: a first world is complete
    "nproc": 8,
    "reconcile": 3600.0,  # the slow comparison, twice a minute, is no part of a change
    "tells": ("member", *PHASES),
}
WATCH = 'grpc_method="Watch"'
FINAL, REQUESTS, EVENTS, GROWTH = 5.0, 10, 20, 1.1  # the goals


@dataclass(frozen=True)
class Counts:
    """What etcd has counted since it started, or between two such times."""

    requests: float = 0  # RPCs that began: a Txn, a grant, a stream of watches
    watches: float = 0  # that were created on such streams
    events: float = 0  # sent to watchers: one put that ten watch is ten
    messages: float = 0  # in which they were sent
    sent_bytes: float = 0
    cpu: float = 0  # seconds, etcd's

    @classmethod
    def read(cls, etcd: EtcdServer) -> Self:
        """From etcd's own metrics."""
        values = etcd.metrics()

        def total(start: str, within: str = "") -> float:
            return sum(v for name, v in values.items() if name.startswith(start) and within in name)

        return cls(
            requests=total("grpc_server_started_total"),
            watches=total("grpc_server_msg_received_total", WATCH),
            events=total("etcd_debugging_mvcc_events_total"),
            messages=total("grpc_server_msg_sent_total", WATCH),
            sent_bytes=total("etcd_network_client_grpc_sent_bytes_total"),
            cpu=total("process_cpu_seconds_total"),
        )

    def __sub__(self, other: "Counts") -> "Counts":
        names = [f.name for f in fields(self)]
        return Counts(*(getattr(self, name) - getattr(other, name) for name in names))


@dataclass(frozen=True)
class Change:
    """One change of a job. Times are in seconds from the cause until the last agent knows."""

    name: str
    agents: int
    learned: float  # that the old world is over
    final: float  # the new world
    counts: Counts
    joining: float  # for a formation, how long all took to join
    generations: int  # that were begun
    cpu: float  # of all agents, in seconds


class Job(SimulatedJob):
    """One job of `nodes` agents, and the changes that it goes through."""

    def __init__(self, etcd: EtcdServer, client: Client, processes: Processes, nodes: int) -> None:
        super().__init__(processes, f"scale{nodes}")
        processes.heard[""] = self._heard  # what the processes tell of themselves
        self._etcd = etcd
        self._client = client
        self._live = set(range(nodes))
        self._generation = 0
        self._next = nodes
        self._cpu = 0.0
        self.changes: list[Change] = []

    @property
    def recorder(self) -> float:
        """The flight recorders' share of the agents' CPU time, once all have ended."""
        return sum(float(t.detail) for t in self.told if t.what == "recorder") / self._cpu

    async def go(self) -> None:
        """Every kind of change once."""
        began = time.monotonic()
        before = await self._quiet()
        for first in range(0, len(self._live), WAVE):
            wave = self._live & set(range(first, first + WAVE))
            self.command("start", wave)
            await self.until(partial(self._joined, wave), "all join")
        await self._reach("formation", None, before, began)
        await self._lose("node lost", self._ordinary())
        await self._add("node joins")
        await self._lose("coordinator lost", self._coordinator())
        await self._add("")
        before = await self._quiet()
        since = time.monotonic()
        self.command("fail", [self._ordinary()])
        await self._reach("worker fails", since, before)

    def _joined(self, wave: set[int]) -> bool:
        return wave <= self._first(("member",), 0).keys()

    async def _add(self, name: str) -> None:
        number, self._next = self._next, self._next + 1
        before = await self._quiet()
        self._live.add(number)
        self.command("start", [number])
        await self._reach(name, None, before)

    async def _lose(self, name: str, number: int) -> None:
        before = await self._quiet()
        member = next(t for t in reversed(self.told) if (t.number, t.what) == (number, "member"))
        self._live.remove(number)
        self.command("kill", [number])
        await self._client.revoke(int(member.detail, 16))
        await self._reach(name, time.monotonic(), before)

    async def _reach(
        self, name: str, since: float | None, before: Counts, began: float = 0
    ) -> None:
        """Wait until all live agents hold the next final world; count what it took."""
        wanted = self._generation + 1

        def final() -> bool:
            return self._live <= self._first(("final",), wanted).keys()

        await self.until(final, name)
        finals = [t for t in self.told if t.what == "final" and t.number in self._live]
        last = max(t.generation for t in finals)
        joined = max(t.at for t in self.told if t.what == "member")
        since = joined if since is None else since
        learned = self._first(PHASES, wanted)
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
            for t in reversed(self.told)
            if t.what == "final" and t.detail and t.generation == self._generation
        )

    def _ordinary(self) -> int:
        return max(self._live - {self._coordinator()})

    async def _quiet(self) -> Counts:
        """The counts once nothing but keepalives goes on."""
        counts = Counts.read(self._etcd)
        async with asyncio.timeout(PATIENCE):
            while True:
                await asyncio.sleep(0.2)
                more = Counts.read(self._etcd)
                if (more - counts).requests == 0 and more.events == counts.events:
                    self._cpu = self._processes.cpu()
                    return more
                counts = more

    def _first(self, what: Collection[str], generation: int) -> dict[int, Told]:
        """Of each agent the first that it told of these things."""
        found: dict[int, Told] = {}
        for told in self.told:
            if told.what in what and told.generation >= generation:
                found.setdefault(told.number, told)
        return found


async def measure(nodes: int, ttl: int, processes: int) -> tuple[list[Change], float]:
    """A job of `nodes` agents on an etcd of its own, through every change; see `Job.recorder`."""
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder), arguments=())
        etcd.start()
        try:
            setup = Setup(etcd.endpoint, nodes, ttl, **SETUP)
            started = Processes(setup, processes)
            async with Client(etcd.config) as client:
                job = Job(etcd, client, started, nodes)
                async with started:
                    await job.go()
                return job.changes, job.recorder
        finally:
            etcd.kill()


def of_torch(nodes: int, processes: int, bound: float) -> dict[str, float] | None:
    """A formation by scale_torch.py, None when it takes longer than `bound` seconds."""
    program = (sys.executable, "-m", "scripts.bench_lib.scale_torch")
    command = [*program, str(nodes), str(processes), str(bound)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found: dict[str, float] | None = json.loads(done.stdout)
    return found


# --- tables


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of a straight line through the logarithms: total ~ N^exponent."""
    logs = [(math.log(n), math.log(total)) for n, total in points if total > 0]
    if len(logs) < 2:
        return math.nan
    x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    slope: float = sum((a - x) * (b - y) for a, b in logs) / sum((a - x) ** 2 for a, _ in logs)
    return slope


def table(changes: list[Change]) -> Table:
    """Of each kind of change a row for each size."""
    names = ("change", "agents", "learned", "final", "requests", "watches", "events", "KB")
    rows = []
    kinds = list(dict.fromkeys(c.name for c in changes))
    for c in sorted(changes, key=lambda c: kinds.index(c.name)):
        n, of = c.agents, c.counts
        each = (of.requests / n, of.watches / n, of.events / n, of.sent_bytes / n / 1e3)
        times = (f"{c.learned:.2f} s", f"{c.final:.2f} s")
        cpu = (f"{of.cpu:.2f} s", f"{c.cpu:.2f} s")
        rows.append((c.name, str(n), *times, *(f"{value:.1f}" for value in each), *cpu))
    title = "rendezvous at scale: from the cause until the last agent knows"
    result = grid(title, (*names, "CPU: etcd", "agents"), rows)
    result.caption = "requests, watches, events and KB: of each agent"
    return result


def exponents(changes: list[Change]) -> dict[str, dict[str, float]]:
    """How totals grow with the number of agents: N^x, for each kind of change."""
    found = {}
    for name in dict.fromkeys(c.name for c in changes):
        of = [c for c in changes if c.name == name]
        found[name] = {
            total: exponent([(c.agents, getattr(c.counts, total)) for c in of])
            for total in ("requests", "watches", "events", "sent_bytes")
        }
    return found


def growth(found: dict[str, dict[str, float]]) -> Table:
    """Those exponents."""
    rows = [
        (name, *("-" if math.isnan(fit) else f"{fit:.2f}" for fit in fits.values()))
        for name, fits in found.items()
    ]
    return grid("growth of totals: N^x", ("change", "requests", "watches", "events", "bytes"), rows)


def missed(changes: list[Change], found: dict[str, dict[str, float]]) -> list[str]:
    """The goals that are not reached."""
    said = []
    for c in changes:
        if c.name == "formation" and c.agents <= 1000 and c.final > FINAL:
            said.append(f"{c.agents} agents final after {c.final:.1f} s, goal {FINAL:g} s")
        for what, goal in (("requests", REQUESTS), ("events", EVENTS)):
            each = getattr(c.counts, what) / c.agents
            if each > goal:
                said.append(f"{c.name}, {c.agents} agents: {each:.1f} {what} each, goal {goal}")
    for name, fits in found.items():
        over = {what: fits[what] for what in ("requests", "events") if fits[what] > GROWTH}
        said += [f"{name}: {what} grow as N^{x:.2f}, goal {GROWTH}" for what, x in over.items()]
    return said


def beside(found: list[tuple[int, dict[str, float] | None]], bound: float) -> Table:
    """Formations of torch's handlers."""
    rows = []
    for n, of in found:
        if of is None:
            rows.append((str(n), f"not within {bound:g} s", "-", "-"))
            continue
        each = (f"{of['requests'] / n:.1f}", f"{of['received'] / n / 1e3:.1f}")
        rows.append((str(n), f"{of['final']:.2f} s", *each))
    title = "torch: DynamicRendezvousHandler on a TCPStore, first formation"
    return grid(title, ("agents", "final", "requests each", "KB each"), rows)


# --- the command


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
    recorders: dict[int, float] = {}
    for nodes in sizes(args.sizes):
        progress.log(f"{nodes} agents")
        found, recorders[nodes] = asyncio.run(measure(nodes, args.ttl, args.processes))
        changes += found
    fits = exponents(changes)
    console.print(table(changes))
    console.print(growth(fits))
    for nodes, share in recorders.items():
        console.print(f"flight recorders: {share:.2%} of the CPU time of {nodes} agents")
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
            "recorders": recorders,
            "torch": [{"agents": n, "formation": of} for n, of in torch],
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    late = missed(changes, fits)
    for line in late:
        console.print(f"missed: {line}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
