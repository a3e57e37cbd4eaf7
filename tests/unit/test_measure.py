"""Where the seconds of a node's worlds go, from its states and its workers' pages."""

import asyncio
import logging
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers.recovery import Recovery
from elastic_etcd.agent.followers.time_accounting import TimeAccounting
from elastic_etcd.core.lifecycle import Finished, Life, State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Cause, Limits, Master, Page, Participant, Phase, Round, Spent
from elastic_etcd.core.view import Narrow, View
from elastic_etcd.protocol.activity import SIZE, ActivityPage, Doing
from elastic_etcd.system.kernel import sealed_memfd
from tests.support.aio import elapse

OWN, OTHER = 0xA, 0xB
FIRST = Round(1, Phase.FINAL, OWN, "the job begins", "r", "n1", 1, 1, Master("n1", 80))
PARTS = ("rendezvous", "start", "first_step", "trained", "detect", "stop", "unknown")


def state(now: Round | None, owner: int = OWN, **own: Any) -> State:
    world = Page(now.generation if now else 0, (Participant(owner, "n", 1, 0, 0),))
    view = View(9, Narrow(), round=now, page=world)
    return State(Local("r", OWN, **own), 1, Life.MEMBER, view=view, limits=Limits(1, 2))


def claimed(generation: int, **more: Any) -> Round:
    return Round(generation, Phase.SETUP, OWN, "rank 0 on n1 exited 1", "r", "n1", **more)


class Node:
    """An agent's states one after the other, and its worker's page."""

    def __init__(self) -> None:
        self.page = ActivityPage(sealed_memfd("activity", SIZE))
        self.ended = 0.0
        workers: Any = SimpleNamespace(pages=(self.page,))
        self.accounting = TimeAccounting(workers)
        self.state = State(Local(""), 1)
        self.see(state(None))

    def see(self, now: State) -> None:
        """The agent is in that state."""
        before, self.state = self.state, now
        self.accounting.see(before, Tick(), now)

    async def begin(self, final: Round) -> None:
        self.page.clear()
        self.see(state(final, running=final.generation, ran=final.generation))
        await elapse(0.05)

    async def steps(self, number: int) -> None:
        for _ in range(number):
            self.page.step(told=True)
            await elapse(0.05)

    def commit(self) -> None:
        with self.page.during(Doing.COMMIT):
            pass

    async def end(self, generation: int) -> Spent:
        """It fails, and its workers are stopped."""
        now, ran = claimed(generation + 1), {"ran": generation}
        self.see(state(now, running=generation, stopping=True, **ran))
        early = self.accounting.spent_on(generation)
        await elapse(0.05)
        self.ended = asyncio.get_running_loop().time()
        self.see(state(now, **ran))
        spent = self.accounting.spent_on(generation)
        assert early
        assert spent
        assert early.stop == 0.0 < spent.stop
        return spent


async def test_every_second_of_a_world_has_its_place() -> None:
    loop = asyncio.get_running_loop()
    before, node, began = loop.time(), Node(), loop.time()
    await elapse(0.05)
    await node.begin(FIRST)
    await node.steps(3)
    node.commit()
    await node.steps(2)
    spent = await node.end(1)
    after = loop.time()
    assert node.accounting.spent_on(2) is None
    assert (spent.worlds, spent.planned, spent.steps, spent.commits) == (1, 0, 5, 1)
    assert spent.trained > spent.again > 0
    assert spent.pause == spent.unknown == 0.0
    whole, rounding = sum(getattr(spent, part) for part in PARTS), 1e-3 * len(PARTS)
    assert node.ended - began - rounding <= whole <= after - before + rounding
    assert min(spent.rendezvous, spent.start, spent.detect, spent.stop) > 0


async def test_n8_a_change_of_world_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """With the restart that it has used, the time since the last step, and what is lost of that."""
    caplog.set_level(logging.INFO, "elastic_etcd")
    node, changed = (
        Node(),
        replace(FIRST, generation=2, reason="rank 0 on n1 exited 1", trained=0.0),
    )
    await node.begin(FIRST)
    await node.steps(1)
    node.commit()
    await node.steps(4)
    await node.end(1)
    await node.begin(replace(changed, restarts=1))
    await node.end(2)
    await node.begin(replace(changed, generation=3, reason="n2 is lost", restarts=1, trained=9.0))
    first, failed, lost = caplog.messages
    place = "group rank 0 of 1, rank 0 of 1"
    assert first == f"generation 1 (the job begins): {place}"
    cost = r"\d\.\d s after the last step, \d\.\d s are trained again"
    assert re.fullmatch(
        rf"generation 2 \(rank 0 on n1 exited 1\): {place}, restart 1 of 3, {cost}", failed
    )
    assert re.fullmatch(
        rf"generation 3 \(n2 is lost\): {place}, \d\.\d s after the last step", lost
    )


async def test_the_pause_lasts_over_a_world_without_a_step() -> None:
    node = Node()
    await node.begin(FIRST)
    node.commit()
    await node.steps(2)
    await node.end(1)
    await node.begin(replace(FIRST, generation=2))
    bad = await node.end(2)
    assert bad.start > 0
    assert bad.trained == bad.pause == bad.steps == 0
    await node.begin(replace(FIRST, generation=3))
    await node.steps(2)
    good = await node.end(3)
    assert good.pause > bad.rendezvous + bad.start + bad.stop + good.rendezvous
    assert good.again == good.trained  # nothing was committed


async def test_what_comes_after_the_last_step_of_a_good_end_is_training() -> None:
    node = Node()
    await node.begin(FIRST)
    await node.steps(2)
    await elapse(0.1)
    over = state(FIRST, running=1, ran=1)
    node.see(replace(over, result=Finished()))
    spent = node.accounting.spent_on(1)
    assert spent
    assert spent.trained > 0.15
    assert spent.detect == spent.again == 0.0


async def test_what_others_still_train_when_this_node_is_done_is_training() -> None:
    node = Node()
    await node.begin(FIRST)
    await node.steps(1)
    ran = state(FIRST, running=1, ran=1)
    node.see(replace(ran, result=Finished()))
    await elapse(0.2)
    done = replace(state(FIRST, ran=1), result=Finished())
    node.see(done)
    early = node.accounting.spent_on(1)
    await elapse(0.2)
    node.see(done)
    spent = node.accounting.spent_on(1)
    assert early
    assert spent
    assert early.trained >= 0.2
    assert spent.trained >= early.trained + 0.19
    assert spent.detect == spent.again == 0.0
    node.see(replace(done, view=state(claimed(2)).view))
    over = asyncio.get_running_loop().time()
    await elapse(0.1)
    node.see(replace(done, view=state(claimed(2)).view))
    await node.begin(replace(FIRST, generation=2))
    began = asyncio.get_running_loop().time()
    await node.steps(1)
    assert 0.1 <= (await node.end(2)).rendezvous <= began - over + 1e-3


@pytest.mark.parametrize("doing", [Doing.COMMIT, Doing.SAVE, Doing.QUIET])
async def test_what_is_no_step_is_training_too(doing: Doing) -> None:
    node = Node()
    await node.begin(FIRST)
    await node.steps(1)
    with node.page.during(doing):
        await elapse(0.2)
        spent = await node.end(1)
    assert spent.trained >= 0.2
    assert spent.detect == 0.0


async def test_a_start_between_two_looks_is_known() -> None:
    """The worker is in ee.run, makes its group and ends its first step before anybody looks."""

    def start(page: ActivityPage) -> None:
        time.sleep(0.1)
        with page.during(Doing.INIT):
            time.sleep(0.2)
        page.step(told=True)

    node = Node()
    node.page.clear()
    node.see(state(FIRST, running=1, ran=1))
    start(node.page)
    spent = await node.end(1)
    assert spent.start >= 0.1
    assert spent.first_step >= 0.2


async def test_a_script_whose_steps_nobody_sees() -> None:
    node = Node()
    await node.begin(FIRST)
    spent = await node.end(1)
    assert spent.unknown > 0
    assert spent.start == spent.first_step == spent.trained == 0.0


async def test_a_page_that_comes_after_its_round_cuts_no_rendezvous() -> None:
    node = Node()
    await node.begin(FIRST)
    await node.steps(1)
    await node.end(1)
    await elapse(0.2)
    second = replace(FIRST, generation=2)
    first, ran = state(FIRST).view, Local("r", OWN, ran=1)
    assert first
    node.see(State(ran, 1, Life.MEMBER, view=View(9, Narrow(), round=second, page=first.page)))
    await node.begin(second)
    assert (await node.end(2)).rendezvous >= 0.2


async def test_a_spare_knows_how_long_others_have_trained() -> None:
    node = Node()
    others = replace(FIRST, coordinator=OTHER, generation=4)
    node.see(state(others, OTHER, acked=4))
    await elapse(0.05)
    node.see(state(claimed(5)))
    spent = node.accounting.spent_on(4)
    assert spent
    assert spent.unknown >= 0.05
    await elapse(0.05)
    await node.begin(replace(FIRST, generation=5, cause=Cause.JOIN))
    await node.steps(1)
    taken = await node.end(5)
    assert taken.planned == 1
    assert 0.05 <= taken.rendezvous < 10
    assert taken.pause == 0.0


async def test_a_spare_that_joins_again_knows_it_too() -> None:
    node, loop = Node(), asyncio.get_running_loop()
    others = replace(FIRST, coordinator=OTHER, generation=4)
    began = loop.time()
    node.see(state(others, OTHER, acked=4))
    await elapse(0.2)
    node.see(State(Local("r"), 1, Life.JOINING))
    await elapse(0.1)
    node.see(State(Local("r", OWN), 1, Life.MEMBER))
    node.see(state(others, OTHER))
    await elapse(0.1)
    node.see(state(claimed(5)))
    spent = node.accounting.spent_on(4)
    assert spent
    assert 0.39 <= spent.unknown <= loop.time() - began + 1e-3


def test_a_job_that_begins_anew_is_no_change_of_world() -> None:
    """Somebody has removed all of its keys."""
    recovery = Recovery()
    for cause in (Cause.BEGIN, Cause.LOST):
        recovery.end_world(10.0, 2.0)
        recovery.begin_world(cause, 13.0)
        recovery.train(14.0)
    assert {cause: n for cause, n in recovery.restarts.items() if n} == {Cause.LOST: 1}
    assert {cause: s for cause, s in recovery.lost.items() if s} == {Cause.LOST: 6.0}
