"""An etcd that refuses what it has served before: the training goes on, and waits for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.etcd_versions import newest_or_skip
from tests.support.job import Agent
from tests.support.residue import PREFIX, member
from tests.support.ticking import TickingJob, ticking

pytestmark = pytest.mark.timeout(600)

TTL = 2
GIVEN = {"ELASTIC_ETCD_PASSWORD": "mine"}


@pytest.fixture
def guarded(own_etcd: EtcdServer, request: pytest.FixtureRequest) -> EtcdServer:
    """An etcd with users; for a test of `e2` one that asks who renews a lease."""
    if "_e2_" in request.node.name:
        own_etcd.program = newest_or_skip()
    own_etcd.start()
    own_etcd.guard(f"{PREFIX}/")
    own_etcd.user = "root:secret"
    return own_etcd


def older(etcd: EtcdServer) -> None:
    """What follows holds of an etcd that asks nobody who renews; failures.md says of which."""
    if etcd.asks_who_renews:
        pytest.skip("this etcd asks who renews a lease")


@pytest.fixture
def job(
    guarded: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[TickingJob]:
    with ticking(guarded.endpoint, guarded, tmp_path / "job", request) as job:
        yield job


def restart(etcd: EtcdServer) -> None:
    """All connections break, and etcd asks everybody once more who he is."""
    etcd.kill()
    etcd.start()


def loses_a_node(job: TickingJob, lost: Agent, generation: int) -> None:
    """The job is still led: a node that dies is missed."""
    lost.node_kill()
    job.trains(1, after=generation)


def puts_keys_back(job: TickingJob, guarded: EtcdServer, n1: Agent, n2: Agent, g: int) -> None:
    """Both leases end; with the permission the keys are back, and the world is the same."""
    for agent in (n1, n2):
        job.said(agent, "this node's key is gone, its world is not")
    guarded.ctl("user", "grant-role", "me", "training")
    for agent in (n1, n2):
        job.said(agent, "this node's key is back")
    job.undisturbed(g)
    job.finish(n1, n2)


def test_e2_a_permission_that_is_taken_away_ends_leases_and_no_training(
    job: TickingJob, guarded: EtcdServer
) -> None:
    n1, n2, g = job.pair(lease_ttl=10, user="me", env=GIVEN)
    guarded.ctl("user", "revoke-role", "me", "training")
    for agent in (n1, n2):
        job.said(agent, " s, and its key with it: etcd at ")
        job.said(agent, "denies user 'me' access to its lease.\n")
        job.said(agent, "Let an administrator run `etcdctl")
    guarded.ctl("user", "grant-role", "me", "training")
    for agent in (n1, n2):
        job.said(agent, "renews this node's lease again")
    job.undisturbed(g)
    guarded.ctl("user", "revoke-role", "me", "training")
    puts_keys_back(job, guarded, n1, n2, g)


@pytest.mark.nightly(part="jobs")
def test_e2_nor_does_it_where_nothing_of_the_job_is_seen_meanwhile(
    job: TickingJob, guarded: EtcdServer
) -> None:
    """The watches end, and no other is allowed: the end of the lease is all that they are told."""
    n1, n2, g = job.pair(lease_ttl=4, user="me", env=GIVEN)
    guarded.ctl("user", "revoke-role", "me", "training")
    restart(guarded)
    for agent in (n1, n2):
        job.said(agent, "denies user 'me' access to /elastic_etcd/")
    puts_keys_back(job, guarded, n1, n2, g)


def test_r3_a_permission_that_is_taken_away_ends_no_training(
    job: TickingJob, guarded: EtcdServer
) -> None:
    older(guarded)
    n1, n2, g = job.pair(lease_ttl=TTL, user="me", env=GIVEN)
    guarded.ctl("user", "revoke-role", "me", "training")
    restart(guarded)
    for agent in (n1, n2):
        job.said(agent, "denies user 'me' access")
        job.said(agent, "grant-permission")
    job.undisturbed(g, 3 * TTL)
    assert n1.output.count("denies user 'me' access") == 1, "it is told once"
    late = job.start("late", user="me", env=GIVEN)
    job.exits(late, 5)
    guarded.ctl("user", "grant-role", "me", "training")
    job.undisturbed(g, TTL)
    loses_a_node(job, n2, g)
    job.finish(n1)


def test_r3_a_node_whose_lease_has_ended_waits_for_its_permission(
    job: TickingJob, guarded: EtcdServer
) -> None:
    """Then its key is put back, or it joins again, if the other one has begun a world meanwhile."""
    n1, n2, g = job.pair(lease_ttl=TTL, user="me", env=GIVEN)
    lease = member(guarded, job.name, "n2")
    guarded.ctl("user", "revoke-role", "me", "training")
    guarded.ctl("lease", "revoke", lease)
    for agent in (n1, n2):
        job.said(agent, "denies user 'me' access")
    guarded.ctl("user", "grant-role", "me", "training")
    back = ("this node's key is back", "joining again as another member")
    job.wait("n2 is a member", lambda: any(text in n2.output for text in back))
    job.trains(2, after=g - 1)
    job.finish(n1, n2)


def test_r3_a_password_that_is_changed_ends_no_training(
    job: TickingJob, guarded: EtcdServer
) -> None:
    older(guarded)
    n1, n2, g = job.pair(lease_ttl=TTL, user="me", env=GIVEN)
    guarded.password("me", "changed")
    restart(guarded)
    for agent in (n1, n2):
        job.said(agent, "refuses the password of user 'me'")
    job.undisturbed(g, 3 * TTL)
    late = job.start("late", user="me", env=GIVEN)
    job.exits(late, 5)
    guarded.password("me", "mine")
    job.undisturbed(g, TTL)
    loses_a_node(job, n2, g)
    job.finish(n1)


def test_r3_a_password_file_is_read_again(
    job: TickingJob, guarded: EtcdServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("mine\n")
    n1, n2, g = job.pair(lease_ttl=TTL, user="me", password_file=file)
    guarded.password("me", "changed")
    restart(guarded)
    job.said(n1, "refuses the password of user 'me'")
    file.write_text("changed\n")
    job.undisturbed(g, 2 * TTL)
    n2.kill()  # its guardian logs in, too
    job.trains(1, after=g)
    job.said(n2, "revoked")
    job.finish(n1)


@pytest.mark.nightly
def test_e2_a_password_that_is_changed_for_longer_than_the_ttl_ends_no_training(
    job: TickingJob, guarded: EtcdServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("mine\n")
    n1, n2, g = job.pair(lease_ttl=6, user="me", password_file=file)
    guarded.password("me", "changed")
    for agent in (n1, n2):
        job.said(agent, "this node's key is gone, its world is not")
    file.write_text("changed\n")
    for agent in (n1, n2):
        job.said(agent, "this node's key is back")
    job.undisturbed(g)
    loses_a_node(job, n2, g)
    job.finish(n1)
