"""Rendezvous at scale: many agents on one real etcd, and what etcd counts.

    scripts/bench scale --sizes 10,100,1000 --json scale.json

Each node is an agent of which only the workers are simulated. Exit code 1 when a goal is missed.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from elastic_etcd.etcd.client import Client
from tests.support.debian import NotToBeHad
from tests.support.etcd import EtcdServer
from tests.support.etcd_versions import etcd_of

from .figures import grid
from .simulated import PATIENCE, Processes, Setup, Told

WAVE = 100  # nodes that start at once: a thousand from three processes would wait for processors
RENEWALS = 150  # a second: leases last the longer the more there are, so that it does not rise
FIRST = slice(1)  # the process in which the first agent is alone, which is the first coordinator
PHASES = ("setup", "joinable", "frozen", "final")
SETUP: dict[str, Any] = {
    "settle": 60.0,  # longer than all can take to come: a first world is complete
    "nproc": 8,
    "alone": True,
    "reconcile": 3600.0,  # the slow comparison, twice a minute, is no part of a change
    "tells": ("member", *PHASES),
}
WATCH = 'grpc_method="Watch"'
REQUESTS, EVENTS, KB, GROWTH = 10, 20, 20, 1.1  # the goals: of each node and change
FORMED = {1000: 2.5}  # final within so many seconds of the last join
TIMED = ("formation", "node lost", "node joins")
CHANGED = {1000: 1.0}  # likewise after a node that is lost or joins
COORDINATED = 2.0  # seconds of the coordinator's processor in a formation

log = Console(stderr=True)


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
    """One change of a job. Times are in seconds from the cause until the last node knows."""

    name: str
    agents: int
    learned: float  # that the old world is over
    final: float  # the new world
    counts: Counts
    joining: float  # for a formation, how long all took to join
    generations: int  # that were begun
    cpu: float  # of all nodes, in seconds
    coordinator: float | None  # its own, since the last join; None where another takes its place


class Job:
    """One job of `nodes` nodes, and the changes that it goes through."""

    def __init__(self, etcd: EtcdServer, client: Client, setup: Setup, processes: int) -> None:
        nodes = setup.max_nodes
        self.processes = Processes(setup, processes, self._heard)
        self._news = asyncio.Event()
        self._error: Told | None = None
        self._etcd = etcd
        self._client = client
        self._live = set(range(nodes))
        self._generation = 0
        self._next = nodes
        self._cpu = (0.0, 0.0)
        self._members: dict[int, Told] = {}
        self._learned: dict[int, Told] = {}  # what each told first of the next generation
        self._finals: dict[int, Told] = {}
        self._coordinator = 0
        self.changes: list[Change] = []

    async def go(self) -> None:
        """Every kind of change once."""
        began = time.monotonic()
        before = await self._quiet()
        for first in range(1 - WAVE, len(self._live), WAVE):
            wave = self._live & set(range(first, first + WAVE))
            self.processes.command("start", wave)
            await self._until(partial(self._joined, wave), "all join")
            if first % 1000 == 1:
                log.log(f"{first + WAVE - 1} nodes have joined")
        self._cpu = self._cpu[0], self.processes.cpu(FIRST)  # the coordinator's, since then
        await self._reach("formation", None, before, began)
        await self._lose("node lost", self._ordinary())
        await self._add("node joins")
        before = await self._quiet()
        since = time.monotonic()
        self.processes.command("fail", [self._ordinary()])
        await self._reach("worker fails", since, before)
        await self._lose("coordinator lost", self._coordinator)

    async def _until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until they have told enough. Raises TimeoutError, or what one of them says."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not ready():
                    self._news.clear()
                    await self._news.wait()
                    said = self._error
                    assert said is None, f"node{said.number}: {said.detail}"
        except TimeoutError:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}") from None

    def _heard(self, told: Told) -> None:
        self._news.set()
        if told.what == "error":
            self._error = told
        if told.what == "member":
            self._members[told.number] = told
        if told.what in PHASES and told.generation > self._generation:
            self._learned.setdefault(told.number, told)
        if told.what == "final":
            self._finals[told.number] = told
            if told.detail:
                self._coordinator = told.number

    def _joined(self, wave: set[int]) -> bool:
        return wave <= self._members.keys()

    async def _add(self, name: str) -> None:
        number, self._next = self._next, self._next + 1
        before = await self._quiet()
        self._live.add(number)
        self.processes.command("start", [number])
        await self._reach(name, None, before)

    async def _lose(self, name: str, number: int) -> None:
        before = await self._quiet()
        self._live.remove(number)
        self.processes.command("kill", [number])
        await self._client.revoke(int(self._members[number].detail, 16))
        await self._reach(name, time.monotonic(), before)

    async def _reach(
        self, name: str, since: float | None, before: Counts, began: float = 0
    ) -> None:
        """Wait until all live nodes hold the next final world; count what it took."""
        log.log(name)
        cpu, coordinator = self._cpu, self._coordinator
        await self._until(self._final, name)
        joined = max(t.at for t in self._members.values())
        since = joined if since is None else since
        generation = max(t.generation for t in self._finals.values())
        counts = await self._quiet() - before
        own = None if self._coordinator != coordinator else self._cpu[1] - cpu[1]
        change = Change(
            name,
            len(self._live),
            max(self._learned[n].at for n in self._live) - since,
            max(self._finals[n].at for n in self._live) - since,
            counts,
            joined - began if began else 0,
            generation - self._generation,
            self._cpu[0] - cpu[0],
            own,
        )
        self.changes.append(change)
        self._generation = generation
        self._learned = {}

    def _final(self) -> bool:
        finals = self._finals
        return all(n in finals and finals[n].generation > self._generation for n in self._live)

    def _ordinary(self) -> int:
        """The last that is not the coordinator."""
        return max(self._live - {self._coordinator})

    async def _quiet(self) -> Counts:
        """The counts once nothing but keepalives goes on."""
        counts = Counts.read(self._etcd)
        async with asyncio.timeout(PATIENCE):
            while True:
                await asyncio.sleep(0.2)
                more = Counts.read(self._etcd)
                if (more - counts).requests == 0 and more.events == counts.events:
                    self._cpu = self.processes.cpu(), self.processes.cpu(FIRST)
                    return more
                counts = more


def newest_etcd() -> str:
    """Debian's newest: before 3.5.5 one panics when a read takes too long (etcd#14110)."""
    try:
        return etcd_of("sid")
    except NotToBeHad as reason:
        log.log(f"{reason}; an older one may panic")
        return ""


async def measure(nodes: int, ttl: int, processes: int) -> list[Change]:
    """A job of `nodes` nodes on an etcd of its own, through every change."""
    ttl = max(ttl, 3 * nodes // RENEWALS)
    with tempfile.TemporaryDirectory() as folder:
        etcd = EtcdServer(Path(folder), arguments=(), program=newest_etcd())
        etcd.start()
        try:
            setup = Setup(etcd.endpoint, nodes, ttl, **SETUP)
            async with Client(etcd.config) as client:
                job = Job(etcd, client, setup, processes)
                async with job.processes:
                    await job.go()
                return job.changes
        finally:
            etcd.kill()


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
    names = ("change", "nodes", "learned", "final", "requests", "watches", "events", "KB")
    rows = []
    kinds = list(dict.fromkeys(c.name for c in changes))
    for c in sorted(changes, key=lambda c: kinds.index(c.name)):
        n, of = c.agents, c.counts
        each = (of.requests / n, of.watches / n, of.events / n, of.sent_bytes / n / 1e3)
        times = (f"{c.learned:.2f} s", f"{c.final:.2f} s")
        own = "-" if c.coordinator is None else f"{c.coordinator:.2f} s"
        cpu = (f"{of.cpu:.2f} s", own, f"{c.cpu:.2f} s")
        rows.append((c.name, str(n), *times, *(f"{value:.1f}" for value in each), *cpu))
    title = "rendezvous at scale: from the cause until the last node knows"
    result = grid(title, (*names, "CPU: etcd", "coordinator", "all nodes"), rows)
    result.caption = "requests, watches, events and KB: of each node"
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
        of, n = f"{c.name}, {c.agents} nodes", c.agents
        goals = FORMED if c.name == "formation" else CHANGED
        late = next((s for size, s in goals.items() if n <= size), math.inf)
        if c.name in TIMED and c.final > late:
            said.append(f"{of}: final after {c.final:.1f} s, goal {late:g} s")
        if c.name == "formation" and (c.coordinator or 0) > COORDINATED:
            said.append(f"{of}: {c.coordinator:.1f} s of the coordinator's, goal {COORDINATED:g} s")
        kilobytes = c.counts.sent_bytes / 1e3
        for what, total, goal in (
            ("requests", c.counts.requests, REQUESTS),
            ("events", c.counts.events, EVENTS),
            ("KB", kilobytes, KB),
        ):
            if total / n > goal:
                said.append(f"{of}: {total / n:.1f} {what} each, goal {goal}")
    for name, fits in found.items():
        over = {what: fit for what, fit in fits.items() if what != "watches" and fit > GROWTH}
        said += [f"{name}: {what} grow as N^{x:.2f}, goal {GROWTH}" for what, x in over.items()]
    return said


# --- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", default="10,100,1000")
    parser.add_argument("--ttl", type=int, default=30, help="the leases', at least, in seconds")
    parser.add_argument("--processes", type=int, default=3, help="the first has the coordinator")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main() -> int:
    args = arguments()
    console = Console(width=110)
    changes: list[Change] = []
    for nodes in sizes(args.sizes):
        log.log(f"{nodes} nodes")
        changes += asyncio.run(measure(nodes, args.ttl, args.processes))
    fits = exponents(changes)
    console.print(table(changes))
    console.print(growth(fits))
    if args.json:
        told = {
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "changes": [asdict(c) for c in changes],
            "growth": {
                name: {total: None if math.isnan(fit) else fit for total, fit in of.items()}
                for name, of in fits.items()
            },
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    late = missed(changes, fits)
    for line in late:
        console.print(f"missed: {line}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
