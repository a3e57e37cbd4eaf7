"""An agent and its followers: what they see of its life, and how it writes what they find."""

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.agent import Agent, live
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.hang_watch import HangWatch
from elastic_etcd.agent.inbox import Follower, Inbox, Tasks
from elastic_etcd.agent.membership import Membership
from elastic_etcd.core.lifecycle import (
    Event,
    Finding,
    JobEnded,
    Joined,
    Life,
    Published,
    State,
    ViewChanged,
    WorkerEnded,
    WorkersGone,
    WriteDone,
)
from elastic_etcd.core.schema import Hang, Keys, Limits, Master, Participant, Round, decode
from elastic_etcd.core.txn import Compare, Put, Txn
from elastic_etcd.etcd.client import Client
from elastic_etcd.protocol.activity import Activity, Doing
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer
from tests.support.replay import replay

DEADLINE = 60.0
HUNG = Activity(Doing.STEP, 70.0, 6, 0.1)


class Workers:
    """One worker that starts at once, stands in its seventh step, and ends when it is told to."""

    finished = False

    def __init__(self, inbox: Inbox) -> None:
        self.generation = 0
        self.ended = False
        self._inbox = inbox
        output = SimpleNamespace(err=SimpleNamespace(tail=bytes))
        spec = SimpleNamespace(rank=0, env={})
        self._worker = SimpleNamespace(pid=os.getpid(), spec=spec, output=output)

    async def end_former_agents_leftovers(self) -> None: ...

    async def prestart(self) -> None: ...

    def offer(self, generation: int, reached: Reached) -> Master:
        return Master(reached.address, 1024 + generation)

    def tell_leaving(self, number: signal.Signals = signal.SIGTERM) -> None: ...

    def start(self, now: Round, part: Participant, limits: Limits) -> None:
        del part, limits
        self.generation = now.generation

    def stop(self, *_: object) -> None:
        self._inbox.put(WorkersGone(self.generation))

    def succeed(self) -> None:
        if not self.ended:
            self.ended = True
            self._inbox.put(WorkerEnded(self.generation, None))
            self._inbox.put(WorkersGone(self.generation))

    def activities(self) -> list[tuple[Any, Activity]]:
        return [(self._worker, HUNG)]

    def evidence_file(self, *_: int) -> Path | None:
        return None

    async def end(self, reason: str) -> None: ...

    async def end_leftovers(self) -> None: ...

    async def kill_leftovers(self) -> None: ...

    def close(self) -> None: ...


class Watching:
    """Keeps what it sees, and says when its condition has come true."""

    def __init__(self) -> None:
        self.seen: list[tuple[State, Event, State]] = []
        self._news = asyncio.Event()

    def see(self, before: State, event: Event, state: State) -> None:
        self.seen.append((before, event, state))
        self._news.set()

    async def until(self, condition: Callable[[State, Event], object]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not any(condition(state, event) for _, event, state in self.seen):
                self._news.clear()
                await self._news.wait()

    @property
    def kinds(self) -> list[type[Event]]:
        """Of all events, in order; of several of a kind in a row one."""
        kinds = [type(event) for _, event, _ in self.seen]
        return [b for a, b in zip([None, *kinds], kinds, strict=False) if a is not b]


def config(etcd: EtcdServer, prefix: str) -> AgentConfig:
    one = Limits(1, 1)
    return AgentConfig(
        etcd.config, "j", ("true",), "n1", 1, one, prefix=prefix, lease_ttl=5, signals=()
    )


def record(agent: Agent, folder: Path) -> Path:
    return agent._recorder.write(str(folder))


@asynchronous
async def test_a_follower_sees_each_event_between_two_states(
    etcd: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """And what it finds is written, answered, recorded and replayed."""
    watching, keys = Watching(), Keys(f"{prefix}/j")
    agents: list[Agent] = []
    async with Client(etcd.config) as client:

        def build(tasks: Tasks) -> Agent:
            async def find() -> None:
                await watching.until(lambda state, _: state.local.running)
                for mod in (0, 0):  # the second one is refused: there is such a key
                    before = sum(isinstance(event, Published) for _, event, _ in watching.seen)
                    fence = (Compare(f"{keys.root}/mine", "mod", mod),)
                    txn = Txn(fence, (Put(f"{keys.root}/mine", "found"),))
                    tasks.inbox.put(Finding("mine", txn))
                    await watching.until(
                        lambda *_, before=before: (
                            before
                            < sum(isinstance(event, Published) for _, event, _ in watching.seen)
                        )
                    )
                assert etcd.ctl("get", "--print-value-only", f"{keys.root}/mine") == "found\n"
                workers.succeed()

            workers = Workers(tasks.inbox)
            tasks.create(find())
            membership = Membership(client, config(etcd, prefix), tasks)
            agents.append(Agent(config(etcd, prefix), tasks, membership, workers, [watching]))
            return agents[0]

        assert await live(build) == 0
    befores, _, states = zip(*watching.seen, strict=True)
    assert befores[0].life is Life.JOINING
    assert states[:-1] == befores[1:]
    kinds = watching.kinds
    assert kinds[:3] == [Joined, ViewChanged, WriteDone]
    assert kinds[-1] is JobEnded
    assert [e for _, e, _ in watching.seen if isinstance(e, Published)] == [
        *(Published("mine", ok=True), Published("mine", ok=False)),
    ]
    path = record(agents[0], tmp_path)
    assert path.read_text().count('"type":"Publish","by":"mine"') == 2
    assert replay(path) == ""


@asynchronous
async def test_a_record_of_a_hang_has_what_was_written_of_it(
    etcd: EtcdServer, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching, keys = Watching(), Keys(f"{prefix}/j")
    agents: list[Agent] = []

    def line(state: State, _: Event) -> bool:
        return bool(state.view and state.view.hang and state.view.hang.line)

    async with Client(etcd.config) as client:

        def build(tasks: Tasks) -> Agent:
            async def end() -> None:
                await watching.until(line)
                workers.succeed()

            workers: Any = Workers(tasks.inbox)
            hangs = HangWatch((60.0, None), keys, workers, workers, tasks)
            tasks.create(hangs.run())
            tasks.create(end())
            followers: list[Follower] = [hangs, watching]
            membership = Membership(client, config(etcd, prefix), tasks)
            agents.append(Agent(config(etcd, prefix), tasks, membership, workers, followers))
            return agents[0]

        assert await live(build) == 0
    assert "rank 0 on n1 is in step 7 for 70 s" in caplog.text
    path = record(agents[0], tmp_path)
    assert replay(path) == ""
    found = [event.txn for _, event, _ in watching.seen if isinstance(event, Finding)]
    puts = [op for txn in found for op in txn.then if isinstance(op, Put)]
    hung = [decode(Hang, put.value) for put in puts if put.key == keys.hang]
    assert [(h.number, h.evidence, h.alarm) for h in hung] == [
        *((1, False, False), (2, True, False), (2, True, True)),
    ]
    steps = path.read_text().splitlines()
    assert sum('"Publish","by":"hangs"' in step for step in steps) == len(found)


@asynchronous
async def test_m11_a_node_for_which_there_is_no_port_is_ready_later(
    etcd: EtcdServer, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All ephemeral ports are in use for a moment."""

    class WithoutPort(Workers):
        refused = 0

        def offer(self, generation: int, reached: Reached) -> Master:
            if self.refused < 2:
                self.refused += 1
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            return super().offer(generation, reached)

        def start(self, now: Round, part: Participant, limits: Limits) -> None:
            super().start(now, part, limits)
            asyncio.get_running_loop().call_soon(self.succeed)

    async with Client(etcd.config) as client:

        def build(tasks: Tasks) -> Agent:
            membership = Membership(client, config(etcd, prefix), tasks)
            return Agent(config(etcd, prefix), tasks, membership, WithoutPort(tasks.inbox))

        assert await live(build) == 0
    lines = [line for line in caplog.messages if "no socket for the store" in line]
    assert lines == [
        "no socket for the store: Address already in use: this node is ready when there is one"
    ]
