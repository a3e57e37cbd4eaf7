"""The processes that hold the agents of all jobs, and one job as the bench sees it."""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import NamedTuple, Self

PATIENCE = 120.0


class Told(NamedTuple):
    """What an agent told; `at` is CLOCK_MONOTONIC in seconds, which all processes share."""

    at: float
    what: str
    job: str
    number: int
    detail: str


class Processes:
    """`async with Processes(endpoint, nodes, ttl, count)`; `heard` of a job gets what it tells.

    The agents are in `count` of them, which are `pids`. One more, `bystander`, has none: it sees
    news as late as they are, while the others may be busy with a hundred agents each.
    """

    def __init__(self, endpoint: str, nodes: int, ttl: int, count: int) -> None:
        self.heard: dict[str, Callable[[Told], None]] = {}
        self.pids: list[int] = []
        self.bystander = 0
        self._arguments = (endpoint, str(nodes), str(ttl))
        self._count = count
        self._processes: list[asyncio.subprocess.Process] = []
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for _ in range(self._count + 1):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench_lib.load_agents", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
            self._processes.append(process)
            self.pids.append(process.pid)
            reader = asyncio.create_task(self._read(process))
            self._scope.push_async_callback(self._end, process, reader)
        self.bystander = self.pids.pop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scope.aclose()

    def command(self, what: str, job: str, numbers: Iterable[int]) -> None:
        """Have these agents of the job do that; they are in different processes."""
        for number in numbers:
            stdin = self._processes[number % self._count].stdin
            assert stdin is not None
            stdin.write(json.dumps([what, job, [number]]).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told = Told(*json.loads(line))
            if heard := self.heard.get(told.job):
                heard(told)

    async def _end(self, process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.close()
        await process.wait()
        await reader


class Job:
    """One run of a job: `begin`, some `change`s, `finish`."""

    def __init__(self, processes: Processes, name: str, agents: int) -> None:
        self.name = name
        self.live: set[int] = set()
        self._agents = agents
        self._next = agents
        self._processes = processes
        self._final: dict[int, float] = {}
        self._news = asyncio.Event()
        self._error = ""
        processes.heard[name] = self._heard

    async def begin(self) -> None:
        """All agents start and form the first world."""
        self.live = set(range(self._agents))
        self._processes.command("start", self.name, self.live)
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
        self._processes.command(what, self.name, [number])
        await self._world(began)
        return what, max(self._final[n] for n in self.live) - began

    async def finish(self) -> None:
        """All workers exit 0, the run is over and every agent ends."""
        self._processes.command("finish", self.name, self.live)
        await self._until(lambda: not self.live, "the end")
        del self._processes.heard[self.name]

    async def _world(self, since: float) -> None:
        def whole() -> bool:
            return all(self._final.get(n, 0) > since for n in self.live)

        await self._until(whole, "a world")

    async def _until(self, ready: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not ready():
                    self._news.clear()
                    await self._news.wait()
                    assert not self._error, f"{self.name}: {self._error}"
        except TimeoutError:
            raise TimeoutError(f"{self.name}: not within {PATIENCE:g} s: {what}") from None

    def _heard(self, told: Told) -> None:
        if told.what == "final":
            self._final[told.number] = told.at
        elif told.what == "left":
            self.live.discard(told.number)
        elif told.what == "error":
            self._error = f"node{told.number}: {told.detail}"
        self._news.set()
