"""Each sample once per epoch through state.steps: random loaders, worlds, breaks, roll-backs.

And all ranks come to as many checks, whatever the tail.
"""

from collections import Counter
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from elastic_etcd import ElasticSampler, ElasticState, steps_per_epoch
from elastic_etcd.train.data.shards import Tail

COLLATES: list[Any] = [list, tuple, lambda items: {"index": items}, lambda items: [items, items]]


def indices(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return list(batch["index"])
    return list(batch[0] if isinstance(batch[0], list) else batch)


class Ahead:
    """Has fetched so many batches more than it has given, as loaders with workers have."""

    def __init__(self, loader: Any, batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        coming = iter(self.loader)
        fetched = list(islice(coming, self.batches + 1))
        while fetched:
            yield fetched.pop(0)
            fetched += islice(coming, 1)


class Plan:
    """One world's loaders and loops, drawn by chance, the same on all its ranks."""

    def __init__(self, data: st.DataObject, length: int) -> None:
        self.size = data.draw(st.integers(1, 8))
        self.world = data.draw(st.integers(1, 5))
        self.own_batches = data.draw(st.booleans())
        self.collate = data.draw(st.sampled_from(COLLATES))
        self.accumulate = data.draw(st.integers(1, 3))
        self.commit_every = data.draw(st.sampled_from([None, 1, 2, 3]))
        self.ahead = data.draw(st.integers(0, 4))
        self.breaks = data.draw(st.sets(st.integers(1, 20), max_size=4))  # after these steps
        self.stop = data.draw(st.none() | st.integers(0, length // self.world + 1))

    def loader(self, length: int, sampler: ElasticSampler) -> Any:
        given: dict[str, Any] = {"batch_size": self.size, "sampler": sampler}
        if self.own_batches:
            given = {"batch_sampler": BatchSampler(sampler, self.size, drop_last=False)}
        loader = DataLoader(list(range(length)), collate_fn=self.collate, **given)
        return Ahead(loader, self.ahead) if self.ahead else loader


class Watched(ElasticState):
    """A state that counts its checks."""

    _checks = 0

    def check(self) -> None:
        self._checks += 1
        super().check()


class Rank:
    """One process's training: what a script does with state.steps."""

    def __init__(self, number: int, plan: Plan, job: "Job") -> None:
        sampler = ElasticSampler(rank=number, world_size=plan.world, **job.arguments)
        if job.state:
            sampler.load_state_dict(job.state)
        sampler.reshard(number, plan.world, batch_sizes=[plan.size] * plan.world)
        self.state = Watched(sampler=sampler, step=job.step)
        self.state.commit()
        self.loader = plan.loader(job.arguments["dataset"], sampler)
        self.steps = self.state.steps(
            self.loader,
            commit_every=plan.commit_every,
            accumulate=plan.accumulate,
        )

    def train(self, by_hand: set[int]) -> Generator[tuple[int, list[int]], None, None]:
        """Each step with the samples that it used; those of a step that is not whole wait."""
        if not steps_per_epoch(self.loader) and self.state.sampler.tail != "uneven":
            return  # it would be refused
        samples: list[int] = []
        number, remain = 0, len(self.steps)
        for number, batch in enumerate(self.steps, 1):
            assert len(self.steps) == remain
            assert self.steps.ends_step or number < remain
            samples += indices(batch)
            if self.steps.ends_step:
                self.state.step += 1
                if self.state.step in by_hand:
                    self.state.commit()
                yield self.state.step, samples
                samples = []
        assert number == remain


class Job:
    """One epoch through several worlds."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.state: dict[str, Any] = {}
        self.step = 0
        self.used: dict[int, list[int]] = {}  # by step

    def train(self, plan: Plan, by_hand: set[int], roll_back: bool) -> bool:
        """One world; True when it has come to the epoch's end."""
        ranks = [Rank(number, plan, self) for number in range(plan.world)]
        loops = [rank.train(by_hand) for rank in ranks]
        steps = 0
        while steps != plan.stop:
            done = [next(loop, None) for loop in loops]
            if not any(done):
                break
            self.used[self.step + steps + 1] = [i for each in done if each for i in each[1]]
            steps += 1
            if steps == plan.stop and None in done:  # a rank is at its end, another is not
                plan.stop += 1
            elif steps in plan.breaks and None not in done:  # all leave their loops, and go on
                for loop in loops:
                    loop.close()
                loops = [rank.train(by_hand) for rank in ranks]
        ended = steps != plan.stop
        assert len({rank.state._checks for rank in ranks}) == 1  # all can stop at the same one
        if roll_back and not ended:
            for rank in ranks:
                rank.state.restore()
        else:
            for rank in ranks:
                rank.state.commit()
        states = [rank.state.sampler.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        if not ended:
            assert len({rank.state.step for rank in ranks}) == 1
        self.state, self.step = states[0], max(rank.state.step for rank in ranks)
        self.used = {step: used for step, used in self.used.items() if step <= self.step}
        return ended

    def check(self, tail: Tail, world: int, largest: int) -> None:
        """The promise of each tail, for the last world and the largest one."""
        length = self.arguments["dataset"]
        times = Counter(index for used in self.used.values() for index in used)
        assert set(times) <= set(range(length))
        if tail == "drop":
            assert set(times.values()) <= {1}
            assert length - len(times) < world
        else:
            assert len(times) == length
            assert sum(times.values()) - length < (largest if tail == "pad" else 1)


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(0, 120))
def test_each_sample_once_whatever_happens(tail: Tail, data: st.DataObject, length: int) -> None:
    job = Job(dataset=length, tail=tail, shuffle=data.draw(st.sampled_from([True, "stream"])))
    worlds = []
    for number in range(data.draw(st.integers(1, 4))):
        plan = Plan(data, length)
        worlds.append(plan.world)
        plan.stop = None if number == 3 else plan.stop
        by_hand = data.draw(st.sets(st.integers(1, 40), max_size=4))
        if job.train(plan, by_hand, data.draw(st.booleans())):
            break
    else:
        plan = Plan(data, length)
        worlds.append(plan.world)
        plan.stop = None
        job.train(plan, set(), roll_back=False)
    job.check(tail, plan.world, max(worlds))


def test_all_ranks_end_in_a_step_that_is_not_whole() -> None:
    """Two of three ranks have two batches in the last step, and one has one."""
    states = []
    for rank in range(3):
        sampler = ElasticSampler(11, rank=rank, world_size=3, tail="uneven")
        sampler.reshard(rank, 3, batch_sizes=[1, 1, 1])
        state = ElasticState(sampler=sampler)
        steps = state.steps(DataLoader(range(11), 1, sampler=sampler), accumulate=2)
        for number, _ in enumerate(steps, 1):
            if number > 2 and steps.ends_step:
                state.commit()
                states.append(sampler.state_dict())
    assert states == [states[0]] * 3
    assert states[0]["consumed"] == 11
