"""Simulated agents of many jobs in one process, and a watcher of the probe key.

Commands come on standard input, [what, job, numbers], and what happened goes to standard output,
one JSON list a line: [time, what, job, number, detail].
"""

import asyncio
import json
import logging
import os
import sys
import time
from functools import partial

from elastic_etcd.agent import membership
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.txn import Get
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.mirror import Mirror

from .scale_agents import Simulated

membership.Mirror = Mirror  # type: ignore[attr-defined] # with its comparison, unlike scale's
PROBE = "/probe"


class Jobs:
    """The agents of this process, by their jobs and numbers."""

    def __init__(self, endpoint: str, nodes: int, ttl: int) -> None:
        self._etcd = EtcdConfig((endpoint,))
        self._nodes = nodes
        self._ttl = ttl
        self._agents: dict[tuple[str, int], Simulated] = {}
        self._lives: dict[tuple[str, int], asyncio.Task[None]] = {}

    def do(self, command: str, job: str, number: int) -> None:
        """Do what a line of standard input asks for; an agent may have ended by itself."""
        at = job, number
        if command == "start":
            self._lives[at] = asyncio.create_task(self._live(job, number))
        elif agent := self._agents.get(at):
            match command:
                case "kill":
                    agent.abandon()
                    self._lives[at].cancel()
                case "fail":
                    agent.fail()
                case "leave":
                    agent.leave()
                case "finish":
                    agent.finish()

    async def end(self) -> None:
        """Kill all that still live."""
        for job, number in tuple(self._agents):
            self.do("kill", job, number)
        if self._lives:
            await asyncio.wait(self._lives.values())

    async def probe(self) -> None:
        """Tell of each value of the probe key when it is seen here."""
        async with Client(self._etcd) as client:

            def changed() -> None:
                snapshot = mirror.snapshot()
                if snapshot and (kv := snapshot.kvs.get(PROBE)):
                    _tell("probe", "", os.getpid(), kv.value)

            mirror = Mirror(client, (Get(PROBE),), changed)
            async with mirror:
                await mirror.failed

    async def _live(self, job: str, number: int) -> None:
        config = AgentConfig(
            etcd=self._etcd,
            job=job,
            argv=("true",),
            node=f"node{number}",
            nproc=1,
            min_nodes=1,
            max_nodes=self._nodes,
            max_restarts=1 << 30,
            lease_ttl=self._ttl,
            settle=1.0,
            signals=(),
        )
        at = job, number
        try:
            async with Client(self._etcd) as client:
                tell = partial(self._heard, job, number)
                self._agents[at] = agent = Simulated(config, client, tell)
                await agent.live()
        except ElasticEtcdError as error:
            _tell("error", job, number, str(error))
        else:
            _tell("left", job, number)
        finally:
            self._agents.pop(at, None)
            self._lives.pop(at, None)

    def _heard(self, job: str, number: int, what: str, detail: str = "", _: int = 0) -> None:
        if what in ("member", "final"):
            _tell(what, job, number, detail)


def _tell(what: str, job: str, number: int, detail: str = "") -> None:
    print(json.dumps([time.monotonic(), what, job, number, detail]))


async def main(endpoint: str, nodes: int, ttl: int) -> None:
    """Follow the commands until standard input ends."""
    jobs = Jobs(endpoint, nodes, ttl)
    watcher = asyncio.create_task(jobs.probe())
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await commands.readline():
        command, job, numbers = json.loads(line)
        for number in numbers:
            jobs.do(command, job, number)
    watcher.cancel()
    await asyncio.wait({watcher})
    await jobs.end()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
