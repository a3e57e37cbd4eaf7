"""etcd goes and comes back, or takes a lease away."""

import os
import signal

import pytest

from tests.etcd.server import EtcdServer

from .harness import TTL, Job
from .traces import member, members_are

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("outage", [0.3, 2 * TTL + 1], ids=["short", "longer than the TTL"])
def test_etcd_killed_and_restarted(job: Job, etcd: EtcdServer, outage: float) -> None:
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2)
    etcd.kill()
    job.goes_on(g, steps=int(outage / 0.04))
    etcd.start()
    job.goes_on(g, steps=50)
    assert {e.generation for e in job.events()} == {g}, "no worker was restarted"
    # And the agents are at work again.
    os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
    job.trains(2, after=g)
    job.finish(n1, n2)


def test_etcd_away_for_longer_than_its_timeout(job: Job, etcd: EtcdServer) -> None:
    n1 = job.start("n1", nnodes="1", etcd_timeout=1)
    job.trains(1)
    etcd.kill()
    job.exits(n1, 5, seconds=10)
    assert "--etcd-timeout" in n1.output
    job.abandoned = True
    etcd.start()


@pytest.mark.parametrize("victim", ["oldest", "youngest"])
def test_lease_revoked_under_its_live_holder(job: Job, etcd: EtcdServer, victim: str) -> None:
    n1 = job.start("n1")
    members_are(etcd, job.name, 1)
    n2 = job.start("n2")
    g = job.trains(2)
    etcd.ctl("lease", "revoke", member(etcd, job.name, "n1" if victim == "oldest" else "n2"))
    new = job.trains(2, after=g)
    assert job.worker(new, rank=0).restarts == 0
    job.finish(n1, n2)


@pytest.mark.parametrize("how", ["the job's keys", "all data"])
def test_etcd_forgets(job: Job, etcd: EtcdServer, how: str) -> None:
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2)
    if how == "all data":
        etcd.kill()
        etcd.wipe()
        etcd.start()
    else:
        etcd.ctl("del", "--prefix", f"/elastic_etcd/{job.name}/")
    job.trains(2, after=g)
    job.finish(n1, n2)
