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


def test_a_killed_worker_leaves_its_peer_s_process_alive(job: Job) -> None:
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2)
    before = job.begun(g)
    send(signal.SIGKILL, [before["n2"].pid])
    g = job.trains(2, after=g)
    after = job.begun(g)
    assert after["n1"].pid == before["n1"].pid, "the survivor was started anew"
    assert after["n2"].pid != before["n2"].pid
    job.finish(n1, n2)
    each_sample_once(job.directory)


def test_a_frozen_peer_is_left_behind(job: Job) -> None:
    """It keeps its connections open and says nothing: gloo would wait for half an hour."""
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2)
    survivor = job.begun(g)["n1"].pid
    n2.freeze()
    g = job.trains(1, after=g)
    assert job.begun(g)["n1"].pid == survivor
    n2.thaw()
    g = job.trains(2, after=g)
    assert job.begun(g)["n1"].pid == survivor, "it stopped for a planned change, and went on"
    job.finish(n1, n2)
    each_sample_once(job.directory)


def test_a_node_joins_and_leaves_and_no_step_is_lost(job: Job) -> None:
    n1 = start(job, "n1", "--loaders", "2", settle=0)
    g = job.trains(1)
    first = job.begun(g)["n1"].pid
    n2 = start(job, "n2", "--loaders", "2")
    g = job.trains(2, after=g)
    assert job.begun(g)["n1"].pid == first
    n2.terminate()
    job.exits(n2, 143)
    g = job.trains(1, after=g)
    assert job.begun(g)["n1"].pid == first
    job.finish(n1)
    each_sample_once(job.directory)
    steps = [e.step for e in job.events("step") if e.node == "n1"]
    assert steps == list(range(1, len(steps) + 1)), "a step was trained twice"


def test_the_first_node_leaves(job: Job) -> None:
    """It has rank 0, and hosts the store that the others agree through where to stop."""
    nodes = [start(job, name, nnodes="1:3") for name in ("n1", "n2", "n3")]
    g = job.trains(3)
    first = next(node for node in nodes if job.begun(g)[node.node].rank == 0)
    others = [node for node in nodes if node is not first]
    first.terminate()
    job.exits(first, 143)
    before, g = job.begun(g), job.trains(2, after=g)
    assert all(job.begun(g)[n.node].pid == before[n.node].pid for n in others)
    job.finish(*others)
    each_sample_once(job.directory)
    for node in others:
        steps = [e.step for e in job.events("step") if e.node == node.node]
        assert steps == list(range(1, len(steps) + 1)), "a step was trained twice"


def test_a_mistake_of_the_user_s_is_the_cause(job: Job) -> None:
    fault = ("--fault", "raise", "--at", "5", "--on", "1")
    n1, n2 = (start(job, name, *fault, max_restarts=0) for name in ("n1", "n2"))
    job.exits(n1, 1)
    job.exits(n2, 1)
    for node in (n1, n2):
        last = node.output[node.output.rindex("elastic_etcd[") :]
        assert "ValueError: a mistake of the user's" in last, last
    assert "lost its peers" not in n1.output + n2.output


def test_a_worker_that_is_stuck_is_killed_and_started_anew(job: Job) -> None:
    fault = ("--fault", "stuck", "--at", "5", "--on", "1")
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


@pytest.mark.parametrize("arguments", [("--outside", "--log"), ("--loaders", "2")])
def test_all_workers_of_a_node_at_once(job: Job, arguments: tuple[str, ...]) -> None:
    n1, n2 = (start(job, name, *arguments, nproc=2) for name in ("n1", "n2"))
    g = job.trains(4)
    workers = [e for e in job.events("start") if e.generation == g]
    (first,) = (e.node for e in workers if e.rank == 0)
    send(signal.SIGKILL, [e.pid for e in workers if e.node == first])
    g = job.trains(4, after=g)
    again = {e.pid for e in job.events("start") if e.generation == g}
    assert {e.pid for e in workers if e.node != first} < again
    job.finish(n1, n2)
    told = n1.output + n2.output
    why = rf"generation {g} \(worker \d on {first} was killed by signal 9\)"
    place = r"rank 0 of 4 goes on from commit \d+ \(.*\) in a new process"
    cost = r"after \d+\.\d\d s; trained again: (\d+ steps and the one|the step) under way"
    assert re.search(f"{why}: {place} {cost}", told), told
    each_sample_once(job.directory)


def test_four_workers_of_a_node_that_share_their_snapshots(job: Job) -> None:
    """One is killed, a node joins and leaves."""
    n1 = start(job, "n1", nproc=4, settle=0)
    g = job.trains(4)
    workers = [e.pid for e in job.events("start") if e.generation == g]
    send(signal.SIGKILL, workers[:1])
    g = job.trains(4, after=g)
    again = {e.pid for e in job.events("start") if e.generation == g}
    assert set(workers[1:]) < again
    n2 = start(job, "n2", nproc=4)
    g = job.trains(8, after=g)
    n2.terminate()
    job.exits(n2, 143)
    g = job.trains(4, after=g)
    assert {e.pid for e in job.events("start") if e.generation == g} == again
    job.finish(n1)
    each_sample_once(job.directory)
