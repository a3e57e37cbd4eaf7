"""What a job of trainers/digits.py has done with its samples, and what it should have done.

Which samples count is read from what workers say they contribute, before they do, and from where
each world says it goes on: what the one before it did beyond that was rolled back. What should be
is the work of one process with nothing of elastic_etcd's.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch

from tests.support.job import Agent, Job
from tests.support.trainers.digits import GLOBAL_BATCH, LENGTH, SEED, Learner

PER_EPOCH = -(-LENGTH // GLOBAL_BATCH)  # steps


class Uses:
    """What all workers of a job that has ended said of samples, in its directory.

    Three kinds of lines: a world `begin`s after a step that was made in some generation; a rank
    is about to `use` samples in a step; the training is at its `end`.
    """

    def __init__(self, directory: Path) -> None:
        self.began: dict[int, tuple[int, int]] = {}  # generation -> step, made in generation
        self.samples: dict[tuple[int, int], list[int]] = defaultdict(list)  # of generation, step
        ends = set()
        for path in directory.glob("*.uses"):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["what"] == "use":
                    self.samples[line["generation"], line["step"]] += line["indices"]
                elif line["what"] == "end":
                    ends.add((line["step"], line["made"]))
                elif line["what"] == "begin":
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


def undisturbed(steps: int, learner: Learner | None = None) -> dict[str, torch.Tensor]:
    """The weights after so many steps in one process, of a learner that has done none."""
    learner = learner or Learner()
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
