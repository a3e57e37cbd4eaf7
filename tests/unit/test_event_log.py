"""--event-log: what an agent writes of its node, and a disk that stands still."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.event_log import EventLog, open_log
from elastic_etcd.agent.followers.time_accounting import TimeAccounting
from elastic_etcd.core.lifecycle import (
    Event,
    Finished,
    Joined,
    Left,
    Life,
    Signalled,
    State,
    Tick,
    WorkerEnded,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Limits, Page, Phase, Round
from elastic_etcd.core.view import Narrow, View
from elastic_etcd.protocol.activity import ActivityPage, _sealed_memory
from tests.support.aio import elapse
from tests.support.jobs import FAILURE, FINAL

LIMITS = Limits(1, 2)
NONE: Any = SimpleNamespace()


def config(path: str) -> AgentConfig:
    return AgentConfig(None, "j", ("train",), "n1", 1, LIMITS, event_log=path)


def state(now: Round | None, **own: Any) -> State:
    view = View(9, Narrow(), round=now, page=Page(now.generation if now else 0))
    return State(Local("r", 0xA, **own), 1, Life.MEMBER, view=view)


class Node:
    """An agent's states, and what is written of them."""

    def __init__(self, log: EventLog) -> None:
        self.page = ActivityPage(_sealed_memory())
        workers: Any = SimpleNamespace(pages=(self.page,))
        self._accounting, self._log = TimeAccounting(workers), log
        self._accounting.listeners.append(log)
        self._state = State(Local(""), 1)

    def see(self, event: Event, now: State) -> None:
        before, self._state = self._state, now
        self._log.see(before, event, now)
        self._accounting.see(before, event, now)


async def test_what_happens_on_a_node(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"before": 1}\n')
    claimed = replace(FINAL, generation=3, phase=Phase.SETUP, reason="why")
    async with open_log(config(str(path)), NONE) as log:
        node = Node(log)
        node.see(Joined("r", 1, 0xA, 2, LIMITS), state(None))
        node.page.clear()
        node.see(Tick(), state(FINAL, running=2, ran=2))
        await elapse(0.05)
        node.page.step(told=True)
        await elapse(0.1)
        failed = WorkerEnded(2, FAILURE)
        node.see(failed, state(FINAL, running=2, ran=2, stopping=True))
        node.see(Tick(), state(claimed, ran=2))
        node.see(Tick(), replace(state(claimed, ran=3), result=Finished()))
        node.see(Signalled(), state(claimed, ran=3, leaving=True))
        left = replace(state(claimed, ran=3, leaving=True), life=Life.ENDED, ending=Left())
        node.see(Tick(), left)
    before, *lines = map(json.loads, path.read_text().splitlines())
    assert before == {"before": 1}
    assert [line["name"].removeprefix("torchelastic.worker.status.") for line in lines] == [
        *("elastic_etcd.node.joined", "elastic_etcd.round", "RENDEZVOUS", "START"),
        *("elastic_etcd.training", "FAILED", "elastic_etcd.stopping", "elastic_etcd.round"),
        *("STOPPED", "SUCCEEDED", "elastic_etcd.node.leaving", "TERMINATED"),
    ]
    assert all(line["metadata"]["run_id"] == "j" for line in lines)
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)
    training = next(line for line in lines if line["name"] == "elastic_etcd.training")
    assert training["metadata"]["duration_ms"] >= 0


async def test_nobody_waits_for_what_can_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)  # whose reader is not there: the thread waits in the kernel
    async with open_log(config(str(path)), NONE) as log:
        node = Node(log)
        for _ in range(1000):
            node.see(Signalled(), state(None, leaving=True))
            node.see(Tick(), state(None))
    assert path.read_bytes().endswith(b"\n"), "its thread ends: it would say so in another test"
