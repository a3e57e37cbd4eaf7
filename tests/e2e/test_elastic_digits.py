"""Digits on nodes that die, freeze, join and leave: no sample is lost or repeated, and no bit.

The reference is one process that takes the same global batches one after the other, in the order
of torch's DistributedSampler, with nothing of elastic_etcd's. With the trainer's exact sums the
final weights equal it bit for bit after every schedule; also after failures, since what is rolled
back is trained again on the same samples. Floats as DDP adds them up depend on how many ranks
there are, and with three or more on their order: there, the same bits come only from the same
worlds, and are tested with two ranks.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.digits import PER_EPOCH, Uses, check_samples, same_bits, undisturbed, weights
from tests.support.etcd import EtcdServer
from tests.support.invariants import check
from tests.support.job import DIGITS, Agent, Job
from tests.support.processes import send
from tests.support.residue import Residue, passed

pytestmark = pytest.mark.timeout(600)

EVERY = 3  # steps from commit to commit


class Digits(Job):
    """A job of trainers/digits.py."""

    def node(self, name: str, *arguments: str, **flags: Any) -> Agent:
        script = (DIGITS, "--dir", str(self.directory), f"--commit-every={EVERY}", *arguments)
        flags = {"nnodes": "1:3", "min_uptime": 0, "preload": "sklearn.datasets", **flags}
        return self.start(name, script=script, **flags)

    def world(self, size: int, after: int = 0, steps: int = 3) -> tuple[int, dict[str, int]]:
        """Wait until a later world of this size trains: its generation, and its processes."""
        g = self.trains(size, after=after, steps=steps, seconds=60)
        return g, {e.node: e.pid for e in self.events("start") if e.generation == g}

    def check(self) -> None:
        """What always holds, but for steps that are trained twice, which `Uses` looks at."""
        check(e for e in self.events() if e.event != "step")


@pytest.fixture
def digits(etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Digits]:
    residue, job = Residue(etcd), Digits(etcd.endpoint, tmp_path)
    try:
        yield job
        if request.node.stash.get(passed, False):
            job.check()
            residue.assert_clean([job])
    finally:
        job.close()


@pytest.mark.nightly(part="jobs")
def test_joins_and_leaves(digits: Digits) -> None:
    """Nothing is trained twice, and no process is started anew."""
    n1 = digits.node("n1", settle=0)
    g, first = digits.world(1)
    n2 = digits.node("n2")
    g, second = digits.world(2, after=g)
    n3 = digits.node("n3")
    g, third = digits.world(3, after=g)
    assert first.items() < second.items() < third.items()
    n1.terminate()  # it has rank 0
    digits.exits(n1, 143)
    g, fourth = digits.world(2, after=g)
    assert fourth.items() < third.items()
    n1 = digits.node("n1")
    g, fifth = digits.world(3, after=g, steps=30)
    assert fourth.items() < fifth.items()
    digits.finish(n1, n2, n3)

    uses = Uses(digits.directory)
    assert uses.lost() == {}
    check_samples(uses)
    same_bits(weights(digits, n1, n2, n3), undisturbed(uses.end[0]))


def test_failures(digits: Digits, etcd: EtcdServer) -> None:
    """Of each world at most as many steps are lost as there are from commit to commit."""
    flags = {"nnodes": "2:3", "max_restarts": 9}
    n1, n2, n3 = (digits.node(name, "--kill=1:41", **flags) for name in ("n1", "n2", "n3"))
    first, before = digits.world(3, steps=30)
    g, after = digits.world(3, after=first)  # the worker of rank 1 has killed itself
    assert len(before.items() & after.items()) == 2

    (digits.directory / "raise.n3").touch()
    g, again = digits.world(3, after=g)
    assert after.items() - again.items() == {("n3", after["n3"])}

    send(signal.SIGSTOP, [again["n3"]])  # nobody notices, until the world has to end
    send(signal.SIGKILL, [again["n1"]])
    g, after = digits.world(3, after=g)
    assert again.items() & after.items() == {("n2", again["n2"])}

    n2.freeze()
    g, _ = digits.world(2, after=g)
    n2.thaw()
    g, _ = digits.world(3, after=g)

    n3.node_kill()
    g, _ = digits.world(2, after=g)
    n4 = digits.node("n4", **flags)
    g, _ = digits.world(3, after=g)

    n4.kill()  # its agent
    g, before = digits.world(2, after=g)

    n2.node_kill()  # fewer than the minimum
    digits.said(n1, "1 node is ready; at least 2 must be")
    n5 = digits.node("n5", **flags)
    g, after = digits.world(2, after=g)
    assert before.items() & after.items() == {("n1", before["n1"])}, "it has waited"

    etcd.kill()
    digits.goes_on(g, steps=10)
    send(signal.SIGKILL, [after["n5"]])
    etcd.start()
    _, last = digits.world(2, after=g)
    assert after.items() & last.items() == {("n1", after["n1"])}
    digits.finish(n1, n5)

    uses = Uses(digits.directory)
    lost = uses.lost()
    assert lost[first] == 2, "the commit after step 39 is what there is of 41 steps"
    assert all(steps <= EVERY for steps in lost.values()), lost
    check_samples(uses)
    same_bits(weights(digits, n1, n5), undisturbed(uses.end[0]))


@pytest.mark.nightly(part="jobs")
def test_all_nodes_are_lost(digits: Digits) -> None:
    """Only the file is left, which is written at the end of each epoch."""
    save = f"--save={digits.directory / 'state'}"
    nodes = [digits.node(name, save, nnodes="1:2") for name in ("n1", "n2")]
    g, _ = digits.world(2, steps=40)
    for node in nodes:
        node.node_kill()
    alone = digits.node("n3", save, nnodes="1:2", settle=0)
    g, _ = digits.world(1, after=g)
    digits.finish(alone)

    uses = Uses(digits.directory)
    assert uses.began[g][0] in (PER_EPOCH, 2 * PER_EPOCH)
    check_samples(uses)
    same_bits(weights(digits, alone), undisturbed(uses.end[0]))


@pytest.mark.nightly(part="jobs")
def test_the_only_worker_is_killed(digits: Digits) -> None:
    """The agent has its last commit."""
    n1 = digits.node("n1", "--steps=50", "--kill=0:41", nnodes="1")
    digits.exits(n1, 0, seconds=60)
    uses = Uses(digits.directory)
    assert uses.began == {1: (0, 0), 2: (39, 1)}
    check_samples(uses)
    same_bits(weights(digits, n1), undisturbed(50))


@pytest.mark.nightly(part="jobs")
def test_ddp_as_it_is(digits: Digits) -> None:
    """Floats of 32 bits: what a failure has cost is trained again to the same bits."""
    n1 = digits.node("n1", "--plain", "--steps=50", "--kill=1:41", nnodes="1", nproc=2)
    digits.exits(n1, 0, seconds=60)
    other = Digits(digits.endpoint, digits.directory / "undisturbed")
    try:
        n2 = other.node("n1", "--plain", "--steps=50", nnodes="1", nproc=2)
        other.exits(n2, 0, seconds=60)
    finally:
        other.close()
    assert Uses(digits.directory).lost() == {1: 2}
    assert Uses(other.directory).lost() == {}
    check_samples(Uses(digits.directory))
    same_bits(weights(digits, n1), weights(other, n2))
