"""Workers and nodes that fail, one test for each row of docs/contributing/failures.md."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import ROOT, Job
from tests.support.processes import command, send
from tests.support.residue import history, keys, members_are
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

SLOW_TO_BEGIN = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Path(sys.argv[1]).touch()
    time.sleep(5)  # a large model
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 41):
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    if step == 1:
        print("step 1 of generation", os.environ["ELASTIC_ETCD_GENERATION"], flush=True)
    time.sleep(0.1)
"""


@pytest.mark.nightly(part="jobs")
def test_worker_whose_children_hold_the_pipes_open(job: Job, etcd: EtcdServer) -> None:
    """One is in its process group, one in a session of its own, and one is to be kept there."""
    children = ("linger@rank=0", "daemon@rank=1", "kept@rank=1")
    faults = [arg for child in children for arg in ("--fault", f"{child},generation=1")]
    n1, n2 = job.start("n1", *faults), job.start("n2", *faults)
    g = job.trains(2)
    os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
    new = job.trains(2, after=g)
    assert {e.agent for e in job.events("start")} == {n1.pid, n2.pid}
    assert job.worker(new, rank=0).restarts == 1
    # The survivor's worker lost its peer: that is no second failure.
    assert new == g + 1
    assert "SIGKILL" in history(etcd, job.name)[new]["began"]

    def only_one() -> list[int] | None:
        found = [p for p in (*n1.others(), *n2.others()) if command(p) == "sleep 600"]
        return found if len(found) == 1 else None

    daemons = job.wait("of the three children only that which is to be kept is left", only_one)
    assert b"ELASTIC_ETCD_AGENT=\0" in Path(f"/proc/{daemons[0]}/environ").read_bytes()
    job.finish(n1, n2)
    assert keys(etcd, job.name)["outcome"]["state"] == "succeeded"
    send(signal.SIGKILL, daemons)


def test_m20_a_node_whose_torch_cannot_be_imported_is_left_out(
    ticks: TickingJob, etcd: EtcdServer, tmp_path: Path
) -> None:
    """It would be group rank 0, whose store needs torch, in each world again."""
    broken = tmp_path / "broken" / "torch.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libcudart.so.12: no such file')\n")
    flags = {"nnodes": "2:3", "env": {"PYTHONPATH": f"{broken.parent}:{ROOT}"}}
    early = ticks.start("n0", start_method="prefork", **flags)
    ticks.exits(early, 1)
    assert f"error: torch cannot be imported by {sys.executable}: libcudart" in early.output
    n1 = ticks.start("n1", **flags)  # without a fork server it knows nothing of torch before
    others = [ticks.start(node, nnodes="2:3") for node in ("n2", "n3")]
    ticks.trains(2)
    assert "(the store server on n1 exited 1: torch cannot" in others[0].output
    log = keys(etcd, ticks.name)["ledger"]["failures"]
    assert [(f["node"], f["free"]) for f in log] == [("n1", False), ("n1", True)]
    ticks.finish(*others, n1)


@pytest.mark.nightly(part="jobs")
def test_workers_that_come_to_a_dead_store_do_not_wait_for_it(
    job: Job, etcd: EtcdServer, tmp_path: Path
) -> None:
    """torch tries to reach it for half an hour; what has trained has no need of it any more."""
    script = tmp_path / "train.py"
    script.write_text(SLOW_TO_BEGIN)
    began = tmp_path / "began"
    agent = job.start("n1", nproc=2, script=(str(script), str(began)), start_method="exec")
    job.wait("workers that load something", began.exists)
    (store,) = agent.programs("store_server.py")
    send(signal.SIGKILL, [store])
    job.wait("a second world that trains", lambda: "step 1 of generation 2" in agent.output)
    (store,) = agent.programs("store_server.py")
    send(signal.SIGKILL, [store])
    job.exits(agent, 0)
    assert "the store server on n1 was killed by SIGKILL" in history(etcd, job.name)[2]["began"]
    assert "generation 3" not in agent.output


def test_worker_fails_until_the_budget_is_used_up(ticks: TickingJob, etcd: EtcdServer) -> None:
    faults = ("--fault", "raise@rank=1,step=2")
    agents = [ticks.start(n, *faults, max_restarts=2, min_uptime=0) for n in ("n1", "n2")]
    for agent in agents:
        ticks.exits(agent, 3, seconds=60)
        last = agent.output[-1500:]
        assert "RuntimeError: declared fault of rank 1" in last, agent.output
        assert "Traceback" in last
    outcome = keys(etcd, ticks.name)["outcome"]
    assert outcome["state"] == "failed"
    assert outcome["exit_code"] == 3
    assert outcome["failure"]["rank"] == 1
    assert outcome["failure"]["code"] == 1
    assert len({e.generation for e in ticks.events("step")}) == 3


def test_r21_a_node_that_always_fails_ends_no_job(ticks: TickingJob, etcd: EtcdServer) -> None:
    """The others go on without it, and every node is told."""
    fails = ("--fault", "raise@node=n3")
    agents = [
        ticks.start(n, *fails, nnodes="2:3", max_restarts=1, min_uptime=600)
        for n in ("n1", "n2", "n3")
    ]
    g = ticks.trains(2, seconds=60)
    assert set(ticks.begun(g)) == {"n1", "n2"}
    for agent in agents:
        ticks.said(agent, "left out")  # its coordinator, which n3 may be, has fewer words for it
    assert sum("n3 is left out for 600 s of training" in agent.output for agent in agents) >= 2
    log = keys(etcd, ticks.name)["ledger"]["failures"]
    assert [(f["node"], f["free"]) for f in log] == [("n3", False), ("n3", True)]
    assert ticks.worker(g, rank=0).restarts == 1, "the second failure costs nothing"
    ticks.finish(*agents)
    assert keys(etcd, ticks.name)["outcome"]["state"] == "succeeded"


@pytest.mark.nightly(part="jobs")
def test_a_worker_that_takes_its_time_to_exit_is_the_culprit(job: Job, etcd: EtcdServer) -> None:
    faults = ("--fault", "linger-raise@rank=1,step=2")
    agents = [job.start(n, *faults, max_restarts=0) for n in ("n1", "n2")]
    for agent in agents:
        job.exits(agent, 1, seconds=30)
        assert "RuntimeError: declared fault of rank 1" in agent.output[-1500:], agent.output
    assert keys(etcd, job.name)["outcome"]["failure"]["rank"] == 1


def test_no_restart_allowed(ticks: TickingJob) -> None:
    agents = [
        ticks.start(n, "--fault", "exit:7@rank=0,step=2", max_restarts=0) for n in ("n1", "n2")
    ]
    for agent in agents:
        ticks.exits(agent, 1)
        assert "exited 7" in agent.output[-1500:]
    assert {e.generation for e in ticks.events("start")} == {1}


RETURNS = """
import torch
import torch.distributed as dist
import elastic_etcd as ee

state = ee.ElasticState(step=0)

@ee.run
def train(state):
    while state.step < 10 - 4 * dist.get_rank():
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.check()

train(state)
"""


EXPORTS = """
import signal
if state.step < 10:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("after", "left"),
    [
        pytest.param("", "ended", id="ends"),
        pytest.param(EXPORTS, "left ee.run", id="exports", marks=pytest.mark.nightly(part="jobs")),
    ],
)
def test_t11_the_rank_that_returned_early_is_the_cause(
    job: Job, etcd: EtcdServer, tmp_path: Path, after: str, left: str
) -> None:
    (tmp_path / "train.py").write_text(RETURNS + after)
    script = (str(tmp_path / "train.py"),)
    agents = [job.start(n, script=script, nnodes="2", max_restarts=0) for n in ("n1", "n2")]
    for agent in agents:
        job.exits(agent, 1, seconds=60)
        last = agent.output[-1500:]
        told = (
            rf"root cause: rank 1 on (n\d) {left} while rank 0 on (?!\1)n\d was in step 7, after "
        )
        assert re.search(told, last), agent.output
    assert keys(etcd, job.name)["outcome"]["failure"]["node"] == ""


ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", required=True)
parser.parse_args()
"""
USAGE = "import elastic_etcd as ee\nee.ElasticState().commit(every=0)"


@pytest.mark.parametrize(
    ("script", "code", "worlds", "why", "last"),
    [
        (USAGE, 2, 1, "a UsageError, which no restart mends", "commit(every=0): at least 1"),
        (ARGUMENTS, 1, 2, "the same error twice before the first step", "required: --epochs"),
    ],
    ids=["usage", "arguments"],
)
def test_t13_a_failure_that_can_not_change_is_final(
    job: Job, tmp_path: Path, script: str, code: int, worlds: int, why: str, last: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = (str(tmp_path / "train.py"),)
    n1 = job.start("n1", script=command, nnodes="1:1", start_method="exec", max_restarts=3)
    job.exits(n1, code, seconds=60)
    error = n1.output[n1.output.rindex("error: rank 0 on n1 exited ") :]
    assert f"; {why}\n    root cause: " in error
    assert last in error
    assert n1.output.count(": group rank 0 of 1, ") == worlds


@pytest.mark.nightly(part="jobs")
def test_nodes_killed_and_back(job: Job, etcd: EtcdServer) -> None:
    """First the oldest one, and then the youngest, which has come instead."""
    dead = job.start("n1")
    members_are(etcd, job.name, 1)
    n2 = job.start("n2")
    g = job.trains(2)
    for back in ("n3", "n1"):
        dead.node_kill()
        alone = job.trains(1, after=g)
        assert {e.node for e in job.events("step") if e.generation == alone} == {"n2"}
        assert job.worker(alone, rank=0).restarts == 0, "a lost node is not a restart"
        began = history(etcd, job.name)[alone]["began"]
        assert "lost" in began, "not: the survivor's worker failed"
        dead = job.start(back)
        g = job.trains(2, after=alone)
    job.finish(n2, dead)


@pytest.mark.nightly(part="jobs")
def test_node_stopped_with_sigstop_past_its_ttl_and_then_continued(
    job: Job, etcd: EtcdServer
) -> None:
    """First the oldest one, and then the other, which is the oldest by then."""
    n1 = job.start("n1")
    members_are(etcd, job.name, 1)
    n2 = job.start("n2")
    g = job.trains(2)
    for frozen, other in ((n1, n2), (n2, n1)):
        frozen.freeze()
        alone = job.trains(1, after=g)
        assert {e.node for e in job.events("step") if e.generation == alone} == {other.node}
        frozen.thaw()
        g = job.trains(2, after=alone)
        assert job.worker(g, rank=0).node == other.node, "a survivor keeps its place"
    job.finish(n1, n2)


def test_agent_killed_alone_takes_its_workers_along(ticks: TickingJob) -> None:
    n1, n2 = ticks.start("n1"), ticks.start("n2")
    g = ticks.trains(2)
    victims = n2.others()
    assert victims
    n2.kill()
    ticks.wait("the workers of a dead agent die", lambda: not n2.others())
    ticks.trains(1, after=g)
    ticks.finish(n1)


def test_worker_that_ignores_sigterm(ticks: TickingJob) -> None:
    n1 = ticks.start("n1", "--fault", "ignore-term@generation=1", settle=0, shutdown_timeout=1)
    g = ticks.trains(1)
    stubborn = ticks.worker(g, rank=0).pid
    n2 = ticks.start("n2")
    ticks.trains(2, after=g)
    assert command(stubborn) == "gone"
    ticks.finish(n1, n2)
