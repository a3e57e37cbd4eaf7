"""What one agent does about workers that do not come to their first step."""

import asyncio
import os
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers import hang_watch
from elastic_etcd.core.schema import Hang, NodeSteps, RankDoing, decode
from elastic_etcd.core.txn import Put
from elastic_etcd.protocol.activity import Activity, Doing
from tests.unit.test_hang_watch import Node, state

AGO = 600.0  # that the world began
HOURS = 36_000.0


class Starting(Node):
    """A node with one worker that begins, in a world that began AGO."""

    def __init__(self, at: Activity) -> None:
        super().__init__(os.getpid(), 600.0, 60.0)
        self.at, self.looks = at, 0
        self.watch._generation = self.generation
        self.watch._began -= AGO

    def activities(self) -> list[tuple[Any, Activity]]:
        self.looks += 1
        return super().activities()

    async def seen(self, at: Activity, generation: int = 1) -> None:
        """The agent has looked at a worker there, more than once."""
        self.at, self.generation = at, generation
        later = self.looks + 10
        await self.until(lambda: self.looks > later)

    @property
    def doing(self) -> list[RankDoing]:
        """Where the worker was, as it was published last, for longer than the world is there."""
        put = self.published[-1].then[0]
        assert isinstance(put, Put)
        ranks = decode(NodeSteps, put.value, lease=0xB).ranks
        assert all(rank.seconds >= AGO for rank in ranks)
        return [rank.doing for rank in ranks]


def starting(seconds: float, **more: Any) -> Activity:
    return Activity(Doing.STARTING, seconds, 0, 0.0, **more)


def making_a_group(seconds: float) -> Activity:
    return Activity(Doing.INIT, seconds, 0, 0.0, since_init=seconds)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_PERIOD", 0.01)


@pytest.mark.parametrize(
    ("at", "doing"),
    [
        (starting(5.0), RankDoing.BEFORE),
        (making_a_group(5.0), RankDoing.GROUP),
        (starting(5.0, since_init=9.0), RankDoing.FIRST),
        (starting(HOURS, since_init=HOURS, commits=1), None),
        (Activity(Doing.STEP, 60.0, 1, 0.0), None),
        (Activity(Doing.SAVE, HOURS, 0, 0.0), None),
        (Activity(Doing.QUIET, HOURS, 0, 0.0, "downloads"), None),
        (Activity(Doing.DONE, HOURS, 0, 0.0), None),
    ],
)
async def test_a_world_without_a_step_for_so_long_is_asked_about(
    quick: None, at: Activity, doing: RankDoing | None
) -> None:
    node = Starting(at)
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    if doing:
        await node.until(lambda: node.published)
        assert node.doing == [doing]
    else:
        await node.seen(at)
        assert not node.published
    task.cancel()


async def test_a_start_has_its_time_anew_in_each_world(quick: None) -> None:
    node = Starting(starting(5.0))
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    await node.seen(node.at, generation=2)
    assert not node.published
    task.cancel()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("at", [making_a_group(5.0), starting(5.0)], ids=["group", "before"])
async def test_a_start_that_takes_too_long_is_a_failure_whatever_is_done_about_hangs(
    quick: None, caplog: pytest.LogCaptureFixture, at: Activity, begins: bool
) -> None:
    node = Starting(at)
    task = asyncio.create_task(node.watch.run())

    def reports(hang: Hang | None) -> None:
        now = state(hang)
        assert now.limits
        node.see(replace(now, limits=replace(now.limits, hang_action="report")))

    reports(None)
    await node.until(lambda: node.said == [1])
    reports(Hang(1, 1, 700.0))
    await node.seen(node.at)
    if begins:
        node.at = Activity(Doing.STEP, 0.1, 1, 0.1)
    found = Hang(1, 2, 700.0, evidence=True, line="a start", alarm=True, rank=0, start=True)
    reports(found)
    await node.until(lambda: "a start" in caplog.text)
    assert node.given_up == ([] if begins else [0])
    task.cancel()


async def test_a_process_that_a_debugger_holds_is_not_too_late(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "is_traced", lambda _: True)
    node = Starting(making_a_group(5.0))
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    await node.seen(node.at)
    assert not node.published
    node.see(state(Hang(1, 1, 700.0)))  # another node has found somebody who waits
    await node.until(lambda: node.published)
    assert node.doing == [RankDoing.TRACED]
    task.cancel()
