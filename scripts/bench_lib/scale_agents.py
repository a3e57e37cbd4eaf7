"""Many agents in one process; only their workers are simulated.

Client, session, mirror, rules and loop are the real ones; each agent has a connection of its own.

Commands come on standard input and what happened goes to standard output, one JSON list a line.
"""

import asyncio
import json
import logging
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_etcd.agent import membership
from elastic_etcd.agent.agent import Agent
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.host import Host
from elastic_etcd.core.events import Emptied, WorkerEnded
from elastic_etcd.core.values import Failure, Master, Round
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_etcd.agent.host import Post
    from elastic_etcd.agent.workers import Notice


# The slow comparison of each mirror with etcd, twice a minute, is no part of a change.
membership.Mirror = partial(Mirror, reconcile=3600)  # type: ignore[assignment, attr-defined]

SETTLE = 60.0  # longer than all can take to come: a first world is complete


class NoGuardian:
    """There are no worker processes to end."""

    def guard(self, lease: int, groups: "Collection[int]") -> None:
        """Nothing to guard."""


class Workers(Host):
    """Workers that start and stop at once."""

    groups = ()
    elastic = False

    def __init__(self, post: "Post", *_: object) -> None:
        self._post = post
        self._running = 0
        self._finishing = False

    async def warm(self) -> None:
        """Nothing is imported."""

    def offer(self, generation: int, address: str) -> Master:
        """An endpoint at which nobody will be: there is no process group to build."""
        return address, 1024 + generation

    def start(self, lease: int, now: Round) -> None:
        assert now.place(lease) is not None
        self._running = now.generation
        if self._finishing:
            self.finish()

    def stop(self, grace: float, notice: "Notice") -> None:
        del grace, notice
        self._post(Emptied(self._running))

    def fail(self, node: str) -> None:
        """A worker exits 1."""
        failure = Failure(node, 0, 0, 1, 1, uptime=60.0)
        self._post(WorkerEnded(self._running, failure))

    def finish(self) -> None:
        """The workers exit 0, now or as soon as they run; for a node of one worker."""
        self._finishing = True
        if self._running:
            self._post(WorkerEnded(self._running, None))
            self._post(Emptied(self._running))

    async def end(self, reason: str) -> None:
        """Nothing is parked."""

    def close(self) -> None:
        """Nothing is left."""


class Simulated(Agent):
    """An agent that tells when it joins, and of each phase of a round that it sees."""

    _host: Workers
    _seen: tuple[int, str] = (0, "")
    _member = 0

    def __init__(self, config: AgentConfig, client: Client, tell: "Callable[..., None]") -> None:
        guardian: Any = NoGuardian()
        super().__init__(config, client, guardian, Workers)
        self._tell = tell

    def fail(self) -> None:
        """One of its workers fails."""
        self._host.fail(self._config.node)

    def finish(self) -> None:
        """Its workers have done all their work."""
        self._host.finish()

    def leave(self) -> None:
        """As after SIGTERM."""
        self._signalled(signal.SIGTERM)

    def abandon(self) -> None:
        """Leave the lease as a killed process does."""
        session = self._membership._session  # noqa: SLF001
        if session:
            session.orphan()

    async def _next(self) -> None:
        await super()._next()
        me, view = self._state.me, self._state.view
        if me.lease != self._member:
            self._member = me.lease
            self._tell("member", f"{me.lease:x}")
        now = view.round if view else None
        if now and (now.generation, now.phase) != self._seen:
            self._seen = (now.generation, now.phase)
            leads = "coordinator" if now.coordinator == me.lease else ""
            self._tell(now.phase.value, leads, now.generation)


class Agents:
    """The agents of this process, by their numbers."""

    def __init__(self, endpoint: str, job: str, nodes: int, ttl: int) -> None:
        self._etcd = EtcdConfig((endpoint,))
        self._job = job
        self._nodes = nodes
        self._ttl = ttl
        self._agents: dict[int, Simulated] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def do(self, command: str, number: int) -> None:
        """Do what a line of standard input asks for."""
        match command:
            case "start":
                self._lives[number] = asyncio.create_task(self._live(number))
            case "kill":
                self._agents[number].abandon()
                self._lives[number].cancel()
            case "fail":
                self._agents[number].fail()
            case "leave":
                self._agents[number].leave()

    async def end(self) -> None:
        """Kill all that still live."""
        for number, life in self._lives.items():
            if not life.done():
                self.do("kill", number)
        await asyncio.wait(self._lives.values())

    async def _live(self, number: int) -> None:
        config = AgentConfig(
            etcd=self._etcd,
            job=self._job,
            argv=("true",),
            node=f"node{number}",
            nproc=8,
            min_nodes=1,
            max_nodes=self._nodes,
            lease_ttl=self._ttl,
            settle=SETTLE,
            signals=(),
        )
        tell = partial(_tell, number)
        try:
            async with Client(self._etcd) as client:
                self._agents[number] = agent = Simulated(config, client, tell)
                await agent.live()
        except ElasticEtcdError as error:
            tell("error", str(error))
        else:
            tell("left")


def _tell(number: int, what: str, detail: str = "", generation: int = 0) -> None:
    print(json.dumps([time.monotonic(), number, what, detail, generation]))


async def main(endpoint: str, job: str, nodes: int, ttl: int) -> None:
    """Follow the commands until standard input ends."""
    agents = Agents(endpoint, job, nodes, ttl)
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
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
