"""This node's agent beside torchrun's own: torchrun runs the workers, this one agrees on worlds.

`python -m elastic_etcd.plugin.torchrun_agent FD PID FLAG...`: it talks over the socket FD to the
handler in torchrun's process PID (torchrun.py), and leaves the job when that process ends. It is a
process of its own, so that a torchrun that forks, or whose main thread waits for a store, neither
shares its connections nor keeps its lease from being renewed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_etcd import launch
from elastic_etcd.agent.agent import Agent, live
from elastic_etcd.agent.followers.loop_watchdog import Watchdog
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.store import bind
from elastic_etcd.core.lifecycle import WorkerEnded, WorkersGone
from elastic_etcd.core.schema import Failure, Limits, Master, Participant, Round
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.etcd.client import Client
from elastic_etcd.protocol import messages
from elastic_etcd.system.processes import open_pidfd
from elastic_etcd.system.startup import reset_signals

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct

    from elastic_etcd.agent.address import Reached
    from elastic_etcd.agent.config import AgentConfig
    from elastic_etcd.agent.inbox import Inbox, Tasks
    from elastic_etcd.protocol.messages import Change, Interrupt

# They are torchrun's to handle: this process ends when it does.
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_ENDED = "torchrun has ended"
_DONE = "the workers of this node have succeeded, and others go on"
_WHY = "torchrun has begun the workers of this node anew, or given them up; its log says why"


def main(argv: list[str]) -> int:
    """Be the agent until torchrun or the job has ended; gives the exit code."""
    reset_signals()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(argv[0]))
    error = ""
    try:
        # torchrun reads those for itself.
        env = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
        config = launch.parse([*argv[2:], "--no-python", sys.executable], env)
        config = replace(config, signals=(), command="")
        launch.set_up_logging(config)
        code = asyncio.run(_run(config, channel, int(argv[1])))
    except ElasticEtcdError as why:
        code, error = why.exit_code, str(why)
    channel.setblocking(True)
    with suppress(OSError):  # torchrun has ended
        channel.send(messages.encode(messages.JobOver(code, error)))
    return code


async def _run(config: AgentConfig, channel: socket.socket, torchrun: int) -> int:
    if config.etcd is None:
        raise UsageError("no etcd: add --rdzv-endpoint HOST:2379,..., the same on every node")
    channel.setblocking(False)
    async with AsyncExitStack() as scope:
        await scope.enter_async_context(Watchdog(config.lease_ttl))
        client = await scope.enter_async_context(Client(config.etcd))

        def build(tasks: Tasks) -> Agent:
            workers = TorchrunWorkers(config.node, torchrun, channel, tasks.inbox)
            agent = Agent(config, tasks, Membership(client, config, tasks), workers)
            workers.follow(agent.leave)
            return agent

        return await live(build)


class TorchrunWorkers:
    """The workers that torchrun runs on this node: they start and stop by messages."""

    finished = False

    def __init__(self, node: str, pid: int, channel: socket.socket, inbox: Inbox) -> None:
        self.generation = 0
        self._node, self._pid = node, pid
        self._channel = channel
        self._inbox = inbox
        self._listener: socket.socket | None = None
        self._since = 0.0
        self._rank = 0
        self._leave: Callable[[str], None]
        self._runs = self._succeeded = self._over = False
        self._ends = False  # whether torchrun knows that its world ends

    def follow(self, leave: Callable[[str], None]) -> None:
        """Heed torchrun's messages; `leave` the job when it has ended, or says that it ends."""
        loop = asyncio.get_running_loop()
        torchrun = open_pidfd(self._pid)

        def end(why: str) -> None:
            if self._over:
                return
            loop.remove_reader(torchrun)
            loop.remove_reader(self._channel)
            leave(why)
            self._over = True  # from here on no worker runs
            if self._runs and self._ends:  # nobody asks for that a second time
                self._gone()

        self._leave = end
        loop.add_reader(torchrun, end, _ENDED)
        loop.add_reader(self._channel, self._read)

    def _read(self) -> None:
        packet = b""
        with suppress(ConnectionError):
            packet = self._channel.recv(messages.LONGEST)
        match messages.from_torchrun(packet) if packet else messages.Done(success=False):
            case messages.Wanted():
                self._wanted()
            case messages.Done(success=True) if (
                not self._ends
            ):  # all workers of the last world exited 0
                if self._runs:
                    self._succeeded = True
                    self._inbox.put(WorkerEnded(self.generation, None))
                    self._gone()
            case messages.Done():
                self._leave(_ENDED)

    async def end_former_agents_leftovers(self) -> None:
        """No groups of processes are ours to find: they are torchrun's."""

    async def prestart(self) -> None:
        """There is nothing to fork."""

    def offer(self, generation: int, reached: Reached) -> Master:
        """Listen for the store of `generation`. Raises OSError."""
        del generation
        self.close()
        self._listener, port = bind(reached.address)
        return Master(reached.address, port)

    def start(self, now: Round, part: Participant, limits: Limits) -> None:
        """Give torchrun its world."""
        del limits
        assert now.master is not None  # it is final
        self.generation = now.generation
        self._runs, self._ends = True, False
        if self._succeeded:  # torchrun waits in its barrier at the end, and can't take part
            self.close()
            asyncio.get_running_loop().call_soon(self._leave, _DONE)
            return
        self._rank = part.group_rank
        self._since = asyncio.get_running_loop().time()
        world = messages.Formed(
            now.generation, part.group_rank, now.nodes, now.master.addr, now.master.port
        )
        leads = self._listener if part.group_rank == 0 else None
        self._send(world, [leads.fileno()] if leads else [])
        self.close()

    def stop(
        self,
        grace: float | None,
        notice: Change | Interrupt | None = None,
        park: float | None = None,
    ) -> None:
        """Tell torchrun that its world ends: it stops its workers in its own time."""
        del grace, notice, park
        if self._over and self._runs:
            self._gone()
        elif self._runs and not self._ends:
            self._ends = True
            self._send(messages.Ended())

    def _wanted(self) -> None:
        """No worker of the last world is left: they have failed, unless that world was to end."""
        if not self._runs:
            return
        if not self._ends:
            uptime = asyncio.get_running_loop().time() - self._since
            failure = Failure(self._node, self._rank, 0, self._pid, 1, uptime, _WHY)
            self._inbox.put(WorkerEnded(self.generation, failure))
        self._gone()

    def _gone(self) -> None:
        self._runs = False
        self._inbox.put(WorkersGone(self.generation))

    def tell_leaving(self, number: signal.Signals = signal.SIGTERM) -> None:
        """There is nobody to tell."""

    async def end(self, reason: str) -> None:
        """No worker is left."""

    async def end_leftovers(self) -> None:
        """There are none of this process's."""

    async def kill_leftovers(self) -> None:
        """As above."""

    def close(self) -> None:
        """Listen for no store any more."""
        if self._listener:
            self._listener.close()
            self._listener = None

    def _send(self, message: Struct, descriptors: list[int] | None = None) -> None:
        with suppress(OSError):  # torchrun has ended
            socket.send_fds(self._channel, [messages.encode(message)], descriptors or [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
