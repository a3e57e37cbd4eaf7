"""Each index once per epoch over any sequence of worlds, batch sizes, commits and roll-backs."""

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_etcd import ElasticSampler
from elastic_etcd.train.data.shards import Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

TAILS: tuple[Tail, ...] = ("drop", "pad", "uneven")


class Rank:
    """One process: a sampler, its iterator, and a loader's queue of indices taken ahead."""

    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self.sampler = sampler
        self.ahead = ahead
        self.indices: Iterator[int] = iter(sampler)
        self.queue: deque[int] = deque()

    def train(self, size: int) -> list[int]:
        """A batch, short or empty at the end; more is prefetched, only this is recorded."""
        for index in self.indices:
            self.queue.append(index)
            if len(self.queue) >= size + self.ahead:
                break
        batch = [self.queue.popleft() for _ in range(min(size, len(self.queue)))]
        self.sampler.record(batch)
        return batch


class Job:
    """An epoch: what was used and not rolled back, and the last commit."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.used: list[int] = []
        self.state: dict[str, Any] = {}
        self.ranks: list[Rank] = []
        self.committed = 0

    def form(self, sizes: list[int], declared: bool, ahead: int, joined: bool) -> None:
        """A new world: survivors keep their samplers, all others load the last commit."""
        world = len(sizes)
        samplers = [rank.sampler for rank in self.ranks][:world] if joined else []
        for rank in range(world):
            if rank >= len(samplers):
                samplers.append(ElasticSampler(rank=0, world_size=1, **self.arguments))
                samplers[rank].set_epoch(5)
            if self.state:
                samplers[rank].load_state_dict(self.state)
            samplers[rank].reshard(rank, world, batch_sizes=sizes if declared else None)
        self.ranks = [Rank(sampler, ahead) for sampler in samplers]

    def step(self, sizes: list[int], agree: bool) -> bool:
        """All ranks take a batch; commits. False once nobody has anything left."""
        batches = [rank.train(size) for rank, size in zip(self.ranks, sizes, strict=True)]
        self.used += [index for batch in batches for index in batch]
        if agree:
            counts = [rank.sampler._progress.count for rank in self.ranks]
            for rank in self.ranks:
                rank.sampler._progress.agree(counts)  # what agree() gathers
        states = [r.sampler.state_dict() for r, b in zip(self.ranks, batches, strict=True) if b]
        assert all(state == states[0] for state in states)
        if states:
            self.state = states[0]
            assert self.arguments["tail"] == "pad" or self.state["consumed"] == len(self.used)
        return bool(states)

    def commit(self) -> None:
        self.committed = len(self.used)

    def roll_back(self, state: dict[str, Any]) -> None:
        del self.used[self.committed :]
        self.state = state


def check(job: Job, tail: Tail, width: int, padded: int) -> None:
    """The promise of each tail; width: of the last world's turns, padded: of those padded."""
    length = job.arguments["dataset"]
    times = Counter(job.used)
    assert set(times) <= set(range(length))
    if tail == "drop":
        assert set(times.values()) <= {1}
        assert length - len(times) < width
    else:
        assert len(times) == length
        assert len(job.used) - length < (padded if tail == "pad" else 1)


@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=150)
@given(data=st.data(), length=st.integers(0, 300), kind=st.sampled_from(["same", "shares", "any"]))
def test_each_index_once_whatever_happens(
    tail: Tail, data: st.DataObject, length: int, kind: str
) -> None:
    shuffle = data.draw(st.sampled_from([True, "stream", False]))
    job = Job(dataset=length, shuffle=shuffle, tail=tail, seed=data.draw(st.integers(0, 9)))
    widths: list[int] = []
    worlds = data.draw(st.integers(1, 5))
    size = st.integers(1, 12)
    same = data.draw(size)
    for last in [False] * (worlds - 1) + [True]:
        world = data.draw(st.integers(1, 6))
        sizes = data.draw(st.lists(size, min_size=world, max_size=world))
        if kind == "same":
            sizes = [same] * world
        # With no more than a batch for a rank, that batch does not tell what others take.
        declared = kind == "shares" or (not job.state and length // world <= same)
        job.form(sizes, declared, data.draw(st.integers(0, 30)), data.draw(st.booleans()))
        width = len(job.ranks[0].sampler._shards.slots)
        widths.append(width)
        kept, more = job.state, True
        steps = None if last else data.draw(st.integers(0, 8))
        while more and steps != 0:
            more = job.step(sizes, agree=kind == "any")
            steps = None if steps is None else steps - 1
            if data.draw(st.booleans()) or last:
                job.commit()
                kept = job.state
            if kind == "any":
                sizes = data.draw(st.lists(size, min_size=world, max_size=world))
        job.roll_back(kept)
        if not kept and job.ranks:
            job.ranks = []  # nothing was ever committed: all start anew
    # Where ranks go at their own pace, one may get its part of a pad in each of several worlds.
    check(job, tail, width, sum(widths) if kind == "any" else max(widths))


@pytest.mark.parametrize("tail", TAILS)
def test_every_pair_of_worlds_at_every_step(tail: Tail) -> None:
    for length in (7, 24, 25):
        for first in (1, 2, 3, 5):
            for second in (1, 2, 3, 5):
                for steps in range(length // (2 * first) + 1):
                    job = Job(dataset=length, tail=tail)
                    declared = tail == "uneven"  # small as the data set is
                    job.form([2] * first, declared=declared, ahead=4, joined=False)
                    for _ in range(steps):
                        job.step([2] * first, agree=False)
                    job.form([2] * second, declared=declared, ahead=4, joined=True)
                    while job.step([2] * second, agree=False):
                        pass
                    check(job, tail, second, max(first, second))


def test_the_state_is_as_small_after_many_changes_as_at_first() -> None:
    job = Job(dataset=10_000, tail="drop")
    for world in [3, 8, 1, 5, 2] * 20:
        job.form([3] * world, declared=False, ahead=0, joined=True)
        job.step([3] * world, agree=False)
    assert job.state == {
        "epoch": 5,
        "seed": 0,
        "consumed": 3 * (3 + 8 + 1 + 5 + 2) * 20,
        "skipped": [],
        "length": 10_000,
        "shuffle": "exact",
        "step": 3,
    }


def test_a_global_batch_takes_the_same_indices_in_every_world() -> None:
    def batches(worlds: list[list[int]]) -> list[list[int]]:
        job = Job(dataset=600, tail="drop", seed=3)
        taken = []
        for sizes in worlds:
            job.form(sizes, declared=True, ahead=0, joined=True)
            job.step(sizes, agree=False)
            taken.append(sorted(job.used[-sum(sizes) :]))
        return taken

    assert batches([[60]] * 3) == batches([[30, 30], [20, 20, 20], [15, 15, 20, 10]])
    assert batches([[60]] * 2) == batches([[9, 9, 9, 9, 8, 8, 8], [22, 38]])
