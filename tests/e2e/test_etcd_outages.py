"""etcd goes and comes back, or takes a lease away."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import TTL, Job
from tests.support.proxy import Proxy, proxy_aside
from tests.support.residue import history, member, members_are
from tests.support.ticking import TickingJob, ticking

pytestmark = pytest.mark.timeout(600)


def test_etcd_killed_and_restarted(job: Job, etcd: EtcdServer) -> None:
    """For a moment, and for longer than the TTL."""
    n1, n2 = (job.start(node, suspect_after=0) for node in ("n1", "n2"))
    g = job.trains(2)
    for outage in (0.3, 2 * TTL + 1):
        etcd.kill()
        job.goes_on(g, steps=int(outage / 0.04))
        etcd.start()
        job.goes_on(g, steps=50)
        assert max(e.generation for e in job.events()) == g, "no worker was restarted"
        # And the agents are at work again.
        os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
        g = job.trains(2, after=g)
    job.finish(n1, n2)


def test_r9_join_timeout_stands_still_while_etcd_is_away(
    jobs: Callable[..., TickingJob], etcd: EtcdServer
) -> None:
    job = jobs(kind=TickingJob)
    timeout = 20
    n1 = job.start("n1", nnodes="2:2", join_timeout=timeout)
    job.said(n1, "1 node is ready; at least 2 must be")
    etcd.kill()
    job.said(n1, "etcd does not answer")
    over = monotonic() + timeout
    job.wait("the timeout is over", lambda: monotonic() > over, seconds=timeout + 10)
    etcd.start()
    n2 = job.start("n2", nnodes="2:2", join_timeout=timeout)
    job.trains(2, seconds=40)
    job.finish(n1, n2)


def test_etcd_away_for_longer_than_its_timeout(
    jobs: Callable[..., TickingJob], etcd: EtcdServer
) -> None:
    job = jobs(kind=TickingJob)
    n1 = job.start("n1", nnodes="1", etcd_timeout=1)
    g = job.trains(1)
    etcd.kill()
    os.kill(job.worker(g, rank=0).pid, signal.SIGKILL)
    job.exits(n1, 5, seconds=40)
    assert "--etcd-timeout" in n1.output
    told = n1.output.partition("nothing trains on this node until etcd answers\n")[2]  # P6
    assert told.lstrip().startswith("root cause: rank 0 on n1 (local rank 0, pid"), n1.output
    assert ") was killed by SIGKILL after" in told
    job.abandoned = True
    etcd.start()


def test_lease_revoked_under_its_live_holder(ticks: TickingJob, etcd: EtcdServer) -> None:
    """First that of the oldest node, and then the other's.

    Either the other is faster and begins anew, or the victim, and its key is back.
    """
    n1 = ticks.start("n1")
    members_are(etcd, ticks.name, 1)
    n2 = ticks.start("n2")
    g = ticks.trains(2)
    for victim in ("n1", "n2"):
        etcd.ctl("lease", "revoke", member(etcd, ticks.name, victim))
        members_are(etcd, ticks.name, 2)
        g = ticks.settles(2)
        assert ticks.worker(g, rank=0).restarts == 0
    assert any("joining again" in n.output or "is put back" in n.output for n in (n1, n2))
    ticks.finish(n1, n2)


def test_etcd_forgets(jobs: Callable[..., TickingJob], etcd: EtcdServer) -> None:
    """The job's keys, and then all data."""
    job = jobs(kind=TickingJob)
    n1, n2 = job.start("n1"), job.start("n2")
    g = job.trains(2)
    etcd.ctl("del", "--prefix", f"/elastic_etcd/{job.name}/")
    g = job.trains(2, after=g)
    etcd.kill()
    etcd.wipe()
    etcd.start()
    job.trains(2, after=g)
    job.finish(n1, n2)


def test_a_txn_that_timed_out_but_was_applied(
    etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A node's reports of a failure, and of its success, are written twice and count once."""
    with (
        proxy_aside(etcd.endpoint) as (endpoint, proxy),
        ticking(etcd.endpoint, etcd, tmp_path / "job", request) as job,
    ):
        n1, n2 = job.start("n1", etcd=endpoint), job.start("n2")
        g = job.trains(2)
        proxy(Proxy.lose_answers)
        rank = next(rank for rank in range(2) if job.worker(g, rank).node == "n1")
        job.kill_worker(g, rank)
        new = job.trains(2, after=g)
        assert job.worker(new, 0).restarts == 1
        ended = history(etcd, job.name)[g]
        assert [failure["rank"] for failure in ended["failures"]] == [rank]
        proxy(Proxy.lose_answers)
        job.finish(n1, n2)
