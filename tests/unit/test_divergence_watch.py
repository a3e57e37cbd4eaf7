"""What an agent does when a worker says that replicas differ."""

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers.divergence_watch import DivergenceWatch
from elastic_etcd.core.lifecycle import Finding, Published, State, Tick, WorkersDiverged
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    MOST_DRAINS,
    Divergence,
    Drain,
    Keys,
    Limits,
    Master,
    Phase,
    Requests,
    Round,
    Scale,
    decode,
)
from elastic_etcd.core.txn import Compare, Put
from elastic_etcd.core.view import Narrow, View

KEYS = Keys("/elastic_etcd/j")
LINE = "replicas differ: rank 2 on n2: model.0.weight; the other 2 ranks agree"
NOW = Round(3, Phase.FINAL, 0xA, "why", "r", "n1", 2, 3, Master("n1", 80))


class Node:
    """An agent in generation 3, and what it has its parts do."""

    def __init__(self, action: str, *, least: int = 1, wanted: Requests | None = None) -> None:
        self.inbox = self
        self.limits = Limits(least, 2, on_divergence=action)  # type: ignore[arg-type]
        self.refused = 0  # Txns that others come before
        self.written: list[Any] = []
        self.given_up: list[tuple[int | None, str]] = []
        self.watch = DivergenceWatch("n2", KEYS, *2 * [self])  # type: ignore[arg-type]
        self.state = self.seen(9, wanted)

    def seen(self, revision: int, wanted: Requests | None) -> State:
        view = View(revision, Narrow(), round=NOW, wanted=wanted, wanted_mod=revision)
        return State(Local("r", 0xB, 2, 2, running=3), 1, view=view, limits=self.limits)

    def give_up(self, rank: int | None, hang: str, message: str) -> None:
        assert not message
        self.given_up.append((rank, hang))

    def put(self, found: Finding) -> None:
        ok = not self.refused
        if ok:
            (put,) = (put for put in found.txn.then if isinstance(put, Put))
            kind = Divergence if put.key == KEYS.divergence else Requests
            self.written.append(decode(kind, put.value))
            if kind is Requests:
                assert Compare(KEYS.wanted, "mod", self.state.view.revision) in found.txn.compare  # type: ignore[union-attr]
        else:
            self.refused -= 1
            others = Requests((Drain("n7"),))
            self.see(self.seen(self.state.view.revision + 1, others))  # type: ignore[union-attr]
        self.see(self.state, Published(found.by, ok))

    def see(self, state: State, event: Any = None) -> None:
        before, self.state = self.state, state
        self.watch.see(before, event or Tick(), state)

    async def hears(self, *events: WorkersDiverged) -> "Node":
        self.see(self.state)
        for event in events:
            self.see(self.state, event)
        async with asyncio.timeout(10):
            while self.watch.news.is_set():
                self.watch.news.clear()
                await self.watch.hear()
        return self


def diverged(
    rank: int, line: str = LINE, *, named: bool = False, alone: bool = False, generation: int = 3
) -> WorkersDiverged:
    return WorkersDiverged(generation, rank, line, named, alone)


async def test_t6_the_agent_of_rank_0_tells_of_all_in_the_world() -> None:
    node = await Node("restart").hears(diverged(0), diverged(0, "again"))
    assert node.written == [Divergence(3, (LINE,)), Divergence(3, (LINE, "again"))]
    assert not node.given_up


async def test_t6_the_newest_lines_are_told() -> None:
    node = await Node("report").hears(*(diverged(0, str(n)) for n in range(12)))
    assert node.written[-1].lines == tuple(map(str, range(4, 12)))


@pytest.mark.parametrize("action", ["report", "restart", "drain"])
@pytest.mark.parametrize("alone", [True, False])
async def test_t6_a_worker_that_is_wrong_for_certain_is_acted_on(
    action: str, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    node = await Node(action).hears(diverged(2, named=True, alone=alone))
    assert node.given_up == ([(2, LINE)] if alone and action == "restart" else [])
    drains = [drain.node for each in node.written for drain in each.drains]
    assert drains == (["n2"] if alone and action == "drain" else [])
    assert caplog.messages == [LINE]


async def test_t6_a_drain_goes_beside_what_people_ask_for_meanwhile() -> None:
    node = Node("drain")
    node.refused = 2
    await node.hears(diverged(2, named=True, alone=True))
    (asked,) = node.written
    assert [drain.node for drain in asked.drains] == ["n7", "n2"]
    assert asked.drains[1].by == "--on-divergence drain"


@pytest.mark.parametrize("drained", [True, False])
async def test_t6_a_node_that_is_drained_or_needed_is_not_drained(
    drained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    wanted = Requests((Drain("n2"),)) if drained else None
    node = Node("drain", least=1 if drained else 2, wanted=wanted)
    await node.hears(diverged(2, named=True, alone=True))
    assert not node.written
    told = [] if drained else ["n2 is not drained: fewer nodes than --nnodes 2:2 would be left"]
    assert caplog.messages == [LINE, *told]


async def test_t6_a_job_may_be_scaled_to_what_would_be_left() -> None:
    """The limits of its spec stand, which no longer say how many nodes train."""
    wanted = Requests(scale=Scale(1, 1, run="r", instead_of="2:2"))
    node = await Node("drain", least=2, wanted=wanted).hears(diverged(2, named=True, alone=True))
    assert [drain.node for each in node.written for drain in each.drains] == ["n2"]


async def test_t6_more_drains_than_can_be_read_are_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody would heed any of them."""
    caplog.set_level(logging.WARNING)
    wanted = Requests(tuple(Drain(f"other{n}") for n in range(MOST_DRAINS)))
    node = await Node("drain", wanted=wanted).hears(diverged(2, named=True, alone=True))
    assert not node.written
    assert caplog.messages == [LINE, "n2 is not drained: no more nodes can be, undrain some"]


@pytest.mark.parametrize("running", [0, 4])
async def test_t6_what_comes_after_its_world_is_told_and_not_acted_on(running: int) -> None:
    """The node of the worker that is wrong may have begun the next world before."""
    node = Node("restart")
    node.state = replace(node.state, local=replace(node.state.local, running=running))
    await node.hears(diverged(0), diverged(2, named=True, alone=True))
    assert node.written == [Divergence(3, (LINE,))]
    assert not node.given_up


async def test_t6_what_comes_after_that_of_a_later_world_is_not_told() -> None:
    node = await Node("report").hears(diverged(0, generation=4), diverged(0))
    assert node.written == [Divergence(4, (LINE,))]
