"""What the nodes of a job agree on: how many may train, by which limits, and in which format."""

import json

import pytest

from tests.support.etcd import EtcdServer
from tests.support.residue import keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def job(ticks: TickingJob) -> TickingJob:
    return ticks


def test_only_sizes_of_the_list_train(job: TickingJob) -> None:
    n1 = job.start("n1", nnodes="1,3", settle=0)
    g = job.trains(1)
    n2 = job.start("n2", nnodes="1,3")
    job.said(n2, "spare: 1 node trains, the next size is 3")
    job.goes_on(g)
    n3 = job.start("n3", nnodes="1,3")
    three = job.trains(3, after=g)
    assert job.worker(three, rank=0).node == "n1"
    n1.node_kill()
    one = job.trains(1, after=three)
    assert {e.generation for e in job.events()} == {g, three, one}
    stranger = job.start("n4", nnodes="1:3", nodes_multiple_of=3)
    job.exits(stranger, 2)
    told = "--nnodes 3:3 --nodes-multiple-of 3 differs from 1,3 of the nodes there"
    assert told in stranger.output
    job.finish(n2, n3)


def test_r14_the_limits_of_the_first_node_count(job: TickingJob, etcd: EtcdServer) -> None:
    """Also for an agent that asks for others, and coordinates."""
    n1 = job.start("n1", settle=0, max_restarts=1, min_uptime=0)
    g = job.trains(1)
    n2 = job.start("n2", max_restarts=9, min_uptime=0, shutdown_timeout=60)
    g = job.trains(2, after=g)
    told = "the job's limits count, not this node's: --max-restarts 1 (here 9), --settle 0 (here"
    assert n2.output.count(told) == 1
    assert "limits count" not in n1.output
    n1.node_kill()
    g = job.trains(1, after=g)
    job.kill_worker(g)
    g = job.trains(1, after=g)
    job.kill_worker(g)
    job.exits(n2, 3)
    assert "the only restart is used up (--max-restarts)" in n2.output
    assert n2.output.count(told) == 1


def test_r13_a_job_that_asks_for_a_newer_format_is_left_alone(
    job: TickingJob, etcd: EtcdServer
) -> None:
    n1 = job.start("n1", settle=0)
    job.trains(1)
    before = keys(etcd, job.name)
    spec = before["spec"] | {"min_version": 3}
    assert before["spec"]["min_version"] == 2
    etcd.ctl("put", f"/elastic_etcd/{job.name}/spec", json.dumps(spec))
    job.exits(n1, 7)
    n2 = job.start("n2")
    job.exits(n2, 7)
    for node in (n1, n2):
        assert "written by a newer elastic_etcd (format 3)" in node.output
    after = keys(etcd, job.name)
    assert (after["spec"], after["round"]) == (spec, before["round"]), "nothing was written"
    job.abandoned = True
