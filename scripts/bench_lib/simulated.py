"""Agents of one job, in a few processes; only their workers are simulated.

Client, session, mirror, rules and loop are the real ones; each agent has a connection of its own.
Commands go to a process's standard input, [what, numbers], and what happened comes from its
standard output, each as one JSON list a line.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from elastic_etcd.agent import membership
from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.agent import Agent
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import Inbox, Incoming, Tasks
from elastic_etcd.agent.membership import Membership
from elastic_etcd.core.lifecycle import WorkerEnded, WorkersGone
from elastic_etcd.core.schema import Failure, Limits, Master, Participant, Round
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_etcd.protocol.messages import Change, Interrupt


PATIENCE = 600.0
ALL = slice(None)


@dataclass(frozen=True)
class Setup:
    """What the agents of one etcd have in common; seconds."""

    endpoint: str
    max_nodes: int
    lease_ttl: int
    settle: float
    nproc: int = 1
    alone: bool = False  # whether the first agent has a process for itself
    reconcile: float = 30.0  # from one comparison of a mirror with etcd to the next
    tells: tuple[str, ...] = ("member", "final")  # these, "left" and "error"


class Told(NamedTuple):
    """What an agent told; `at` is CLOCK_MONOTONIC in seconds, which all processes share."""

    at: float
    what: str
    number: int = 0
    detail: str = ""
    generation: int = 0


class Processes:
    """`async with Processes(setup, count, heard)`: agents in `count` of them."""

    def __init__(self, setup: Setup, count: int, heard: "Callable[[Told], None]") -> None:
        self._heard = heard
        self.pids: list[int] = []
        self._setup, self._count = setup, count
        self._inputs: list[asyncio.StreamWriter] = []
        self._scope = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for _ in range(self._count):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, json.dumps(asdict(self._setup))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
            assert process.stdin is not None
            self._inputs.append(process.stdin)
            self.pids.append(process.pid)
            reader = asyncio.create_task(self._read(process))
            self._scope.push_async_callback(self._end, process, reader)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._scope.aclose()

    def command(self, what: str, numbers: "Iterable[int]") -> None:
        """Have these agents started, killed or failed."""
        shares: dict[int, list[int]] = {}
        for number in numbers:
            shares.setdefault(self._place(number), []).append(number)
        for index, share in shares.items():
            self._inputs[index].write(json.dumps([what, share]).encode() + b"\n")

    def _place(self, number: int) -> int:
        if not self._setup.alone or self._count == 1:
            return number % self._count
        return 1 + number % (self._count - 1) if number else 0

    def cpu(self, processes: slice = ALL) -> float:
        """Seconds on a processor so far, of the agents in these processes."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.pids[processes]]
        times = [stat.rpartition(")")[2].split()[11:13] for stat in stats]  # user, system
        return sum(int(ticks) for each in times for ticks in each) / os.sysconf("SC_CLK_TCK")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._heard(Told(*json.loads(line)))

    async def _end(self, process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.close()
        await process.wait()
        await reader


# --- in such a process


class SimulatedWorkers:
    """Workers that start and stop at once."""

    finished = False

    def __init__(self, inbox: Inbox) -> None:
        self.generation = 0
        self._inbox = inbox

    async def end_former_agents_leftovers(self) -> None:
        """Nothing of another agent is there."""

    async def prestart(self) -> None:
        """Nothing is imported."""

    def offer(self, generation: int, reached: Reached) -> Master:
        """An endpoint at which nobody will be: there is no process group to build."""
        return Master(reached.address, 1024 + generation)

    def tell_leaving(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Nobody asks."""

    def start(self, now: Round, part: Participant, limits: Limits) -> None:
        del part, limits
        self.generation = now.generation

    def stop(
        self,
        grace: float | None,
        notice: "Change | Interrupt | None" = None,
        park: float | None = None,
    ) -> None:
        del grace, notice, park
        self._inbox.put(WorkersGone(self.generation))

    def fail(self, node: str) -> None:
        """A worker exits 1."""
        failure = Failure(node, 0, 0, 1, 1, uptime=60.0)
        self._inbox.put(WorkerEnded(self.generation, failure))

    async def end(self, reason: str) -> None:
        """Nothing is parked."""

    async def end_leftovers(self) -> None:
        """There are none of this process's."""

    async def kill_leftovers(self) -> None:
        """As above."""

    def close(self) -> None:
        """Nothing is left."""


class Simulated(Agent):
    """An agent that tells when it joins, and of each phase of a round that it sees."""

    _workers: SimulatedWorkers
    _seen: tuple[int, str] = (0, "")
    _member = 0

    def __init__(
        self, config: AgentConfig, client: Client, tasks: Tasks, tell: "Callable[..., None]"
    ) -> None:
        workers = SimulatedWorkers(tasks.inbox)
        super().__init__(config, tasks, Membership(client, config, tasks), workers)
        self._tell = tell

    def fail(self) -> None:
        """One of its workers fails."""
        self._workers.fail(self._config.node)

    def abandon(self) -> None:
        """Leave the lease as a killed process does."""
        session = self._membership._session  # noqa: SLF001
        if session:
            session.orphan()

    async def _take_event(self, incoming: Incoming) -> None:
        await super()._take_event(incoming)
        local, view = self._state.local, self._state.view
        if local.lease != self._member:
            self._member = local.lease
            self._tell("member", f"{local.lease:x}")
        now = view.round if view else None
        if now and (now.generation, now.phase) != self._seen:
            self._seen = (now.generation, now.phase)
            leads = "coordinator" if now.coordinator == local.lease else ""
            self._tell(now.phase.value, leads, now.generation)


class Agents:
    """The agents of this process, by their numbers."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._etcd = EtcdConfig((setup.endpoint,))
        self._agents: dict[int, Simulated] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def do(self, command: str, number: int) -> None:
        """Do what a line of standard input asks for; an agent may have ended by itself."""
        if command == "start":
            self._lives[number] = asyncio.create_task(self._live(number))
        elif agent := self._agents.get(number):
            match command:
                case "kill":
                    agent.abandon()
                    self._lives[number].cancel()
                case "fail":
                    agent.fail()

    async def end(self) -> None:
        """Kill all that still live."""
        for number in tuple(self._agents):
            self.do("kill", number)
        if self._lives:
            await asyncio.wait(self._lives.values())

    def _config(self, number: int) -> AgentConfig:
        setup = self._setup
        return AgentConfig(
            etcd=self._etcd,
            job="scale",
            argv=("true",),
            node=f"node{number}",
            nproc=setup.nproc,
            limits=Limits(1, setup.max_nodes, max_restarts=1 << 30, settle=setup.settle),
            lease_ttl=setup.lease_ttl,
            proof_of_death=False,  # those of one process would die together
            signals=(),
        )

    async def _live(self, number: int) -> None:
        try:
            async with Client(self._etcd) as client, Tasks() as tasks:
                tell = partial(self._heard, number)
                config = self._config(number)
                self._agents[number] = agent = Simulated(config, client, tasks, tell)
                await agent.live()
        except* ElasticEtcdError as errors:
            _tell("error", number, str(errors.exceptions[0]))
        else:
            _tell("left", number)
        finally:
            self._agents.pop(number, None)
            self._lives.pop(number, None)

    def _heard(self, number: int, what: str, detail: str = "", generation: int = 0) -> None:
        if what in self._setup.tells:
            _tell(what, number, detail, generation)


def _tell(what: str, number: int, detail: str = "", generation: int = 0) -> None:
    print(json.dumps(Told(time.monotonic(), what, number, detail, generation)))


async def main(setup: Setup) -> None:
    """Follow the commands until standard input ends."""
    membership.Mirror = partial(Mirror, reconcile=setup.reconcile)  # type: ignore[assignment, attr-defined]
    agents = Agents(setup)
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await commands.readline():
        command, numbers = json.loads(line)
        for number in numbers:
            agents.do(command, number)
    await agents.end()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(Setup(**json.loads(sys.argv[1]))))
