"""Job ids, jobs side by side, the embedded etcd, and what all of it writes."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

import pytest

from elastic_etcd.agent.address import interfaces
from tests.support.etcd import EtcdServer, tool
from tests.support.job import Agent, Job
from tests.support.processes import command, send
from tests.support.residue import history, keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

# Run apart: etcd3's messages only load on protobuf's Python implementation.
READ_WITH_ETCD3 = """
import json, sys, etcd3
host, port, prefix = sys.argv[1:]
client = etcd3.client(host=host, port=int(port))
kvs = client.get_prefix(prefix)
print(json.dumps({kv.key.decode(): [value.decode(), kv.lease_id] for value, kv in kvs}))
"""


RERUN = {"PET_RERUN": "1"}


@pytest.fixture(autouse=True)
def _no_etcd_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETCDCTL_ENDPOINTS", raising=False)


def test_reuse_of_a_job_id(jobs: Callable[..., Job], etcd: EtcdServer) -> None:
    failed = jobs(kind=TickingJob)
    agent = failed.start("n1", "--fault", "exit:7@step=2", nnodes="1", max_restarts=0)
    failed.exits(agent, 1)
    assert keys(etcd, failed.name)["outcome"]["state"] == "failed"
    for env in ({}, RERUN):
        again = jobs(failed.name, TickingJob)
        agent = again.start("n1", "--steps", "5", nnodes="1", env=env)
        again.exits(agent, 0, seconds=60)
        assert keys(etcd, failed.name)["outcome"]["state"] == "succeeded"
        assert "exited 7" not in agent.output
    runs = [entry["run"] for entry in history(etcd, failed.name).values()]
    assert len(runs) == len(set(runs)) == 3
    assert [e.restarts for e in again.events("start")] == [0]


def test_r20_an_agent_that_is_started_again_after_success_runs_nothing(
    jobs: Callable[..., Job], etcd: EtcdServer
) -> None:
    """As systemd and Kubernetes do it; a new run would write over what is done."""
    job = jobs(kind=TickingJob)
    n1, n2 = job.start("n1", nnodes="2"), job.start("n2", nnodes="2")
    job.trains(2, seconds=60)
    job.finish(n1, n2)
    before = keys(etcd, job.name)
    again = jobs(job.name, TickingJob)
    agent = again.start("n1", nnodes="2")
    again.exits(agent, 0, seconds=60)
    assert "this job has already succeeded at 20" in agent.output
    assert "--rerun (torchrun: --rdzv-conf rerun=true) runs it again" in agent.output
    assert keys(etcd, job.name) == before
    again.stop()
    more = [again.start(node, nnodes="2", env=RERUN) for node in ("n1", "n2")]
    for agent in more:
        again.exits(agent, 0, seconds=60)
    after = keys(etcd, job.name)
    assert after["outcome"]["state"] == "succeeded"
    assert after["outcome"]["run"] != before["outcome"]["run"]


def test_m6_another_training_with_the_same_job_id_is_told_and_is_no_success(
    jobs: Callable[..., Job], etcd: EtcdServer
) -> None:
    job = jobs(kind=TickingJob)
    n1 = job.start("n1", nnodes="1")
    g = job.trains(1)
    spec = keys(etcd, job.name)["spec"]
    n2 = job.start("n2", "--steps", "7", nnodes="1")
    job.said(n2, "n1 has begun job")
    job.said(n2, "another script or other arguments")
    job.said(n2, "spare")
    job.finish(n1)
    job.exits(n2, 2)
    assert "with another command than this node's" in n2.output
    assert {e.generation for e in job.events()} == {g}
    assert keys(etcd, job.name)["outcome"]["command"] == spec["command"] != ""
    late = job.start("n3", "--steps", "7", nnodes="1")
    job.exits(late, 2)
    assert "has already succeeded" in late.output
    assert "give this one its own --job" in late.output
    same = job.start("n3", nnodes="1")
    job.exits(same, 0)


def test_two_jobs_on_one_etcd(jobs: Callable[..., Job]) -> None:
    a, b = jobs(kind=TickingJob), jobs(kind=TickingJob)
    agent_a, agent_b = a.start("n1", nnodes="1"), b.start("n1", nnodes="1")
    in_a, in_b = a.trains(1), b.trains(1)
    os.kill(a.worker(in_a, rank=0).pid, signal.SIGKILL)
    a.trains(1, after=in_a)
    b.goes_on(in_b)
    assert {e.generation for e in b.events()} == {in_b}
    a.finish(agent_a)
    b.goes_on(in_b)
    b.finish(agent_b)


def test_embedded_etcd(tmp_path: Path) -> None:
    job = Job(None, tmp_path)
    try:
        agent = job.start("n1", nnodes="1", nproc=2)
        job.trains(2)
        told = re.search(r"an etcd of its own, .* at (unix://\S+)", agent.output)
        assert told, agent.output
        get = [tool("etcdctl"), "--endpoints", told[1], "get", "--prefix", "--keys-only", "/"]
        found = subprocess.run(get, check=True, capture_output=True, text=True).stdout
        assert f"/elastic_etcd/{job.name}/round" in found
        assert told[1].startswith("unix://"), "m21: no other user of this machine reaches it"
        status = [sys.executable, "-m", "elastic_etcd", "status", job.name, "--etcd", told[1]]
        seen = subprocess.run(status, check=True, capture_output=True, text=True).stdout
        assert "training" in seen
        job.finish(agent)
        job.check()
        assert not job.processes()
    finally:
        job.close()


def embedded(agent: Agent) -> list[int]:
    """The pid of the agent's own etcd, if it runs."""
    return [p for p in agent.others() if "--name=embedded" in command(p)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[TickingJob]:
    """A job with an etcd of its own."""
    job = TickingJob(None, tmp_path)
    yield job
    job.close()


def test_r11_an_embedded_etcd_that_is_killed_is_started_again(alone: TickingJob) -> None:
    agent = alone.start("n1", nnodes="1")
    g = alone.trains(1)
    (first,) = embedded(agent)
    send(signal.SIGKILL, [first])
    alone.wait("another etcd", lambda: embedded(agent) not in ([], [first]), seconds=60)
    alone.goes_on(g)
    os.kill(alone.worker(g, rank=0).pid, signal.SIGKILL)  # to be agreed on, it takes an etcd
    alone.trains(1, after=g, seconds=60)
    alone.finish(agent)
    alone.check()
    assert not alone.processes()


def test_m19_an_embedded_etcd_that_ends_again_and_again_ends_no_training(
    alone: TickingJob,
) -> None:
    agent = alone.start("n1", nnodes="1")
    g = alone.trains(1)
    killed: set[int] = set()
    for _ in range(3):
        (pid,) = alone.wait("an etcd runs", lambda: set(embedded(agent)) - killed, seconds=60)
        send(signal.SIGKILL, [pid])
        killed.add(pid)
    alone.said(agent, "it is started again in 2 s", seconds=60)
    alone.goes_on(g)
    alone.finish(agent)
    assert not alone.processes()


@pytest.fixture(name="short")
def _short() -> Iterator[Path]:
    """A temporary directory whose path is not too long for a socket's address."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kill", [Agent.kill, Agent.node_kill], ids=["agent", "node"])
def test_nothing_stays_in_the_temporary_directory_of_an_agent_that_is_killed(
    alone: TickingJob, short: Path, kill: Callable[[Agent], None]
) -> None:
    """Its guardian removes it, and where that is killed, too, the next agent does."""
    env = {"TMPDIR": str(short)}
    agent = alone.start("n1", nnodes="1", env=env)
    alone.trains(1)
    before = set(short.glob("elastic_etcd*"))
    assert before
    kill(agent)
    alone.wait("all that it ran ends, its guardian last", lambda: not agent.others())
    if kill is Agent.node_kill:
        agent = alone.start("n1", "--steps", "5", nnodes="1", env=env)
        alone.exits(agent, 0, seconds=60)
    assert not {*short.glob("elastic_etcd*")}
    alone.abandoned = True


@pytest.mark.skipif(not find_spec("etcd3"), reason="needs the package etcd3")
def test_keys_read_by_etcdctl_and_etcd3(ticks: TickingJob, etcd: EtcdServer) -> None:
    n1, n2 = ticks.start("n1"), ticks.start("n2")
    g = ticks.trains(2)
    os.kill(ticks.worker(g, rank=1).pid, signal.SIGKILL)
    g = ticks.trains(2, after=g)
    seen = keys(etcd, ticks.name)
    root = f"/elastic_etcd/{ticks.name}/"
    host, _, port = etcd.endpoint.rpartition(":")
    other = subprocess.run(
        [sys.executable, "-c", READ_WITH_ETCD3, host, port, root],
        env=os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        check=True,
        capture_output=True,
        text=True,
    )
    read = json.loads(other.stdout)
    assert {k.removeprefix(root): json.loads(v) for k, (v, _) in read.items()} == seen
    kinds = {k.split("/")[0] for k in seen}
    assert kinds >= {"spec", "members", "ledger", "round", "world", "acks", "history"}
    assert all(value["v"] == 2 for value in seen.values())
    assert all(v == json.dumps(json.loads(v), sort_keys=True) for v, _ in read.values())
    leased = {k.removeprefix(root).split("/")[0] for k, (_, lease) in read.items() if lease}
    assert leased == {"members", "acks"}, "a final round is bound to no lease"
    assert seen["round"]["generation"] == g
    world = sorted(seen["world/0"]["participants"], key=lambda p: p["group_rank"])
    assert [p["node"] for p in world] == ["n1", "n2"]
    assert f"{seen['round']['master']['addr']}:{seen['round']['master']['port']}" == (
        ticks.worker(g, rank=0).master
    )
    ticks.finish(n1, n2)


def test_r15_nodes_meet_where_another_machine_would_find_them(ticks: TickingJob) -> None:
    """etcd is at 127.0.0.1, where the other node need not be."""
    if all(each.ip.is_loopback for each in interfaces()):
        pytest.skip("this machine has only the loopback")
    agents = [ticks.start(node) for node in ("n1", "n2")]
    ticks.trains(2, seconds=60)
    masters = {event.master.rpartition(":")[0] for event in ticks.events("start")}
    assert not any(ip_address(master).is_loopback for master in masters)
    ticks.finish(*agents)
