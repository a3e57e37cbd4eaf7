"""state.steps on several ranks: all of them check as often, and all have counted the same."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elastic_etcd import ElasticSampler, ElasticState
from elastic_etcd.errors import UsageError
from elastic_etcd.train import sync_point
from elastic_etcd.train.sync_point import SyncPoint
from tests.support.forked import Child, group, ranks

LENGTH = 17  # of which rank 0 has one more than rank 1
BATCH = 4


def uneven_epochs(rank: int) -> list[tuple[int, int, int]]:
    """Steps, checks and samples so far at the end of each epoch, with DDP's Join."""
    point = SyncPoint(rank, 2, dict)
    sync_point.install(point)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    state = ElasticState(sampler=ElasticSampler(LENGTH, tail="uneven"), step=0)
    loader = DataLoader(list(range(LENGTH)), BATCH, sampler=state.sampler)
    told = []
    for epoch in range(2):
        state.sampler.set_epoch(epoch)
        with Join([model]):
            for batch in state.steps(loader, commit_every=1):
                model(batch.float()[:, None]).sum().backward()
                state.step += 1
        state.commit()
        told.append((state.step, point.steps, state.sampler.consumed))
    return told


def test_t10_ranks_with_one_step_more_check_as_often_as_the_others(tmp_path: Path) -> None:
    more, fewer = ranks(2, tmp_path, uneven_epochs)
    assert more == [(3, 2, LENGTH), (6, 4, LENGTH)]
    assert fewer == [(2, 2, LENGTH), (4, 4, LENGTH)]


class OfTwoSizes:
    """Batches of two samples and three in turn, which one rank begins with two and one with three.

    So do batches by their number of tokens, of which all ranks have equally many.
    """

    def __init__(self, sampler: ElasticSampler, first: int) -> None:
        self.sampler, self.first = sampler, first

    def __len__(self) -> int:
        return ceil(len(self.sampler) * 2 / 5)

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        sizes = cycle([self.first, 5 - self.first])
        while batch := list(islice(indices, next(sizes))):
            yield batch


def with_batches_of_two_sizes(rank: int) -> tuple[list[int], list[int]]:
    """What was trained on in two worlds: a few batches of two ranks, and the rest by rank 0."""
    state = ElasticState(sampler=ElasticSampler(101))
    state.sync()
    batches = OfTwoSizes(state.sampler, 2 + rank)
    loader = DataLoader(range(101), batch_sampler=batches, collate_fn=list)
    first = [i for batch in islice(state.steps(loader, commit_every=1), 3) for i in batch]
    state.commit()
    if rank:  # a newcomer in its place, which has begun no loop
        state = ElasticState(sampler=ElasticSampler(101))
    state.sync()
    state.commit()
    if rank:
        return first, []
    state.sampler.reshard(0, 1)
    return first, [i for batch in state.steps(loader, check=False) for i in batch]


def test_t7_batches_of_any_size_are_trained_on_once(tmp_path: Path) -> None:
    (first, rest), (second, _) = ranks(2, tmp_path, with_batches_of_two_sizes)
    assert len(first) != len(second)
    assert sorted(first + second + rest) == list(range(101))


class ByTokens(OfTwoSizes):
    """Batches of as many samples as have 10 tokens, of which a sample has its index modulo 5."""

    def __len__(self) -> int:
        return 20 + self.first  # as one that has counted them

    def __iter__(self) -> Iterator[list[int]]:
        raise NotImplementedError  # it does not come to that


class WithoutLength:
    def __init__(self, sampler: ElasticSampler, _: int) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        raise NotImplementedError


def with_other_numbers_of_batches(rank: int, kind: type[Any]) -> str:
    state = ElasticState(sampler=ElasticSampler(101))
    loader = DataLoader(range(101), batch_sampler=kind(state.sampler, rank))
    with pytest.raises(UsageError) as raised:
        list(state.steps(loader))
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "words"), [(ByTokens, "the ranks [20, 21] batches"), (WithoutLength, "has no length")]
)
def test_t7_ranks_that_may_have_another_number_of_batches_are_refused(
    kind: type[Any], words: str, tmp_path: Path
) -> None:
    one, other = ranks(2, tmp_path, with_other_numbers_of_batches, kind)
    assert one == other
    assert f"{kind.__name__} " in one
    assert words in one
    assert "ElasticBatchSampler" in one


def accumulated_uneven(rank: int) -> int:
    """The last step of one rank has a batch more than the other's."""
    sampler = ElasticSampler(9, shuffle=False, tail="uneven")
    state = ElasticState(sampler=sampler)
    state.sync()
    loader = DataLoader(list(range(9)), batch_size=1, sampler=sampler)
    for _ in state.steps(loader, commit_every=1, accumulate=8):
        pass
    state.sync()
    return sampler.consumed


def test_an_uneven_tail_in_an_incomplete_step_is_counted_alike(tmp_path: Path) -> None:
    assert ranks(2, tmp_path, accumulated_uneven) == [0, 0]  # no step was whole: nothing committed


def at_the_last_batch(rank: int, folder: Path) -> Any:
    """A peer dies in the last batch of all, and the script catches what that does."""
    told = None
    with suppress(RuntimeError), group(rank, 2, folder):
        sync_point.install(SyncPoint(rank, 2, dict))
        state = ElasticState(sampler=ElasticSampler(32))
        state.sync()
        try:
            for number, _ in enumerate(
                state.steps(DataLoader(range(32), 4, sampler=state.sampler))
            ):
                with suppress(RuntimeError):
                    if (rank, number) == (1, 3):
                        os.kill(os.getpid(), signal.SIGKILL)
                    dist.all_reduce(torch.ones(1))
        except sync_point.WorldBroken as error:
            told = str(error)
    return told


def test_t3_a_training_does_not_end_with_batches_that_were_left_out(tmp_path: Path) -> None:
    children = [Child(at_the_last_batch, rank, tmp_path) for rank in range(2)]
    told, _ = [child.result() for child in children]
    assert told.startswith("a collective has failed, here or on another rank, so nothing is comm")


def keep_even(items: list[int]) -> torch.Tensor:
    return torch.tensor([item for item in items if item % 4 == 0])


def broken_on_rank_0(rank: int, by_hand: bool) -> tuple[str, int]:
    """Half of the samples can't be read on rank 0."""
    state = ElasticState(sampler=ElasticSampler(48, shuffle=False))
    collate: Any = None if rank else keep_even
    loader = DataLoader(list(range(48)), BATCH, sampler=state.sampler, collate_fn=collate)
    state.sync()
    if by_hand:
        for batch in loader:
            state.sampler.record(batch)
            state.commit(every=3)
    else:
        for batch in state.steps(loader, commit_every=3):
            assert len(batch) <= BATCH
    try:
        state.sync()
    except UsageError as error:
        return str(error), state.sampler.consumed
    return "", state.sampler.consumed


@pytest.mark.parametrize("by_hand", [True, False])
def test_t2_ranks_that_have_counted_different_numbers(by_hand: bool, tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, broken_on_rank_0, by_hand)
    if by_hand:
        assert "ranks 0 and 1 have committed samplers that differ" in one[0]
        assert one[0] == other[0]
    else:
        assert one == other == ("", 48)
