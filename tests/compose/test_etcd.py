"""etcd members that go and come back under a job: no worker may notice."""

from collections.abc import Callable

import pytest

from .engine import Container
from .job import TTL, ComposeJob, healthy, leader, status

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="compose")]

Jobs = Callable[..., ComposeJob]
Members = dict[str, Container]
LONG = 2 * TTL * 10  # steps of 0.1 s that last longer than a lease


def nothing_changed(job: ComposeJob, generation: int, steps: int) -> None:
    """Training goes on for so many steps, by the same processes."""
    job.goes_on(generation, steps, seconds=120)
    assert {e.generation for e in job.events("start")} == {generation}, "workers were started anew"


def test_the_leader_is_killed(jobs: Jobs, etcd_members: Members) -> None:
    job = jobs()
    g = job.begin()
    old = leader()
    etcd_members[old].kill()
    nothing_changed(job, g, LONG)
    assert leader() != old
    # And what is left of etcd does its work.
    job.nodes["node3"].kill()
    job.trains(2, after=g, seconds=60)


def test_a_member_is_paused(jobs: Jobs, etcd_members: Members) -> None:
    """The clients of a frozen member must leave it: no connection breaks (etcd#8980).

    A leader that wakes may still take itself for one, and before etcd#16822 (and, less often,
    after it) revokes leases that are alive (etcd#15247): then their nodes join again.
    """
    job = jobs()
    g = job.begin()
    for leads in (False, True):
        paused = next(m for name, m in etcd_members.items() if (name == leader()) is leads)
        paused.pause()
        nothing_changed(job, g, LONG)
        paused.unpause()
        healthy(etcd_members)
        if not leads:
            nothing_changed(job, g, TTL * 10)
    job.all_train(TTL * 10, seconds=120)
    assert not any(e.restarts for e in job.events())


def test_the_majority_is_lost_and_comes_back(jobs: Jobs, etcd_members: Members) -> None:
    job = jobs()
    g = job.begin()
    lost = [member for name, member in etcd_members.items() if name != "etcd2"]
    for member in lost:
        member.kill()
    nothing_changed(job, g, LONG)
    for member in lost:
        member.start()
    healthy(etcd_members)
    nothing_changed(job, g, LONG)
    job.nodes["node3"].kill()
    job.trains(2, after=g, seconds=60)


def test_a_rolling_restart(jobs: Jobs, etcd_members: Members) -> None:
    """Of all three, the second time while a node dies: only that is noticed."""
    job = jobs()
    g = job.begin()
    began = {m["Endpoint"]: m["Status"]["raftTerm"] for m in status()}
    for name, member in etcd_members.items():
        member.stop()
        if name == "etcd2":
            job.nodes["node3"].kill()
            nodes_lost = g
        member.start()
        healthy(etcd_members)
        if name == "etcd2":
            g = job.trains(2, after=g, seconds=60)
        job.goes_on(g, TTL * 10, seconds=120)
    assert {e.generation for e in job.events("start")} == {nodes_lost, g}
    assert job.worker(g, rank=0).restarts == 0
    assert max(m["Status"]["raftTerm"] for m in status()) > max(began.values()), "the leader went"
