"""Nodes that come and go as planned, one test for each row of docs/contributing/failures.md."""

import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.residue import PAUSE, history, keys, member, members_are
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def job(ticks: TickingJob) -> TickingJob:
    """Its workers only tick: who is in a world is not up to them."""
    return ticks


def test_nodes_added_to_a_running_job(job: TickingJob, etcd: EtcdServer) -> None:
    agents = [job.start("n1", nnodes="1:3", settle=0)]
    g = job.trains(1)
    for count in (2, 3):
        agents.append(job.start(f"n{count}", nnodes="1:3"))
        g = job.trains(count, after=g, seconds=40)
        places = {e.group_rank: e.node for e in job.events("start") if e.generation == g}
        assert places == {i: f"n{i + 1}" for i in range(count)}, "everybody keeps their place"
        assert job.worker(g, rank=0).restarts == 0
    assert [h["world_size"] for _, h in sorted(history(etcd, job.name).items())] == [1, 2, 3]
    job.finish(*agents)


def test_n8_two_agents_of_one_name_are_told_so(job: TickingJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal\nsignal.pause()")
    script = (str(tmp_path / "train.py"),)
    agents = [job.start("n1", script=script, nnodes="2") for _ in range(2)]
    told = "another node of this job is called n1, too: give each node a --node-name of its own"
    job.wait("both say so", lambda: all(told in agent.output for agent in agents))
    for agent in agents:
        agent.terminate()
        job.exits(agent, 143)


def test_agent_leaves_on_sigterm_nodes_of_different_size(job: TickingJob, etcd: EtcdServer) -> None:
    n1, n2 = job.start("n1", nproc=1), job.start("n2", nproc=2)
    g = job.trains(3, seconds=40)
    by_node = {(e.node, e.local_rank): e.rank for e in job.events("start")}
    assert sorted(by_node) == [("n1", 0), ("n2", 0), ("n2", 1)]
    assert by_node["n2", 1] == by_node["n2", 0] + 1
    n2.terminate()
    job.exits(n2, 143)
    alone = job.trains(1, after=g)
    assert job.worker(alone, rank=0).restarts == 0
    assert history(etcd, job.name)[alone]["began"] == "n2 is leaving"
    job.finish(n1)


@pytest.mark.parametrize(
    ("number", "env", "code"),
    [
        (signal.SIGTERM, {}, 143),
        (signal.SIGINT, {}, 130),
        (signal.SIGTERM, {"PET_LEAVE_EXIT_CODE": "75"}, 75),
    ],
)
def test_r6_a_node_that_leaves_an_unfinished_job_has_not_succeeded(
    job: TickingJob, number: signal.Signals, env: dict[str, str], code: int
) -> None:
    n1 = job.start("n1", settle=0, env=env)
    job.trains(1)
    n1.terminate(number)
    job.exits(n1, code)


@pytest.mark.parametrize(("count", "nnodes"), [(2, "1:2"), (4, "5:8")], ids=["final", "joinable"])
def test_all_agents_leave_at_once(
    job: TickingJob, etcd: EtcdServer, count: int, nnodes: str
) -> None:
    agents = [job.start(f"n{i}", nnodes=nnodes) for i in range(count)]
    if count == 2:
        job.trains(2)
    else:
        members_are(etcd, job.name, count, "acks/")
    for agent in agents:
        agent.terminate()
    for agent in agents:
        job.exits(agent, 143)
    assert keys(etcd, job.name)["outcome"]["state"] == "stopped", "one of them was the last"


def test_r2_a_node_that_comes_and_goes_does_not_stop_the_others(
    job: TickingJob, etcd: EtcdServer
) -> None:
    """Its second return does not end their world before it has trained for a while."""
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2)
    for _ in range(2):
        n2.node_kill()
        alone = job.trains(1, after=g)
        n2 = job.start("n2")
        g = job.trains(2, after=alone, seconds=60)
    world = history(etcd, job.name)[alone]
    began, ended = (datetime.fromisoformat(world[at]) for at in ("began_at", "ended_at"))
    assert ended - began >= timedelta(seconds=10)
    assert "n2 joins" in world["ended"]
    job.finish(n1, n2)


def test_more_agents_than_max(job: TickingJob, etcd: EtcdServer) -> None:
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2)
    n3 = job.start("n3")
    members_are(etcd, job.name, 3)
    job.goes_on(g)
    assert {e.generation for e in job.events()} == {g}, "a surplus node disturbs nobody"
    n2.node_kill()
    new = job.trains(2, after=g)
    assert {e.node for e in job.events("start") if e.generation == new} == {"n1", "n3"}
    n4 = job.start("n4")
    members_are(etcd, job.name, 3)
    job.finish(n1, n3, n4)


@pytest.mark.parametrize("how", ["is killed", "leaves", "loses its lease"])
def test_r10_a_coordinator_that_is_done_ends_no_world_when_it_goes(
    job: TickingJob, etcd: EtcdServer, how: str
) -> None:
    n1 = job.start("n1", "--steps", "5")
    members_are(etcd, job.name, 1, "acks/")  # alone, so that it coordinates
    n2 = job.start("n2")
    g = job.trains(2)
    members_are(etcd, job.name, 1, "reports/")
    before = keys(etcd, job.name)["round"]
    assert before["coordinator"] == member(etcd, job.name, "n1")
    if how == "is killed":
        n1.kill()
    elif how == "leaves":
        n1.terminate()
        job.exits(n1, 143)
    else:
        etcd.ctl("lease", "revoke", before["coordinator"])
    deadline = time.monotonic() + 30
    while (now := keys(etcd, job.name)["round"]) == before and "key is back" not in n1.output:
        assert time.monotonic() < deadline, job.account()
        time.sleep(PAUSE)
    led = {name: now[name] for name in ("coordinator", "node")}
    assert now == before | led, "the same round"
    job.undisturbed(g, seconds=1)
    assert [e.node for e in job.events("start")].count("n2") == 1, "it trains on"
    job.finish(n2, *([n1] if how == "loses its lease" else []))
    assert keys(etcd, job.name)["outcome"]["state"] == "succeeded"


def test_fewer_than_min_survivors_then_a_rejoin(job: TickingJob) -> None:
    n1, n2 = job.start("n1", nnodes="2:2"), job.start("n2", nnodes="2:2")
    g = job.trains(2)
    n2.node_kill()
    job.said(n1, "1 node is ready; at least 2 must be")
    assert n1.pid not in {e.agent for e in job.events("start") if e.generation > g}
    n2 = job.start("n2", nnodes="2:2")
    job.trains(2, after=g)
    job.finish(n1, n2)


@pytest.mark.parametrize("before", ["never", "lost"])
def test_nobody_else_comes_in_time(job: TickingJob, etcd: EtcdServer, before: str) -> None:
    n1 = job.start("n1", nnodes="2:2", join_timeout=2)
    if before == "lost":
        n2 = job.start("n2", nnodes="2:2", join_timeout=2)
        job.trains(2)
        n2.node_kill()
    job.exits(n1, 4)
    assert "1 node is ready; at least 2 must be" in n1.output
    assert "--join-timeout" in n1.output
    assert keys(etcd, job.name)["outcome"]["exit_code"] == 4


def test_r13_a_job_of_a_newer_format_is_refused_and_left(job: TickingJob, etcd: EtcdServer) -> None:
    n1 = job.start("n1", settle=0)
    job.trains(1)
    newer = f"/elastic_etcd/{job.name}/ledger"
    before = keys(etcd, job.name)
    etcd.ctl("put", newer, '{"a field": "of the future", "v": 3}')
    job.exits(n1, 7)
    assert "written by a newer elastic_etcd (format 3)" in n1.output
    n2 = job.start("n2", settle=0)
    job.exits(n2, 7)
    assert "written by a newer elastic_etcd (format 3)" in n2.output
    after = keys(etcd, job.name)
    assert after["ledger"] == {"a field": "of the future", "v": 3}
    assert after["round"] == before["round"], "nothing was written"
    job.abandoned = True


def test_other_nnodes_are_refused_and_ctrl_c_twice_ends_at_once(job: TickingJob) -> None:
    n1 = job.start("n1", "--fault", "ignore-term", settle=0)
    g = job.trains(1)
    stranger = job.start("n2", nnodes="1:3")
    job.exits(stranger, 2)
    assert "1:3" in stranger.output
    assert "1:2" in stranger.output
    job.goes_on(g)
    n1.terminate(signal.SIGINT)
    job.said(n1, "leaving")
    assert n1.running(), "the worker that ignores SIGTERM has its grace"
    n1.terminate(signal.SIGINT)
    job.exits(n1, 130, seconds=15)
    job.abandoned = True
