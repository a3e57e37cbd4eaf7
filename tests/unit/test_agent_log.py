"""What an agent says of its decisions: a long wait again and again, a failure at once."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from elastic_etcd import launch
from elastic_etcd.agent import agent as module
from elastic_etcd.agent.agent import Agent
from elastic_etcd.core.lifecycle import Error, Failed, Grace, Life, Log, Over, State
from elastic_etcd.core.peers import was_left
from elastic_etcd.core.rules import Ack, Local, Stop, Wait
from elastic_etcd.core.schema import Failure, Lease, Master, Member, Participant, Phase, Round
from elastic_etcd.core.view import Everything, View
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.protocol.messages import Interrupt
from elastic_etcd.version import __version__

READY = Ack("ready for generation 2", 2)
FAILURE = Failure("n2", 3, 1, 123, -15, 12.0, "Traceback\nValueError: boom", "now", step=7)
LOST, WAITS = Wait("spare: 1 node trains"), Wait("waiting to be taken in")


@pytest.mark.parametrize(
    ("threads", "nproc", "told"),
    [
        (
            None,
            2,
            "2 workers with OMP_NUM_THREADS=1 each, as under torchrun, on this node, 2:8 nodes",
        ),
        ("4", 2, "2 workers on this node, 2:8 nodes"),
        (None, 1, "1 worker on this node, 2:8 nodes"),
    ],
)
def test_n8_the_start_is_one_line(
    threads: str | None,
    nproc: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    flags = ["--etcd=e1:1,e2:1", "--job=j", "--nnodes=2:8", f"--nproc-per-node={nproc}"]
    config = launch.parse([*flags, "--no-python", "true"], {})
    assert config.etcd
    module._tell_start(config, config.etcd, None)
    start = f"elastic_etcd {__version__}, job j"
    assert caplog.messages == [f"{start}: {told}, etcd at e1:1,e2:1"]


def test_a_number_of_nodes_that_is_fixed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    config = launch.parse(["--etcd=e1:1", "--job=j", "--nnodes=2", "--no-python", "true"], {})
    assert config.etcd
    module._tell_start(config, config.etcd, None)
    assert "1 worker on this node, 2 nodes, etcd at e1:1" in caplog.text


async def test_a_spare_says_why_once_it_knows_its_world(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    agent = an_agent()
    known = state(Phase.FINAL)
    assert known.view
    for seen in (replace(known, view=replace(known.view, world=())), known):
        agent._state = seen
        for decision in (READY, LOST, WAITS):
            agent._do(Log(decision))
    assert caplog.messages == [LOST.reason, WAITS.reason]


async def test_n8_the_protocol_is_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    agent = an_agent()
    for phase in (Phase.SETUP, Phase.JOINABLE, Phase.FROZEN):
        agent._state = state(phase)
        for decision in (WAITS, READY, Stop("generation 1 is over: n2 is lost", planned=False)):
            agent._do(Log(decision))
    assert caplog.messages == []
    agent._reminder.cancel()


async def test_n6_a_long_wait_is_told_again_and_again_with_its_reason_of_now(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    monkeypatch.setattr(module, "_WAITS", 0.0)
    monkeypatch.setattr(module, "_STILL_WAITS", 0.0)
    agent = an_agent()
    for reason in ("n2 is not ready yet", "n3 is not ready yet"):
        agent._state = replace(state(Phase.JOINABLE), life=Life.MEMBER, logged=reason)
        agent._do(Log(Wait(reason)))
        async with asyncio.timeout(60):
            while caplog.messages.count(f"waiting for 0 s: {reason}") < 2:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
    for quiet in (replace(agent._state, silent_since=0.0), state(Phase.FINAL)):
        agent._state = quiet
        caplog.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        assert caplog.messages == []


async def test_n8_a_failure_is_told_at_once_and_a_victim_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "elastic_etcd")
    agent = an_agent()
    for generation, silent in ((1, None), (2, None), (1, 0.0)):
        failed = Failed(replace(FAILURE, uptime=12.0 + generation))
        now = state(Phase.FINAL, generation)
        local = replace(now.local, ran=1)
        agent._state = replace(now, local=local, result=failed, silent_since=silent)
        for _ in range(2):
            agent._tell_failure()
    who = "rank 3 on n2 (local rank 1, pid 123) was killed by SIGTERM after"
    cause = (
        f"root cause: {who} 13.0 s, in step 7 of its world, now\n  Traceback\n  ValueError: boom"
    )
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", f"{who} 13.0 s, in step 7 of its world: ValueError: boom"),
        ("DEBUG", f"{who} 14.0 s, in step 7 of its world: ValueError: boom"),
        ("WARNING", f"nothing trains on this node until etcd answers\n{cause}"),
    ]


DIED = {"result": Failed(FAILURE)}


@pytest.mark.parametrize(
    ("generation", "known", "why"),
    [
        (2, DIED, "rank 3 on n2 was killed by SIGTERM"),
        (3, DIED | {"logged": "generation 3 begins: n1 is leaving"}, None),
        (2, {"life": Life.LOST, "view": None}, "this node has lost its lease"),
        (2, {"life": Life.LEAVING, "ending": Error("etcd denies it")}, "etcd denies it"),
        (2, {"life": Life.LEAVING, "ending": Over("stopped: no")}, "stopped: no"),
        (3, {"logged": "generation 2 is over: n1 is lost"}, None),
    ],
)
async def test_o1_workers_are_told_why_their_world_is_broken(
    generation: int, known: dict[str, Any], why: str | None
) -> None:
    """And not what the agent has logged last before that."""
    agent = an_agent()
    agent._workers = cast("Any", SimpleNamespace(generation=2))
    seen = state(Phase.FINAL, generation)
    seen = replace(seen, local=replace(seen.local, ran=2, running=2), logged="2 nodes train")
    agent._state = replace(seen, **known)
    assert agent._notice(Grace.FAILURE) == Interrupt(2, why or known["logged"])


def test_a_rank_that_stopped_early_is_told_with_what_to_do() -> None:
    text = module._root_cause(was_left(FAILURE, "rank 0 on n1 left ee.run"))
    told, advice = text.splitlines()
    assert told.startswith("root cause: rank 0 on n1 left ee.run while rank 3 on n2 was in step 7,")
    assert advice == "  Let all ranks take equally many steps, and stop at the same one."


@pytest.mark.parametrize(
    ("etcd", "others", "again"),
    [
        (EtcdConfig(("etcd:2379",)), (2,), "start it with the same command to go on"),
        (
            EtcdConfig(("etcd:2379",)),
            (),
            "the same command, on all nodes, goes on from the files that the script",
        ),
        (None, (2,), "the same command, on all nodes, goes on from the files that the script"),
    ],
)
async def test_a_node_that_leaves_says_from_what_the_job_goes_on(
    etcd: EtcdConfig | None,
    others: tuple[int, ...],
    again: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    agent = an_agent()
    config: Any = SimpleNamespace(job="j", node="n1", leave_exit_code=None, etcd=etcd)
    members = tuple(Member(lease, f"n{lease}", 1) for lease in (1, *others))
    agent._config = config
    agent._state = State(Local(run="r", lease=1), 1, view=View(9, Everything(), members=members))
    assert agent._unfinished("r") == 143
    assert again in caplog.text


@pytest.mark.parametrize(
    ("etcd", "drained", "again"),
    [
        (EtcdConfig(("etcd:2379",)), False, "start it with the same command to go on"),
        (EtcdConfig(("etcd:2379",)), True, "`elastic-etcd undrain j n1` lets it come back"),
        (None, False, "the same command, on all nodes, goes on from the files that the script"),
    ],
)
async def test_a_node_that_leaves_before_it_is_a_member_says_nothing_of_the_others(
    etcd: EtcdConfig | None, again: str, caplog: pytest.LogCaptureFixture, *, drained: bool
) -> None:
    """They may train all the time, while it imports torch or waits for undrain."""
    caplog.set_level(logging.INFO, "elastic_etcd")
    agent = an_agent()
    config: Any = SimpleNamespace(job="j", node="n1", leave_exit_code=None, etcd=etcd)
    agent._config, agent._state = config, State(Local(run=""), 1)
    agent._membership = cast("Any", SimpleNamespace(stays_out=drained))
    assert agent._unfinished("") == 143
    assert again in caplog.text


def an_agent() -> Agent:
    given: Any = SimpleNamespace(nproc=1, inbox=None)
    return Agent(given, given, given, given)


def state(phase: Phase, generation: int = 2) -> State:
    now = Round(generation, phase, Lease(1), "n2 is lost", "run", "n1", 1, 1, Master("n1", 80))
    world = (Participant(1, "n1", 1, 0, 0),)
    view = View(9, Everything(), round=now, world=world)
    return State(Local("run", 2, acked=generation), 1, view=view)
