"""Digits on nodes that die, freeze, join and leave: no sample is lost or repeated, and no bit.

Which samples count is read from what workers say they contribute, before they do, and from where
each world says it goes on: what the one before it did beyond that was rolled back.

The reference is one process that takes the same global batches one after the other, in the order
of torch's DistributedSampler, with nothing of elastic_etcd's. With the trainer's exact sums the
final weights equal it bit for bit after every schedule; also after failures, since what is rolled
back is trained again on the same samples. Floats as DDP adds them up depend on how many ranks
there are, and with three or more on their order: there, the same bits come only from the same
worlds, and are tested with two ranks.
"""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.etcd.server import EtcdServer

from . import invariants
from .conftest import passed
from .digits_trainer import GLOBAL_BATCH, LENGTH, SEED, Learner
from .harness import Agent, Job
from .processes import send
from .traces import Traces

pytestmark = pytest.mark.timeout(150)

EVERY = 3  # steps from commit to commit
PER_EPOCH = -(-LENGTH // GLOBAL_BATCH)  # steps


class Digits(Job):
    """A job of digits_trainer.py."""

    def node(self, name: str, *arguments: str, **flags: Any) -> Agent:
        trainer = str(Path(__file__).with_name("digits_trainer.py"))
        script = (trainer, "--dir", str(self.directory), f"--commit-every={EVERY}", *arguments)
        flags = {"nnodes": "1:3", "min_uptime": 0, "preload": "sklearn.datasets", **flags}
        return self.start(name, script=script, **flags)

    def world(self, size: int, after: int = 0, steps: int = 3) -> tuple[int, dict[str, int]]:
        """Wait until a later world of this size trains: its generation, and its processes."""
        g = self.trains(size, after=after, steps=steps, seconds=60)
        return g, {e.node: e.pid for e in self.events("start") if e.generation == g}

    def check(self) -> None:
        """What always holds, but for steps that are trained twice, which `Uses` looks at."""
        invariants.check(e for e in self.events() if e.event != "step")


class Uses:
    """What all workers of a job that has ended said of samples.

    Three kinds of lines: a world `begin`s after a step that was made in some generation; a rank
    is about to `use` samples in a step; the training is at its `end`.
    """

    def __init__(self, job: Job) -> None:
        self.began: dict[int, tuple[int, int]] = {}  # generation -> step, made in generation
        self.samples: dict[tuple[int, int], list[int]] = defaultdict(list)  # of generation, step
        ends = set()
        for path in job.directory.glob("*.uses"):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["what"] == "use":
                    self.samples[line["generation"], line["step"]] += line["indices"]
                elif line["what"] == "end":
                    ends.add((line["step"], line["made"]))
                else:
                    after = line["step"], line["made"]
                    assert self.began.setdefault(line["generation"], after) == after, line
        assert len(ends) == 1, ends
        (self.end,) = ends

    def kept(self) -> dict[int, list[int]]:
        """The samples of each step that the final weights come from; goes back from the end."""
        kept: dict[int, list[int]] = {}
        step, made = self.end
        while step:
            first, before = self.began[made]
            assert first < step
            kept |= {s: self.samples[made, s] for s in range(first + 1, step + 1)}
            step, made = first, before
        return kept

    def lost(self) -> dict[int, int]:
        """How many steps of each generation were begun and don't count, if any."""
        last = {g: max(s for h, s in self.samples if h == g) for g, _ in self.samples}
        left = {made: step for step, made in [*self.began.values(), self.end] if made}
        reached = {g: left.get(g, self.began[g][0]) for g in last}
        return {g: last[g] - reached[g] for g in last if last[g] > reached[g]}


def order(epoch: int) -> list[int]:
    """The order of torch's DistributedSampler, as its documentation has it."""
    chance = torch.Generator().manual_seed(SEED + epoch)
    return torch.randperm(LENGTH, generator=chance).tolist()  # type: ignore[no-any-return]


def global_batches(steps: int) -> list[list[int]]:
    """What an undisturbed training uses in each of its steps."""
    batches: list[list[int]] = []
    epoch = 0
    while len(batches) < steps:
        indices = order(epoch)
        batches += [indices[i : i + GLOBAL_BATCH] for i in range(0, LENGTH, GLOBAL_BATCH)]
        epoch += 1
    return batches[:steps]


def undisturbed(steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps in one process."""
    learner = Learner()
    for batch in global_batches(steps):
        for index in batch:
            learner.contribute(learner.model, index)
        learner.step()
    return learner.weights()


def check_samples(uses: Uses) -> None:
    """Each sample once per epoch: in the very step in which an undisturbed training has it."""
    kept, expected = uses.kept(), global_batches(uses.end[0])
    assert sorted(kept) == list(range(1, len(expected) + 1))
    assert len(expected) >= PER_EPOCH, "not one epoch has been finished"
    for first in range(1, len(expected) - PER_EPOCH + 2, PER_EPOCH):
        indices = [i for step in range(first, first + PER_EPOCH) for i in kept[step]]
        assert sorted(indices) == list(range(LENGTH)), f"epoch of step {first}"
    for step, batch in enumerate(expected, 1):
        assert sorted(kept[step]) == sorted(batch), f"step {step}"


def weights(job: Job, *nodes: Agent) -> dict[str, torch.Tensor]:
    """The final weights, which are the same on all ranks of these nodes."""
    paths = [path for node in nodes for path in job.directory.glob(f"{node.node}.*.weights")]
    first, *others = map(torch.load, paths)
    for each in others:
        same_bits(first, each)
    return first  # type: ignore[no-any-return]


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = {k: float((one[k] - other[k]).abs().max()) for k in one}
    assert all(torch.equal(one[k], other[k]) for k in one), differ


@pytest.fixture
def digits(etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Digits]:
    traces, job = Traces(etcd), Digits(etcd.endpoint, tmp_path)
    try:
        yield job
        if request.node.stash.get(passed, False):
            job.check()
            traces.assert_clean([job])
    finally:
        job.close()


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
    digits.exits(n1, 0)
    g, fourth = digits.world(2, after=g)
    assert fourth.items() < third.items()
    n1 = digits.node("n1")
    g, fifth = digits.world(3, after=g, steps=30)
    assert fourth.items() < fifth.items()
    digits.finish(n1, n2, n3)

    uses = Uses(digits)
    assert uses.lost() == {}
    check_samples(uses)
    same_bits(weights(digits, n1, n2, n3), undisturbed(uses.end[0]))


def test_failures(digits: Digits, etcd: EtcdServer) -> None:
    """Of each world at most as many steps are lost as there are from commit to commit."""
    n1, n2, n3 = (digits.node(name, "--kill=1:41") for name in ("n1", "n2", "n3"))
    first, before = digits.world(3, steps=30)
    g, after = digits.world(3, after=first)  # the worker of rank 1 has killed itself
    assert len(before.items() & after.items()) == 2

    send(signal.SIGSTOP, [after["n3"]])  # nobody notices, until the world has to end
    send(signal.SIGKILL, [after["n1"]])
    g, again = digits.world(3, after=g)
    assert after.items() & again.items() == {("n2", after["n2"])}

    n2.freeze()
    g, _ = digits.world(2, after=g)
    n2.thaw()
    g, _ = digits.world(3, after=g)

    n3.node_kill()
    g, _ = digits.world(2, after=g)
    n4 = digits.node("n4")
    g, _ = digits.world(3, after=g)

    etcd.kill()
    digits.goes_on(g, steps=10)
    etcd.start()
    digits.goes_on(g, steps=10)
    assert {e.generation for e in digits.events("step") if e.generation >= g} == {g}
    digits.finish(n1, n2, n4)

    uses = Uses(digits)
    lost = uses.lost()
    assert lost[first] == 2, "the commit after step 39 is what there is of 41 steps"
    assert all(steps <= EVERY for steps in lost.values()), lost
    check_samples(uses)
    same_bits(weights(digits, n1, n2, n4), undisturbed(uses.end[0]))


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

    uses = Uses(digits)
    assert uses.began[g][0] in (PER_EPOCH, 2 * PER_EPOCH)
    check_samples(uses)
    same_bits(weights(digits, alone), undisturbed(uses.end[0]))


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
    assert Uses(digits).lost() == {1: 2}
    assert Uses(other).lost() == {}
    check_samples(Uses(digits))
    same_bits(weights(digits, n1), weights(other, n2))
