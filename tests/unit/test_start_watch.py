"""What is known of a start, and what one agent does about workers that do not begin."""

import asyncio
import os
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.followers import hang_watch, start_watch
from elastic_etcd.agent.followers.start_watch import StartWatch
from elastic_etcd.core.schema import Hang, Keys, NodeSteps, RankDoing, decode
from elastic_etcd.core.txn import Put
from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import Activity, ActivityPages, Doing
from tests.unit.prefork import BothWays, Outcome
from tests.unit.test_hang_watch import Node, state

pytestmark = pytest.mark.timeout(600)
SHOWN = {"ELASTIC_ETCD_SHOW_IMPORTS": "1"}

TELLS = """
import threading
import torch.distributed as dist
from elastic_etcd.protocol import activity

page = activity.look()
says = lambda: print(page.read().doing.name, page.read().importing > 0, flush=True)

def meet(url, **_):
    says()
    yield dist.HashStore(), 0, 1

says()
import is_imported
says()
try:
    import fails
except ValueError:
    says()
thread = threading.Thread(target=lambda: __import__("is_imported_aside"))
thread.start()
thread.join()
dist.register_rendezvous_handler("here", meet)
dist.init_process_group("gloo", init_method="here://")
says()
print(page.read().since_init > 0)
"""
IS_IMPORTED = """
import plistlib  # a part of it
from elastic_etcd.protocol import activity
print("imports", activity.look().read().importing > 0, flush=True)
"""
TOLD = """\
STARTING False
imports {0}
STARTING False
STARTING False
imports False
INIT False
STARTING False
True
"""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with BothWays(tmp_path_factory.mktemp("ways")) as ways:
        yield ways


@pytest.mark.parametrize(
    "asked", [pytest.param(False, marks=pytest.mark.nightly(part="jobs")), True]
)
def test_a_script_s_imports_and_its_process_group_are_seen(ways: BothWays, asked: bool) -> None:
    for name in ("is_imported", "is_imported_aside"):
        (ways.folder / f"{name}.py").write_text(IS_IMPORTED)
    (ways.folder / "fails.py").write_text("raise ValueError")
    pages = ActivityPages()
    for run in (ways.fork, ways.scripted):
        env = ways.env | {activity.VARIABLE: pages.begin(0)} | (SHOWN if asked else {})
        done = run(ways.script(TELLS), env)
        assert done == Outcome(0, TOLD.format(asked), ""), done.err
    pages.close()


def test_a_script_whose_imports_are_seen_sees_what_another_sees(ways: BothWays) -> None:
    text = """
    import sys
    print(sys.meta_path[-1], __import__)
    import no_such_module
    """
    done = ways.same(ways.script(textwrap.dedent(text)), ways.env | SHOWN)
    assert done.err.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


class Starting(Node):
    """A node with one worker that begins."""

    def __init__(self, at: Activity, *, uptime: float = 60.0, elastic: bool = False) -> None:
        super().__init__(os.getpid())
        self.at, self.looks = at, 0
        self.worker = SimpleNamespace(
            **vars(self.worker) | {"uptime": uptime, "channel": self if elastic else None}
        )
        self.watch = StartWatch("n1", 600.0, 60.0, Keys("/elastic_etcd/j"), *3 * [self])

    def activities(self) -> list[tuple[Any, Activity]]:
        self.looks += 1
        return super().activities()

    async def seen(self, at: Activity, generation: int = 1) -> None:
        """The agent has looked at a worker there, more than once."""
        self.at, self.generation = at, generation
        later = self.looks + 10
        await self.until(lambda: self.looks > later)

    @property
    def doing(self) -> list[tuple[RankDoing, float]]:
        """Where the worker was, and for how long, as it was published last."""
        put = self.published[-1].then[0]
        assert isinstance(put, Put)
        ranks = decode(NodeSteps, put.value, lease=0xB).ranks
        return [(rank.doing, rank.seconds) for rank in ranks]


def starting(seconds: float, **more: Any) -> Activity:
    return Activity(Doing.STARTING, seconds, 0, 0.0, **more)


def making_a_group(seconds: float) -> Activity:
    return Activity(Doing.INIT, seconds, 0, 0.0, since_init=seconds)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_PERIOD", 0.01)


@pytest.mark.parametrize(
    ("at", "uptime", "line"),
    [
        (starting(60.0, importing=5.0), 60.0, "has been in its imports for 60 s"),
        (making_a_group(7.0), 60.0, "has been in its process group for 7 s"),
        (
            starting(60.0, since_init=9.0),
            60.0,
            "has been before its first step for 60 s, as far as is known",
        ),
        (starting(29.0, importing=5.0), 29.0, ""),
        (starting(700.0), 700.0, ""),  # it may train
        (Activity(Doing.STEP, 60.0, 1, 0.0), 60.0, ""),
    ],
)
async def test_a_line_each_30_s_says_where_a_start_is(
    quick: None, caplog: pytest.LogCaptureFixture, at: Activity, uptime: float, line: str
) -> None:
    caplog.set_level("INFO", start_watch.log.name)
    node = Starting(at, uptime=uptime)
    task = asyncio.create_task(node.watch.run())
    await node.seen(at)
    assert caplog.messages == ([f"rank 0 on n1 {line}"] if line else [])
    if line:
        node.worker.uptime = 89.0
        await node.seen(at)
        node.worker.uptime = 90.0
        await node.seen(at)
        assert len(caplog.messages) == 2
    task.cancel()


HOURS = 36_000.0


@pytest.mark.parametrize(
    ("at", "elastic", "doing"),
    [
        (starting(700.0, importing=600.0), False, RankDoing.IMPORT),
        (making_a_group(600.0), False, RankDoing.GROUP),
        (starting(700.0, since_init=600.0), True, RankDoing.FIRST),
        (starting(HOURS, importing=599.0), False, None),
        (starting(HOURS, importing=HOURS, since_init=HOURS), False, None),
        (starting(HOURS), True, None),
        (starting(HOURS, since_init=HOURS), False, None),
        (starting(HOURS, since_init=HOURS, commits=1), True, None),
        (Activity(Doing.QUIET, HOURS, 0, 0.0, "downloads"), True, None),
        (Activity(Doing.DONE, HOURS, 0, 0.0), True, None),
    ],
)
async def test_only_what_is_known_of_a_start_counts(
    quick: None, at: Activity, elastic: bool, doing: RankDoing | None
) -> None:
    node = Starting(at, elastic=elastic)
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    if doing:
        await node.until(lambda: node.published)
        assert node.doing == [(doing, 600.0)]
    else:
        await node.seen(at)
        assert not node.published
    task.cancel()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("at", [making_a_group(700.0), starting(700.0)], ids=["group", "unknown"])
async def test_a_start_that_takes_too_long_is_a_failure_whatever_is_done_about_hangs(
    quick: None, caplog: pytest.LogCaptureFixture, at: Activity, begins: bool
) -> None:
    """Where nothing is known of this one, others may wait for it."""
    node = Starting(at)
    task = asyncio.create_task(node.watch.run())

    def reports(hang: Hang | None) -> None:
        now = state(hang)
        assert now.limits
        node.see(replace(now, limits=replace(now.limits, hang_action="report")))

    reports(None)
    if at.doing is Doing.INIT:
        await node.until(lambda: node.said == [1])
    reports(Hang(1, 1, 700.0))
    await node.until(lambda: node.said)
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
    for module in (hang_watch, start_watch):
        monkeypatch.setattr(module, "is_traced", lambda _: True)
    node = Starting(making_a_group(700.0))
    task = asyncio.create_task(node.watch.run())
    node.see(state(None))
    await node.seen(node.at)
    assert not node.published
    node.see(state(Hang(1, 1, 700.0)))  # another node has found somebody who waits
    await node.until(lambda: node.published)
    assert node.doing == [(RankDoing.TRACED, 700.0)]
    task.cancel()
