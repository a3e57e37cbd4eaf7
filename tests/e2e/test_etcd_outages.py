"""etcd goes and comes back: training does not notice."""

import os
import signal

import pytest

from tests.etcd.server import EtcdServer

from .harness import TTL, Job

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
