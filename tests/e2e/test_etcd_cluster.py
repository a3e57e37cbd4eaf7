"""A job on three etcd members that die, freeze, lose each other, and forget."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_etcd.etcd.client import Client
from tests.support.aio import put
from tests.support.etcd import EtcdCluster
from tests.support.job import TTL
from tests.support.ticking import TickingJob, connected, ticking

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def job(
    cluster: EtcdCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[TickingJob]:
    endpoints = ",".join(cluster.config.endpoints)
    with ticking(endpoints, cluster.members[0], tmp_path / "job", request) as job:
        yield job


def test_leader_killed_and_then_one_frozen_past_the_ttl(
    job: TickingJob, cluster: EtcdCluster
) -> None:
    """When it wakes, it may revoke leases that the others have renewed (etcd#15247)."""
    n1, n2, g = job.pair(suspect_after=0)
    (leader,) = connected(n1, cluster)
    cluster.lead(leader)
    leader.kill()
    job.undisturbed(g, TTL + 1)
    job.kill_worker(g)
    g = job.trains(2, after=g)
    leader.start()

    (leader,) = connected(n1, cluster)
    cluster.lead(leader)
    leader.freeze()
    job.undisturbed(g, TTL + 1)
    leader.thaw()
    g = job.settles(2)
    job.kill_worker(g)
    job.trains(2, after=g)
    job.finish(n1, n2)


@pytest.mark.nightly(part="jobs")
def test_etcd_member_frozen_with_sigstop(job: TickingJob, cluster: EtcdCluster) -> None:
    """etcd#8980: an agent that is connected to a frozen follower finds another member.

    It has a third of the TTL for that: of 2 s too little, on a machine that does much else.
    """
    ttl = 6
    n1, n2, g = job.pair(lease_ttl=ttl)
    (follower,) = connected(n1, cluster)
    cluster.lead(cluster.others(follower)[0])
    follower.freeze()
    job.undisturbed(g, ttl + 1)
    assert connected(n1, cluster) != [follower]
    job.kill_worker(g)
    job.trains(2, after=g)
    follower.thaw()
    job.finish(n1, n2)


def test_all_of_etcd_down_for_longer_than_the_ttl(job: TickingJob, cluster: EtcdCluster) -> None:
    """Leases begin anew under a new leader; an old one that wakes up finds them over."""
    n1, n2, g = job.pair(suspect_after=0)
    for number, lost in ((signal.SIGKILL, 2), (signal.SIGSTOP, 3)):
        leader = cluster.leader()
        for member in [leader, *cluster.others(leader)][:lost]:
            member.signal(number)
        job.undisturbed(g, TTL + 1)
        job.kill_worker(g)  # which nobody can agree on
        job.goes_on(g, steps=10)
        assert max(e.generation for e in job.events()) == g
        cluster.heal()
        g = job.trains(2, after=g)
    job.finish(n1, n2)


@pytest.mark.nightly(part="jobs")
def test_compacted_watch_while_members_are_defragmented_under_load(
    job: TickingJob, cluster: EtcdCluster
) -> None:
    """A watch that begins anew, because its member has gone, finds its revision compacted."""
    n1, n2, g = job.pair()
    (member,) = connected(n1, cluster)

    async def writer(client: Client, name: int) -> int:
        return max([await put(client, f"/load/{name}", "x" * 20_000) for _ in range(100)])

    async def load() -> None:
        async with Client(cluster.config) as client:
            for each in cluster.members:
                writers = asyncio.gather(*(writer(client, name) for name in range(4)))
                await asyncio.to_thread(each.ctl, "defrag")
                revision = max(await writers)
                await asyncio.to_thread(each.ctl, "compact", str(revision))

    asyncio.run(load())
    member.kill()
    job.said(n1, "etcd has compacted the events of")
    job.undisturbed(g, 1)
    job.kill_worker(g)
    job.trains(2, after=g)
    member.start()
    job.finish(n1, n2)
