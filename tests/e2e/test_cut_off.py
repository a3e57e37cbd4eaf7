"""A node that etcd does not answer, with --when-cut-off stop: no two worlds ever train."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.etcd import EtcdServer
from tests.support.invariants import each_sample_once
from tests.support.job import ELASTIC, Job
from tests.support.processes import send
from tests.support.proxy import Proxy, proxy_aside
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

LONG = 20  # a TTL of which etcd's restart is a small part
STUBBORN = ("--fault", "ignore-term")

# A script that asks again and again, as others do before they replace a file.
ASKS = """
import signal, sys, time
from pathlib import Path
import elastic_etcd as ee

signal.signal(signal.SIGTERM, signal.SIG_IGN)
while not Path(sys.argv[1], "stop").exists():
    try:
        ee.raise_if_stale()
        print("it is current", flush=True)
    except ee.EtcdUnreachable:
        print("nobody can say", flush=True)
    except ee.StaleGeneration as error:
        print("it is not:", error, flush=True)
        break
    time.sleep(0.1)
"""


@pytest.fixture
def job(ticks: TickingJob) -> TickingJob:
    return ticks


@pytest.mark.parametrize("leaving", [False, True], ids=["trains", "leaves"])
def test_r7_a_world_that_is_cut_off_has_ended_before_another_begins(
    job: TickingJob, etcd: EtcdServer, *, leaving: bool
) -> None:
    """All of the world is on one side, a spare on the other; the workers ignore SIGTERM."""
    flags: dict[str, Any] = {"nnodes": "1:1", "lease_ttl": 6, "when_cut_off": "stop"}
    with proxy_aside(etcd.endpoint) as (endpoint, proxy):
        n1 = job.start("n1", *STUBBORN, etcd=endpoint, **flags)
        g = job.trains(1, seconds=60)
        n2 = job.start("n2", **flags)
        job.said(n2, "spare: ")
        proxy(Proxy.freeze)
        if leaving:
            n1.terminate()
        new = job.trains(1, after=g, seconds=60)
        last = max(e.time for e in job.events("step") if e.generation == g)
        assert last < job.worker(new, 0).time
        assert "--when-cut-off stop" in n1.output
        proxy(Proxy.thaw)
        if leaving:
            job.exits(n1, 143)
        else:
            job.said(n1, "joining again")
            job.said(n1, "spare: ")
        job.goes_on(new)
        job.finish(*([n2] if leaving else [n1, n2]))


@pytest.mark.parametrize(
    "asleep", ["agent", pytest.param("node", marks=pytest.mark.nightly(part="jobs"))]
)
def test_r7_a_stopped_agent_s_world_has_ended_before_another_begins(
    job: TickingJob, *, asleep: str
) -> None:
    """Nobody renews its lease, and it can stop nothing; nor can it know that when it wakes up."""
    flags: dict[str, Any] = {"nnodes": "1:1", "lease_ttl": 6, "when_cut_off": "stop"}
    n1 = job.start("n1", **flags)
    g = job.trains(1, seconds=60)
    n2 = job.start("n2", **flags)
    job.said(n2, "spare: ", seconds=60)
    if asleep == "agent":
        send(signal.SIGSTOP, [n1.pid])
    else:
        n1.freeze()
    new = job.trains(1, after=g, seconds=60)
    n1.thaw()
    job.said(n1, "joining again")
    job.said(n1, "spare: ")
    if asleep == "agent":
        last = max(e.time for e in job.events("step") if e.generation == g)
        assert last < job.worker(new, 0).time
        assert "(--when-cut-off stop)" in n1.output
    job.undisturbed(new)
    assert job.worker(new, 0).restarts == 0
    job.finish(n1, n2)


def test_r7_workers_of_a_stopped_agent_train_on_by_default(job: TickingJob) -> None:
    n1 = job.start("n1", nnodes="1:1", lease_ttl=6)
    g = job.trains(1, seconds=60)
    n2 = job.start("n2", nnodes="1:1", lease_ttl=6)
    job.said(n2, "spare: ", seconds=60)
    send(signal.SIGSTOP, [n1.pid])
    new = job.trains(1, after=g, seconds=60)
    job.goes_on(g)
    send(signal.SIGCONT, [n1.pid])
    job.said(n1, "joining again")
    job.undisturbed(new)
    job.finish(n1, n2)


def test_r7_an_outage_of_etcd_stops_everybody_until_it_is_back(
    job: TickingJob, etcd: EtcdServer
) -> None:
    n1, n2, g = job.pair(when_cut_off="stop")
    etcd.kill()
    for agent in (n1, n2):
        job.said(agent, "the workers are stopped (--when-cut-off stop)")
        pid = job.begun(g)[agent.node].pid
        job.wait("its worker ends", lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    etcd.start()
    new = job.trains(2, after=g)
    assert job.worker(new, rank=0).restarts == 0
    job.finish(n1, n2)


def test_r7_an_outage_that_is_short_stops_nobody(job: TickingJob, etcd: EtcdServer) -> None:
    n1, n2, g = job.pair(when_cut_off="stop", lease_ttl=LONG)
    etcd.kill()
    job.said(n1, "etcd does not answer")
    etcd.start()
    job.said(n1, "etcd answers again")
    job.undisturbed(g)
    os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
    job.trains(2, after=g)
    job.finish(n1, n2)


@pytest.mark.nightly(part="jobs")
def test_r7_workers_that_recover_in_process_wait_for_etcd(
    jobs: Callable[..., Job], etcd: EtcdServer
) -> None:
    """They park: who holds no process group trains nothing, and goes on with what is in memory."""
    job = jobs()
    script = (ELASTIC, "--dir", str(job.directory))
    n1, n2 = (
        job.start(node, script=script, lease_ttl=18, when_cut_off="stop") for node in ("n1", "n2")
    )
    g = job.trains(2, seconds=60)
    before = job.begun(g)
    etcd.kill()
    for agent in (n1, n2):
        job.said(agent, "the workers are stopped (--when-cut-off stop)")
        job.said(agent, "joining again")
    etcd.start()
    after = job.begun(job.trains(2, after=g, seconds=60))
    lived_on = {event.pid for event in after.values()} & {event.pid for event in before.values()}
    assert lived_on, "none has parked in its third of the TTL"
    job.finish(n1, n2)
    each_sample_once(job.directory)


def test_r7_a_script_can_ask_whether_its_world_is_still_the_job_s(
    job: TickingJob, etcd: EtcdServer, tmp_path: Path
) -> None:
    """Before it replaces a checkpoint: whoever was cut off must not write over a newer one."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    n1 = job.start("n1", nnodes="1:1", script=(str(script), str(job.directory)))
    job.said(n1, "it is current")
    etcd.kill()
    job.said(n1, "nobody can say")
    etcd.start()
    job.said(n1, "etcd answers again")
    etcd.ctl("del", "--prefix", f"/elastic_etcd/{job.name}/")
    job.said(n1, "it is not: generation 1")
    job.said(n1, "generation 2 (")
    job.finish(n1)
