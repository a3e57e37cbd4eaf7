"""etcd as people operate it under a job: none of it ends a world that need not end.

On the etcd of TEST_ETCD, or the newest: the wheel's 3.5.1 panics under some of this.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_etcd.etcd.client import Client
from tests.support.aio import put
from tests.support.debian import NotToBeHad
from tests.support.etcd import FAST, EtcdCluster, EtcdServer, ids
from tests.support.etcd_versions import NEWEST, etcd_of
from tests.support.job import Agent
from tests.support.residue import PREFIX, keys
from tests.support.ticking import TickingJob, connected, ticking
from tests.support.tls import Authority, asking, rsa_pair, showing, shows

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="etcd")]

# A lease that a busy machine renews in time, and workers that fail soon after their start.
FLAGS = {"lease_ttl": 15, "suspect_after": 0}
GIVEN = {"ELASTIC_ETCD_PASSWORD": "mine"}
LOGINS = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Authenticate"'
COMPACTED = "etcd_debugging_mvcc_compact_revision"
EXPIRED = "etcd_debugging_server_lease_expired_total"

Start = Callable[..., TickingJob]


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members for one test, not started yet, so that their arguments can be changed."""
    cluster = make_cluster(tmp_path, 3)
    yield cluster
    cluster.kill()


@pytest.fixture
def six(tmp_path: Path) -> Iterator[EtcdCluster]:
    """As many that are to replace each other."""
    cluster = make_cluster(tmp_path, 6)
    yield cluster
    cluster.kill()


def make_cluster(folder: Path, size: int) -> EtcdCluster:
    cluster = EtcdCluster.make(folder, size)
    try:
        for member in cluster.members:
            member.program = EtcdServer.program or etcd_of(NEWEST)
    except NotToBeHad as reason:
        pytest.skip(str(reason))
    return cluster


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Makes the job, once etcd runs as the test wants it."""
    with contextlib.ExitStack() as stack:

        def make(cluster: EtcdCluster, *, look: bool = True) -> TickingJob:
            endpoints = ",".join(cluster.config.endpoints)
            at = cluster.members[0] if look else None
            return stack.enter_context(ticking(endpoints, at, tmp_path / "job", request))

        yield make


def total(cluster: EtcdCluster, metric: str) -> float:
    return sum(member.metric(metric) for member in cluster.members if member.process)


def used_by(job: TickingJob, agent: Agent, cluster: EtcdCluster) -> EtcdServer:
    """The member to which this agent is connected, once that is only one."""

    def only() -> EtcdServer | None:
        found = connected(agent, cluster)
        return found[0] if len(found) == 1 else None

    return job.wait(f"{agent.node} has one connection", only)


def members_of(job: TickingJob, etcd: EtcdServer) -> list[str]:
    return [key for key in keys(etcd, job.name) if key.startswith("members/")]


def still_led(job: TickingJob, generation: int, world: int = 2) -> None:
    """The same world trains on, and a worker's failure is answered as ever."""
    job.undisturbed(generation)
    job.kill_worker(generation)
    assert job.trains(world, after=generation) == generation + 1


def test_the_lead_is_handed_on_a_hundred_times(trio: EtcdCluster, start: Start) -> None:
    trio.heal()
    job = start(trio)
    size = 20
    flags = {"nnodes": str(size), **FLAGS}
    agents = [job.start(f"n{number}", "--step-time=1", **flags) for number in range(size)]
    g = job.trains(size, seconds=300)
    members = ids(trio.members[0])
    leader = trio.leader()
    for turn in range(100):
        heir = trio.others(leader)[turn % 2]
        leader.ctl("move-leader", members[heir.name])
        leader = heir
    assert total(trio, EXPIRED) == 0
    still_led(job, g, size)
    job.finish(*agents, seconds=300)


def test_a_rolling_restart(trio: EtcdCluster, start: Start) -> None:
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    leader = trio.leader()
    for member in [*trio.others(leader), leader]:
        member.stop()
        job.undisturbed(g)
        trio.heal()
    still_led(job, g)
    job.finish(n1, n2)


def test_each_member_is_replaced(six: EtcdCluster, start: Start) -> None:
    """Agents know six addresses: at first half of them are nobody's, then the others."""
    present = list(six.members[:3])
    for member in six.members:
        member.arguments = (*FAST, "--strict-reconfig-check=false")  # else it waits for 5 s
        member.cluster = named(present)
    EtcdCluster(present).heal()
    job = start(six, look=False)
    n1, n2, g = job.pair(**FLAGS)
    for new in six.members[3:]:
        old, asked = present.pop(0), present[0]
        asked.ctl("member", "remove", ids(asked)[old.name])
        old.wait()
        EtcdCluster(present).heal()  # they have a leader, which may have been that one
        asked.ctl("member", "add", new.name, f"--peer-urls={new.peer_url}")
        present.append(new)
        new.cluster = named(present)
        new.arguments = (*new.arguments, "--initial-cluster-state=existing")
        EtcdCluster(present).heal()
        job.undisturbed(g)
    assert all(member in six.members[3:] for member in connected(n1, six))
    still_led(job, g)
    job.finish(n1, n2)


def named(members: list[EtcdServer]) -> str:
    return ",".join(f"{member.name}={member.peer_url}" for member in members)


def test_members_are_defragmented_and_each_second_compacted(
    trio: EtcdCluster, start: Start
) -> None:
    """A watch that begins anew, because its member has gone, finds its revision compacted."""
    compact = "--auto-compaction-mode=periodic", "--auto-compaction-retention=1s"
    for member in trio.members:
        member.arguments = (*FAST, *compact)
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    defragmented = asyncio.Event()

    async def write(client: Client) -> None:
        while not defragmented.is_set():
            await put(client, "/other", "x" * 20_000)
        last = await put(client, "/other")
        while any(member.metric(COMPACTED) < last for member in trio.members):
            await put(client, "/other")

    async def defragment() -> None:
        for member in [*trio.members, *trio.members]:
            await asyncio.to_thread(member.ctl, "defrag")
        defragmented.set()

    async def load() -> None:
        async with Client(trio.config) as client:
            await asyncio.gather(write(client), defragment())

    asyncio.run(load())
    job.undisturbed(g)
    used_by(job, n1, trio).kill()
    job.said(n1, "etcd has compacted the events of")
    still_led(job, g)
    trio.heal()
    job.finish(n1, n2)


@pytest.mark.parametrize("kind", ["simple", "web"])
def test_authentication_is_turned_on_under_agents_that_have_a_user(
    kind: str, trio: EtcdCluster, tmp_path: Path, start: Start
) -> None:
    """And their tokens end before each renewal of a lease, or before each second one."""
    token = "--auth-token-ttl=3"
    if kind == "web":
        signs = rsa_pair(tmp_path)
        pair = f"pub-key={signs.cert},priv-key={signs.key}"
        token = f"--auth-token=jwt,{pair},sign-method=RS256,ttl=10s"
    for member in trio.members:
        member.arguments = (*FAST, "--bcrypt-cost=4", token)
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS, user="me", env=GIVEN)
    guard(trio, f"{PREFIX}/")
    seen = total(trio, LOGINS)
    job.wait("several logins", lambda: total(trio, LOGINS) > seen + 4)
    used_by(job, n1, trio).kill()
    still_led(job, g)
    trio.heal()
    for agent in (n1, n2):
        assert "is not renewed" not in agent.output
        assert "denies" not in agent.output
    job.finish(n1, n2)


def guard(cluster: EtcdCluster, prefix: str) -> None:
    cluster.members[0].guard(prefix)
    for member in cluster.members:
        member.user = "root:secret"


def test_authentication_is_turned_on_under_agents_without_a_user(
    trio: EtcdCluster, start: Start
) -> None:
    for member in trio.members:
        member.arguments = (*FAST, "--bcrypt-cost=4")
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    guard(trio, f"{PREFIX}/")
    for agent in (n1, n2):
        job.said(agent, "asks for a user to access its lease")
    trio.members[0].ctl("auth", "disable")
    for agent in (n1, n2):
        job.said(agent, "renews this node's lease again")
    job.undisturbed(g)
    trio.members[0].ctl("auth", "enable")
    job.wait("both leases end", lambda: not members_of(job, trio.members[0]))
    trio.members[0].ctl("auth", "disable")
    job.wait("both are members", lambda: len(members_of(job, trio.members[0])) == 2)
    for agent in (n1, n2):
        job.said(agent, "this node's key is back")
    still_led(job, g)
    job.finish(n1, n2)


def test_a_certificate_is_who_one_is(
    trio: EtcdCluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its common name is etcd's user."""
    authority = Authority(tmp_path, "authority")
    own, root = authority.issue("me"), authority.issue("root")
    server = trio.members[0]
    server.cluster, server.scheme = "", "https"
    server.arguments = (*FAST, *shows(authority.issue("server")), *asking(authority))
    server.identity = showing(authority, root)
    server.start()
    with ticking(f"https://{server.endpoint}", server, tmp_path / "job", request) as job:
        files = {"cacert": authority.cacert, "cert": own.cert, "key": own.key}
        n1, n2, g = job.pair(**FLAGS, **files)
        server.guard(f"{PREFIX}/")
        server.kill()
        server.start()
        still_led(job, g)
        g += 1
        server.ctl("user", "revoke-role", "me", "training")
        for agent in (n1, n2):
            job.said(agent, "denies the user that --cert names access to its lease")
        server.ctl("user", "grant-role", "me", "training")
        for agent in (n1, n2):
            job.said(agent, "renews this node's lease again")
        still_led(job, g)
        job.finish(n1, n2)


@pytest.mark.parametrize("flags", [(), ("--bump-revision=1000000000", "--mark-compacted")])
def test_a_backup_of_the_same_world_is_restored(
    flags: tuple[str, ...], trio: EtcdCluster, tmp_path: Path, start: Start
) -> None:
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    backup = back_up(trio, tmp_path)
    for number in range(5):
        trio.members[0].ctl("put", f"{PREFIX}/{job.name}/later/{number}", "x")
    restore(trio, backup, *flags)
    still_led(job, g)
    job.finish(n1, n2)


def back_up(cluster: EtcdCluster, folder: Path) -> Path:
    cluster.members[0].ctl("snapshot", "save", str(folder / "backup"))
    return folder / "backup"


def restore(cluster: EtcdCluster, backup: Path, *flags: str) -> None:
    cluster.kill()
    for member in cluster.members:
        member.restore(backup, *flags)
    cluster.heal()


def test_e2_a_backup_of_an_earlier_world_is_restored(
    trio: EtcdCluster, tmp_path: Path, start: Start
) -> None:
    trio.heal()
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    backup = back_up(trio, tmp_path)
    job.kill_worker(g)
    g = job.trains(2, after=g)
    restore(trio, backup)
    assert job.trains(2, after=g) == g + 1
    still_led(job, g + 1)
    job.finish(n1, n2)


def test_e2_a_backup_of_an_earlier_run_is_restored(
    trio: EtcdCluster, tmp_path: Path, start: Start
) -> None:
    """That run was done then; this one is not."""
    trio.heal()
    job = start(trio)
    n1, n2, _ = job.pair(**FLAGS)
    job.finish(n1, n2)
    backup = back_up(trio, tmp_path)
    (job.directory / "stop").unlink()
    n1, n2, g = job.pair(program=("elastic_etcd.launch", "--rerun"), **FLAGS)
    restore(trio, backup)
    g = job.trains(2, after=g)
    still_led(job, g)
    job.finish(n1, n2)


def test_a_backup_without_the_job_is_restored(
    trio: EtcdCluster, tmp_path: Path, start: Start
) -> None:
    trio.heal()
    trio.members[0].ctl("put", "/other", "x")
    backup = back_up(trio, tmp_path)
    job = start(trio)
    n1, n2, g = job.pair(**FLAGS)
    restore(trio, backup)
    job.wait("both are members", lambda: len(members_of(job, trio.members[0])) == 2)
    g = job.settles(2)
    still_led(job, g)
    job.finish(n1, n2)
