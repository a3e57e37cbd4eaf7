"""A node whose processes all die at once is missed at once, and nobody else is.

The leases are so long that none ends by itself; workers only tick.
"""

from typing import Any

import pytest

from tests.support.etcd import EtcdServer
from tests.support.job import Agent
from tests.support.lines import impostor, members, missed, nobody_is_dead
from tests.support.residue import history, members_are
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

LONG: dict[str, Any] = {"lease_ttl": 600, "log_level": "debug"}


@pytest.fixture
def job(ticks: TickingJob) -> TickingJob:
    return ticks


def pair(job: TickingJob, etcd: EtcdServer, **flags: Any) -> tuple[Agent, Agent, int]:
    """Two nodes that train, the first one as the coordinator, and their generation."""
    n1 = job.start("n1", **LONG, **flags)
    members_are(etcd, job.name, 1)
    n2 = job.start("n2", **LONG, **flags)
    generation = job.trains(2)
    missed(job, n1, n2)
    return n1, n2, generation


@pytest.mark.nightly(part="jobs")
def test_a_spare_that_dies_is_missed_too(job: TickingJob, etcd: EtcdServer) -> None:
    n1, n2, g = pair(job, etcd)
    n3 = job.start("n3", **LONG)
    missed(job, n1, n3)
    n3.node_kill()
    members_are(etcd, job.name, 2)
    job.undisturbed(g)
    job.finish(n1, n2)


def test_a_new_coordinator_misses_the_others_too(job: TickingJob, etcd: EtcdServer) -> None:
    n1, n2, g = pair(job, etcd, nnodes="1:3", settle=0)
    n3 = job.start("n3", nnodes="1:3", **LONG)
    g = job.trains(3, after=g)
    missed(job, n1, n2, n3)
    n1.node_kill()
    g = job.trains(2, after=g)
    job.wait("one misses the other", lambda: "would be missed" in n2.output + n3.output)
    last, dead = (n2, n3) if "would be missed" in n2.output else (n3, n2)
    dead.node_kill()
    job.trains(1, after=g)
    job.finish(last)


@pytest.mark.parametrize("victim", ["coordinator", "other"])
def test_a_node_is_missed_when_it_is_killed_and_not_while_it_is_stopped(
    job: TickingJob, etcd: EtcdServer, victim: str
) -> None:
    n1, n2, g = pair(job, etcd)
    stopped, other = (n1, n2) if victim == "coordinator" else (n2, n1)
    stopped.freeze()
    nobody_is_dead(job, other, g, 2)
    stopped.thaw()
    job.undisturbed(g)
    stopped.node_kill()
    alone = job.trains(1, after=g)
    assert f"{stopped.node} is dead: its connection has ended" in other.output
    assert history(etcd, job.name)[alone]["began"] == f"{stopped.node} is lost: its agent is gone"
    assert job.worker(alone, rank=0).restarts == 0
    job.finish(other)


def test_a_line_that_breaks_is_no_proof_while_its_agent_lives(
    job: TickingJob, etcd: EtcdServer
) -> None:
    """Whether that answers or is stopped."""
    n1, n2, g = pair(job, etcd)
    there = members(etcd, job.name)
    with impostor(called=there["n1"], named=there["n2"]):
        missed(job, n1, n2, times=2)  # a line of n2's, as far as n1 can know
    nobody_is_dead(job, n1, g, 2)
    with impostor(called=there["n1"], named=there["n2"]):
        missed(job, n1, n2, times=3)
        n2.freeze()
    nobody_is_dead(job, n1, g, 2)
    n2.thaw()
    job.undisturbed(g)
    job.finish(n1, n2)


def test_without_proof_of_death_a_node_is_missed_by_its_lease(
    job: TickingJob, etcd: EtcdServer
) -> None:
    n1 = job.start("n1", proof_of_death="off")
    members_are(etcd, job.name, 1)
    n2 = job.start("n2", env={"PET_PROOF_OF_DEATH": "off"})
    g = job.trains(2)
    assert all(member.contact is None for member in members(etcd, job.name).values())
    n2.node_kill()
    job.trains(1, after=g)
    assert " is dead" not in n1.output
    job.finish(n1)


def test_a_node_that_leaves_is_not_taken_for_dead(job: TickingJob, etcd: EtcdServer) -> None:
    """First one that does not coordinate, and then the coordinator."""
    n1, n2, g = pair(job, etcd)
    n2.terminate()
    job.exits(n2, 143)
    alone = job.trains(1, after=g)
    assert history(etcd, job.name)[alone]["began"] == "n2 is leaving"
    n3 = job.start("n3", **LONG)
    g = job.trains(2, after=alone)
    missed(job, n1, n3)
    n1.terminate()
    job.exits(n1, 143)
    alone = job.trains(1, after=g)
    assert history(etcd, job.name)[alone]["began"] == "n1 is leaving"
    assert " is dead" not in n1.output + n3.output
    job.finish(n3)
