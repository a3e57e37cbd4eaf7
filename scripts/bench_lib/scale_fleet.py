"""Simulated agents in a few processes, what they tell, and what etcd counts meanwhile."""

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self

PATIENCE = 120.0
WATCH = 'grpc_method="Watch"'


class Told(NamedTuple):
    """What an agent told; `at` is CLOCK_MONOTONIC in seconds, which all processes share."""

    at: float
    number: int
    what: str
    detail: str
    generation: int


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
    def read(cls, metrics_port: int) -> Self:
        """From etcd's own metrics."""
        address = f"http://127.0.0.1:{metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rpartition(" ") for line in lines if line[0] != "#"]

        def total(start: str, within: str = "") -> float:
            return sum(
                float(v) for name, _, v in values if name.startswith(start) and within in name
            )

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


class Fleet:
    """`async with Fleet(endpoint, job, nodes, ttl, processes) as fleet`: agents to be started."""

    def __init__(self, endpoint: str, job: str, nodes: int, ttl: int, processes: int) -> None:
        self.told: list[Told] = []
        self._arguments = (endpoint, job, str(nodes), str(ttl))
        self._count = processes
        self._processes: list[asyncio.subprocess.Process] = []
        self._news = asyncio.Event()
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for _ in range(self._count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench_lib.scale_agents", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
            self._processes.append(process)
            self._scope.push_async_callback(
                self._end, process, asyncio.create_task(self._read(process))
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scope.aclose()

    def command(self, what: str, numbers: Iterable[int]) -> None:
        """Have these agents started, killed, failed or left."""
        shares: dict[int, list[int]] = {}
        for number in numbers:
            shares.setdefault(number % self._count, []).append(number)
        for index, share in shares.items():
            stdin = self._processes[index].stdin
            assert stdin is not None
            stdin.write(json.dumps([what, share]).encode() + b"\n")

    def cpu(self) -> float:
        """Seconds on a processor so far, of all agents."""
        stats = [Path(f"/proc/{p.pid}/stat").read_text() for p in self._processes]
        times = [stat.rpartition(")")[2].split()[11:13] for stat in stats]  # user, system
        return sum(int(ticks) for each in times for ticks in each) / os.sysconf("SC_CLK_TCK")

    async def until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until the agents have told enough. Raises TimeoutError, or what one of them says."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not ready():
                    self._news.clear()
                    for told in self.told:
                        assert told.what != "error", told.detail
                    await self._news.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}") from None

    def first(self, what: Collection[str], generation: int, since: int = 0) -> dict[int, Told]:
        """Of each agent the first that it told of these things, from entry `since` on."""
        found: dict[int, Told] = {}
        for told in self.told[since:]:
            if told.what in what and told.generation >= generation:
                found.setdefault(told.number, told)
        return found

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.told.append(Told(*json.loads(line)))
            self._news.set()

    async def _end(self, process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await reader
