"""What an agent says of its decisions: each reason once, and again when it has come back."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_etcd.agent.agent import Agent
from elastic_etcd.core.lifecycle import Log, State
from elastic_etcd.core.rules import Ack, Decision, Local, Wait
from elastic_etcd.core.schema import Lease, Phase, Round
from elastic_etcd.core.view import Everything, View

READY = Ack("ready for generation 2", 2)
LOST, WAITS = Wait("joinable: n2 is lost"), Wait("1 of 2 live nodes are ready, n3 not")


@pytest.mark.parametrize(
    ("decisions", "said"),
    [
        ([(2, LOST), (2, READY), (2, LOST)], [LOST]),
        ([(2, LOST), (2, WAITS), (2, LOST)], [LOST, WAITS, LOST]),
        ([(2, LOST), (3, READY), (3, LOST)], [LOST, LOST]),
    ],
    ids=["after what nobody is told", "after another", "in another generation"],
)
async def test_a_reason_is_not_said_twice(
    decisions: list[tuple[int, Decision]], said: list[Decision], caplog: pytest.LogCaptureFixture
) -> None:
    """A node whose workers stop late waits, says that it is ready, and waits for the same again."""
    caplog.set_level(logging.INFO, "elastic_etcd")
    given: Any = SimpleNamespace(nproc=1, inbox=None)
    agent = Agent(given, given, given, given)
    for generation, decision in decisions:
        now = Round(generation, Phase.JOINABLE, Lease(1), "n2 is lost", "run")
        agent._state = State(Local("run"), 1, view=View(9, Everything(), round=now))
        agent._do(Log(decision))
    assert caplog.messages == [decision.reason for decision in said]
