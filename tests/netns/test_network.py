"""Bad networks, one test for each row of docs/contributing/failures.md that has to do with one."""

import pytest

from tests.support.invariants import each_sample_once
from tests.support.job import ELASTIC
from tests.support.lines import missed

from .conftest import TTL, NetJob, NetTicks
from .wire import Wire

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="netns")]

ALL = ("n1", "n2", "n3")
LONG = 600  # a lease that does not end in a test


def full(job: NetJob) -> int:
    """Three nodes train; the generation."""
    for name in ALL:
        job.node(name)
    return job.trains(3, seconds=90)


def nodes(job: NetJob, generation: int) -> set[str]:
    return {e.node for e in job.events("start") if e.generation == generation}


@pytest.mark.parametrize("weather", ["loss", "delay"])
def test_a_bad_network(job: NetJob, wire: Wire, weather: str) -> None:
    """Slower, and no more than that: nodes train, and join, and leave."""
    n1, n2 = job.node("n1", settle=0), job.node("n2", settle=0)
    g = job.trains(2, seconds=90)
    wire.loss, wire.delay = (0.1, 0.0) if weather == "loss" else (0.0, 0.2)
    job.advances(10)
    n3 = job.node("n3")
    g = job.trains(3, after=g, seconds=120)
    n2.terminate()
    job.exits(n2, 143, seconds=60)
    g = job.trains(2, after=g, seconds=120)
    wire.heal()
    job.goes_on(g, steps=20)
    job.finish(n1, n3)


def test_a_node_sees_its_peers_but_not_etcd(job: NetJob, wire: Wire) -> None:
    """Its lease ends, and the others go on without it; it comes back when it can."""
    g = full(job)
    wire.cut_both_ways(["n2"], ["etcd"])
    goes_and_comes(job, wire, g)


@pytest.mark.parametrize("direction", ["to etcd", "from etcd"])
def test_what_a_node_and_etcd_say_is_lost_one_way(
    ticks: NetTicks, wire: Wire, direction: str
) -> None:
    """The same."""
    g = full(ticks)
    wire.cut(*([["n2"], ["etcd"]] if direction == "to etcd" else [["etcd"], ["n2"]]))
    goes_and_comes(ticks, wire, g)


def goes_and_comes(job: NetJob, wire: Wire, g: int) -> None:
    """n2, which is cut off from etcd since generation g trains."""
    g = job.trains(2, after=g, seconds=TTL + 60)
    assert nodes(job, g) == {"n1", "n3"}
    job.goes_on(g, steps=20)
    wire.heal()
    g = job.trains(3, after=g, seconds=90)
    assert job.worker(g, rank=0).restarts == 0, "a cut node costs no restart"
    job.finish(*job.agents)


@pytest.mark.parametrize("directions", ["from it", "both"])
def test_a_node_sees_etcd_but_not_its_peers(job: NetJob, wire: Wire, directions: str) -> None:
    """All leases live, so nobody is lost: training waits for the network, and then goes on."""
    g = full(job)
    wire.cut(["n2"], ["n1", "n3"])
    if directions == "both":
        wire.cut(["n1", "n3"], ["n2"])
    job.stands_still(g, 2 * TTL)
    wire.heal()
    job.goes_on(g, steps=20, seconds=90)
    job.finish(*job.agents)


def test_a_world_is_formed_of_nodes_that_do_not_see_each_other(job: NetJob, wire: Wire) -> None:
    wire.cut_both_ways(["n2"], ["n1", "n3"])
    for name in ALL:
        job.node(name)
    job.wait("all have started", lambda: len(job.events("start")) >= 3, 90)
    job.stands_still(job.events("start")[0].generation, TTL)
    wire.heal()
    job.trains(3, seconds=120)
    job.finish(*job.agents)


def test_etcd_is_reachable_for_half_of_the_nodes(ticks: NetTicks, wire: Wire) -> None:
    """Only the half that sees etcd can form a world; the other may not, though it is as large."""
    job = ticks
    for name in (*ALL, "n4"):
        job.node(name, nnodes="2:4")
    g = job.trains(4, seconds=120)
    wire.cut_both_ways(["etcd"], ["n3", "n4"])
    g = job.trains(2, after=g, seconds=TTL + 60)
    assert nodes(job, g) == {"n1", "n2"}
    job.goes_on(g, steps=50)
    wire.heal()
    g = job.trains(4, after=g, seconds=120)
    assert job.worker(g, rank=0).restarts == 0
    job.finish(*job.agents)


def test_a_node_sees_nobody(job: NetJob, wire: Wire) -> None:
    """No connection breaks, and still its peers recover in process, and so does it."""
    for name in ALL:
        job.node(name, script=(ELASTIC, "--dir", str(job.directory)))
    g = job.trains(3, seconds=90)
    before = job.begun(g)
    wire.cut_both_ways(["n2"], ["n1", "n3", "etcd"])
    g = job.trains(2, after=g, seconds=TTL + 60)
    job.goes_on(g, steps=20)
    wire.heal()
    g = job.trains(3, after=g, seconds=90)
    for node in ("n1", "n3"):
        assert job.begun(g)[node].pid == before[node].pid, "a survivor was started anew"
    job.finish(*job.agents)
    each_sample_once(job.directory)


def test_all_processes_of_a_node_are_killed_and_its_network_goes(
    ticks: NetTicks, wire: Wire
) -> None:
    """As a container is: it can still say that its connections end, and then refuses nothing."""
    job = ticks
    n1 = job.node("n1", lease_ttl=LONG, log_level="debug")
    job.said(n1, "1 node is ready", 90)  # it coordinates
    n2, n3 = (job.node(name, lease_ttl=LONG) for name in ("n2", "n3"))
    g = job.trains(3, seconds=90)
    missed(job, n1, n2, n3)
    wire.cut(["etcd", "n1", "n3"], ["n2"])
    n2.node_kill()
    g = job.trains(2, after=g, seconds=90)
    assert nodes(job, g) == {"n1", "n3"}
    job.finish(n1, n3)


def test_a_node_that_is_cut_off_is_not_taken_for_dead(job: NetJob, wire: Wire) -> None:
    """Silence is no proof: that is left to its lease, which lasts here."""
    n1 = job.node("n1", lease_ttl=LONG, log_level="debug")
    job.said(n1, "1 node is ready", 90)
    n2, n3 = (job.node(name, lease_ttl=LONG) for name in ("n2", "n3"))
    g = job.trains(3, seconds=90)
    missed(job, n1, n2, n3)
    wire.cut_both_ways(["n2"], ["n1", "n3", "etcd"])
    job.stands_still(g, 2 * TTL)
    wire.heal()
    job.goes_on(g, steps=20, seconds=90)
    job.finish(*job.agents)
