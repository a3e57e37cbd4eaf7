"""Workers that recover in process: which of them live on, and that no sample is lost for it."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.invariants import each_sample_once
from tests.support.job import ELASTIC, Agent, Job
from tests.support.processes import send

pytestmark = pytest.mark.timeout(600)


def start(job: Job, node: str, *arguments: str, **flags: Any) -> Agent:
    return job.start(node, script=(ELASTIC, "--dir", str(job.directory), *arguments), **flags)


def test_a_killed_worker_and_a_frozen_node_leave_their_peer_s_process_alive(job: Job) -> None:
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2)
    before = job.begun(g)
    send(signal.SIGKILL, [before["n2"].pid])
    g = job.trains(2, after=g)
    after = job.begun(g)
    survivor = before["n1"].pid
    assert after["n1"].pid == survivor, "the survivor was started anew"
    assert after["n2"].pid != before["n2"].pid

    n2.freeze()  # its connections stay open, and say nothing: gloo would wait for half an hour
    g = job.trains(1, after=g)
    assert job.begun(g)["n1"].pid == survivor
    n2.thaw()
    g = job.trains(2, after=g)
    assert job.begun(g)["n1"].pid == survivor, "it stopped for a planned change, and went on"
    job.finish(n1, n2)
    each_sample_once(job.directory)


def test_nodes_join_and_leave_and_no_step_is_lost(job: Job) -> None:
    """Rank 0 is the first that leaves: with the store by which the others agree where to stop."""
    n1 = start(job, "n1", "--loaders", "2", nnodes="1:3", settle=0)
    g = job.trains(1)
    first = job.begun(g)["n1"].pid
    n2, n3 = (start(job, node, "--loaders", "2", nnodes="1:3") for node in ("n2", "n3"))
    g = job.trains(3, after=g)
    before = job.begun(g)
    assert before["n1"].pid == first
    assert before["n1"].rank == 0
    n1.terminate()
    job.exits(n1, 143)
    g = job.trains(2, after=g)
    assert all(job.begun(g)[node].pid == before[node].pid for node in ("n2", "n3"))
    n3.terminate()
    job.exits(n3, 143)
    g = job.trains(1, after=g)
    assert job.begun(g)["n2"].pid == before["n2"].pid
    job.finish(n2)
    each_sample_once(job.directory)
    for node in ("n1", "n2", "n3"):
        steps = [e.step for e in job.events("step") if e.node == node]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "a step was trained twice"


@pytest.mark.nightly(part="jobs")
def test_a_mistake_of_the_user_s_is_the_cause(job: Job) -> None:
    fault = ("--fault", "raise", "--at", "5", "--on", "1")
    n1, n2 = (start(job, name, *fault, max_restarts=0) for name in ("n1", "n2"))
    job.exits(n1, 1)
    job.exits(n2, 1)
    for node in (n1, n2):
        last = node.output[node.output.rindex("elastic_etcd[") :]
        assert "ValueError: a mistake of the user's" in last, last
    assert "lost its peers" not in n1.output + n2.output


@pytest.mark.nightly(part="jobs")
def test_a_worker_that_is_stuck_is_killed_and_started_anew(job: Job) -> None:
    fault = ("--fault", "stuck", "--at", "5", "--on", "1", "--skips")
    flags = {"nnodes": "1:3", "park_timeout": 3}
    nodes = {name: start(job, name, *fault, **flags) for name in ("n1", "n2", "n3")}
    stuck = job.wait("it is stuck", lambda: job.events("stuck"))[0]
    before = job.begun(g := stuck.generation)
    killed, survivor = (e for e in before.values() if e.pid != stuck.pid)
    send(signal.SIGKILL, [killed.pid])
    g = job.trains(3, after=g)
    after = job.begun(g)
    assert after[survivor.node].pid == survivor.pid
    assert after[stuck.node].pid != stuck.pid
    assert not Path(f"/proc/{stuck.pid}").exists()
    job.finish(*nodes.values())
    each_sample_once(job.directory)


@pytest.mark.nightly(part="jobs")
def test_g3_a_survivor_has_time_to_come_out_of_its_step(job: Job) -> None:
    """With what it has on its device; a worker without ee.run has 3 s."""
    fault = ("--fault", "long", "--at", "5", "--on", "1")
    n1, n2 = start(job, "n1", *fault), start(job, "n2", *fault)
    long = job.wait("a long step", lambda: job.events("long"))[0]
    before = job.begun(g := long.generation)
    send(signal.SIGKILL, [e.pid for e in before.values() if e.pid != long.pid])
    g = job.trains(2, after=g)
    assert job.begun(g)[long.node].pid == long.pid
    job.finish(n1, n2)
    each_sample_once(job.directory)


@pytest.mark.nightly(part="jobs")
def test_g7_with_torch_s_debugging_of_collectives(job: Job) -> None:
    """Without DDP, whose constructor ends the process then (torch 2.13)."""
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    n1, n2 = (start(job, name, "--by-hand", env=detail) for name in ("n1", "n2"))
    g = job.trains(2)
    before = job.begun(g)
    send(signal.SIGKILL, [before["n2"].pid])
    g = job.trains(2, after=g)
    assert job.begun(g)["n1"].pid == before["n1"].pid
    n2.terminate()
    job.exits(n2, 143)
    g = job.trains(1, after=g)
    assert job.begun(g)["n1"].pid == before["n1"].pid
    job.finish(n1)
    each_sample_once(job.directory)


@pytest.mark.nightly(part="jobs")
def test_all_workers_of_a_node_at_once(job: Job) -> None:
    """One is killed, a node joins, all of a node are killed, and a node leaves."""
    flags = {"nproc": 4, "suspect_after": 0}
    n1 = start(job, "n1", "--outside", "--log", settle=0, **flags)
    g = job.trains(4)
    workers = [e.pid for e in job.events("start") if e.generation == g]
    send(signal.SIGKILL, workers[:1])
    g = job.trains(4, after=g)
    again = {e.pid for e in job.events("start") if e.generation == g}
    assert set(workers[1:]) < again

    n2 = start(job, "n2", "--outside", "--log", **flags)
    g = job.trains(8, after=g)
    begun = [e for e in job.events("start") if e.generation == g]
    (first,) = (e.node for e in begun if e.rank == 0)
    send(signal.SIGKILL, [e.pid for e in begun if e.node == first])
    g = job.trains(8, after=g)
    after = {e.pid for e in job.events("start") if e.generation == g}
    assert {e.pid for e in begun if e.node != first} < after
    told = n1.output + n2.output
    why = rf"generation {g} \(rank \d on {first} was killed by SIGKILL\)"
    place = r"rank 0 of 8 goes on from commit \d+ \(.*\) in a new process"
    cost = r"after \d+\.\d\d s; trained again: (\d+ steps? and the one|the step) under way"
    assert re.search(f"{why}: {place} {cost}", told), told

    n2.terminate()
    job.exits(n2, 143)
    its = {e.pid for e in job.events("start") if e.generation == g and e.node == "n1"}
    g = job.trains(4, after=g)
    assert {e.pid for e in job.events("start") if e.generation == g} == its
    job.finish(n1)
    each_sample_once(job.directory)


@pytest.mark.nightly(part="jobs")
def test_all_workers_of_a_node_at_once_with_loaders(job: Job) -> None:
    n1, n2 = (start(job, name, "--loaders", "2", nproc=2) for name in ("n1", "n2"))
    g = job.trains(4)
    workers = [e for e in job.events("start") if e.generation == g]
    (first,) = (e.node for e in workers if e.rank == 0)
    send(signal.SIGKILL, [e.pid for e in workers if e.node == first])
    g = job.trains(4, after=g)
    again = {e.pid for e in job.events("start") if e.generation == g}
    assert {e.pid for e in workers if e.node != first} < again
    job.finish(n1, n2)
    each_sample_once(job.directory)
