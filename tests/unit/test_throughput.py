"""When an agent publishes how fast its workers are: while somebody looks, and one at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from elastic_etcd.agent.followers.throughput import Throughput
from elastic_etcd.core.lifecycle import Event, Finding, Published, State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Keys, Pace, Watched, decode
from elastic_etcd.core.txn import Delete, Put
from elastic_etcd.core.view import Narrow, View
from elastic_etcd.protocol.activity import Activity, Doing

KEYS = Keys("/elastic_etcd/j")
SOON = Watched(0.5)


class Node:
    """A node with one worker, which makes ten steps between two looks."""

    def __init__(self) -> None:
        self.inbox = self
        self.steps = 0
        self.state = state(None)
        self.published: list[Pace | None] = []
        self.open = 0
        self.answers = True
        self.news = asyncio.Event()
        self.throughput = Throughput(KEYS, *2 * [self])  # type: ignore[arg-type]

    def activities(self) -> list[tuple[Any, Activity]]:
        self.steps += 10
        return [(None, Activity(Doing.STEP, 0.1, self.steps, 0.1))]

    def put(self, found: Finding) -> None:
        self.open += 1
        assert self.open == 1, "the last one was not answered"
        (operation,) = found.txn.then
        assert isinstance(operation, Put | Delete)
        assert operation.key == KEYS.pace(0xB)
        put = isinstance(operation, Put)
        self.published.append(decode(Pace, operation.value, lease=0xB) if put else None)  # type: ignore[union-attr]
        self.news.set()
        if self.answers:
            self.answer()

    def answer(self) -> None:
        self.open -= 1
        self.see(self.state, Published("throughput", ok=True))

    def see(self, now: State, event: Event | None = None) -> None:
        """The agent is in that state."""
        before, self.state = self.state, now
        self.throughput.see(before, event or Tick(), now)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.published) < count:
                self.news.clear()
                await self.news.wait()


def state(watched: Watched | None, running: int = 1) -> State:
    view = View(9, Narrow(), watched=watched)
    return State(Local("r", 0xB, 2, 2, acked=1, running=running, ran=1), 1, view=view)


@asynccontextmanager
async def following(node: Node) -> AsyncIterator[None]:
    task = asyncio.create_task(node.throughput.run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_it_is_published_while_somebody_looks_and_then_removed() -> None:
    node = Node()
    async with following(node):
        await asyncio.sleep(0.2)
        assert not node.steps, "nobody looks"
        node.see(state(SOON))
        await node.until(2)
        first, second = node.published
        assert first
        assert second
        assert second.step == first.step + 10
        assert 0 < second.per_second <= 10 / 0.25 + 1
        node.see(state(None))
        await node.until(3)
        assert node.published[2] is None
        looks = node.steps
        await asyncio.sleep(0.6)
        assert (node.steps, len(node.published)) == (looks, 3)


async def test_the_next_one_waits_for_an_answer_and_a_removal_comes_last() -> None:
    node = Node()
    node.answers = False
    async with following(node):
        node.see(state(SOON))
        await node.until(1)
        await asyncio.sleep(0.6)
        assert len(node.published) == 1
        node.see(state(None))
        node.answers = True
        node.answer()
        await node.until(2)
        assert node.published[1] is None


async def test_nothing_is_published_where_no_worker_runs() -> None:
    node = Node()
    async with following(node):
        node.see(state(SOON, running=0))
        await asyncio.sleep(0.7)
        assert not node.published
