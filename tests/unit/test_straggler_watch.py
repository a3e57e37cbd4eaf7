"""What an agent tells of its own steps, when it does, and which lines of the coordinator's."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers import straggler_watch
from elastic_etcd.agent.followers.straggler_watch import StragglerWatch
from elastic_etcd.core import stragglers
from elastic_etcd.core.lifecycle import Event, Finding, Published, State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Keys,
    Limits,
    Master,
    Participant,
    Phase,
    Round,
    StepTime,
    Stragglers,
    decode,
)
from elastic_etcd.core.stragglers import AGAIN
from elastic_etcd.core.txn import Put
from elastic_etcd.core.view import Everything, Narrow, View
from elastic_etcd.protocol.activity import Activity, Doing

NOW = Round(1, Phase.FINAL, 0xA, "why", "r", "n1", 2, 2, Master("n1", 80))
MEASURED = Activity(Doing.STEP, 0.1, 60, 0.6, usual=0.6, outside=0.5, measured=10)


class Node:
    """A node with one worker, and what its agent publishes."""

    def __init__(self) -> None:
        self.inbox = self
        self.state = state()
        self.at = MEASURED
        self.told: list[StepTime] = []
        self.lines: list[Stragglers] = []
        self.looks = 0
        self.watch = StragglerWatch(Keys("/elastic_etcd/j"), *2 * [self])  # type: ignore[arg-type]

    def activities(self) -> list[tuple[Any, Activity]]:
        self.looks += 1
        return [(None, self.at)]

    def put(self, found: Finding) -> None:
        put = next(put for put in found.txn.then if isinstance(put, Put))
        now = self.state
        if put.key.endswith("/stragglers"):
            self.lines.append(decode(Stragglers, put.value))
            assert now.view
            now = replace(now, view=replace(now.view, stragglers=self.lines[-1]))
        else:
            self.told.append(decode(StepTime, put.value, lease=0xB))
        self.see(now, Published(found.by, ok=True))

    def see(self, now: State, event: Event | None = None) -> None:
        """The agent is in that state."""
        before, self.state = self.state, now
        self.watch.see(before, event or Tick(), now)

    async def look(self, at: Activity) -> list[float]:
        """What it has told once it has seen its worker there."""
        self.at, before = at, self.looks
        async with asyncio.timeout(60):
            while self.looks < before + 2:  # noqa: ASYNC110 - a page has no events
                await asyncio.sleep(0.01)
        return [time.outside for time in self.told]


def state(nodes: int = 2, factor: float = 1.5, found: Stragglers | None = None) -> State:
    now = replace(NOW, nodes=nodes, world_size=nodes)
    view = View(9, Narrow(), round=now, stragglers=found)
    local = Local("r", 0xB, 2, 2, acked=1, running=1, ran=1)
    return State(local, 1, view=view, limits=Limits(1, 2, straggler_factor=factor))


@asynccontextmanager
async def telling(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(straggler_watch, "_PERIOD", 0.01)
    monkeypatch.setattr(straggler_watch, "_A_SECOND", 1000)
    task = asyncio.create_task(node.watch.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_it_is_told_when_fifty_steps_have_shown_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    node.see(state())
    async with telling(node, monkeypatch):
        assert await node.look(MEASURED._replace(measured=9, outside=0.0)) == []
        assert await node.look(MEASURED) == [0.5]
        assert await node.look(MEASURED._replace(measured=19, outside=0.9)) == [0.5]
        assert await node.look(MEASURED._replace(measured=20, outside=0.54)) == [0.5]
        assert await node.look(MEASURED._replace(measured=30, outside=0.9)) == [0.5, 0.9]
    assert node.told[0] == StepTime(0xB, 1, 0.5, 0.6)


@pytest.mark.parametrize("alone", [state(nodes=1), state(factor=0.0)], ids=["one node", "off"])
async def test_nothing_is_told_where_nobody_is_compared(
    monkeypatch: pytest.MonkeyPatch, alone: State
) -> None:
    node = Node()
    node.see(alone)
    async with telling(node, monkeypatch):
        await asyncio.sleep(0.2)
        assert node.looks == 0
        node.see(state())
        assert await node.look(MEASURED) == [0.5]


async def test_a_line_is_told_once_and_an_old_one_never(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    node, old = Node(), Stragglers(1, 4, "n1 is slow ...", ("n1",))
    new = Stragglers(1, 5, "n2 is slow ...", ("n1", "n2"))
    for found in (old, old, new, new):
        node.see(state(found=found))
    over = Stragglers(1, 6, f"n2 is {AGAIN}", ("n1",))
    node.see(state(found=over))
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told == [("WARNING", "n2 is slow ..."), ("INFO", over.line)]


@pytest.mark.parametrize("lasting", [0.0, 600.0])
async def test_n4_a_node_is_named_when_it_was_slow_for_long_and_once_in_ten_minutes(
    monkeypatch: pytest.MonkeyPatch, lasting: float
) -> None:
    """At the border it would be named again and again."""
    monkeypatch.setattr(stragglers, "LASTING", lasting)
    node = Node()
    slow, fast = StepTime(0xA, 1, 0.9, 1.0), StepTime(0xA, 1, 0.5, 1.0)
    world = tuple(Participant(0xA + n, f"n{n + 1}", 1, n, n) for n in range(2))
    other = StepTime(0xB, 1, 0.5, 1.0)
    async with telling(node, monkeypatch):
        for time in (slow, fast, slow, fast):
            now = state(found=node.lines[-1] if node.lines else None)
            assert now.view
            view = replace(now.view, coverage=Everything(), world=world, step_times=(time, other))
            node.see(replace(now, view=view, local=replace(now.local, lease=0xA)))
            await node.look(MEASURED)
    assert [found.line.partition(":")[0] for found in node.lines] == (
        [] if lasting else ["n1 is slow", f"n1 is {AGAIN}"]
    )
