"""One ElasticSampler: its order, its epochs, what is recorded, what is refused, what is said."""

import os
import warnings
from collections import Counter
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from elastic_etcd import ElasticBatchSampler, ElasticSampler
from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.train.data.shards import Tail


def sampler(length: int = 100, **arguments: Any) -> ElasticSampler:
    return ElasticSampler(length, **({"rank": 0, "world_size": 1} | arguments))


@pytest.mark.parametrize("world", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("drop_last", "length"),
    [(False, n) for n in (1, 2, 6, 7, 100, 1013)]
    + [(True, n) for n in (16, 17, 100, 1013)],  # torch gives negative lengths below the world
)
def test_exact_is_torchs_order_index_by_index(
    length: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    tail: Tail = "drop" if drop_last else "pad"
    for rank in range(world):
        for epoch in (0, 3):
            theirs = DistributedSampler(
                range(length), world, rank, shuffle=shuffle, seed=11, drop_last=drop_last
            )
            theirs.set_epoch(epoch)
            ours = sampler(length, shuffle=shuffle, seed=11, tail=tail, rank=rank, world_size=world)
            ours.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)


def test_exact_is_torchs_order_over_several_blocks() -> None:
    theirs = DistributedSampler(range(300_000), 2, 1, seed=5)
    assert list(sampler(300_000, seed=5, tail="pad", rank=1, world_size=2)) == list(theirs)


@settings(max_examples=50)
@given(
    length=st.integers(0, 80),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    tail=st.sampled_from(["drop", "pad", "uneven"]),
)
def test_length_is_what_the_iterator_gives(length: int, sizes: list[int], tail: Tail) -> None:
    for rank in range(len(sizes)):
        mine = sampler(length, tail=tail, rank=rank, world_size=len(sizes))
        mine.reshard(batch_sizes=sizes)
        assert len(list(mine)) == len(mine)


def shard(kind: Any, length: int, rank: int, sizes: list[int]) -> list[int]:
    """The indices that a rank gets of a padded epoch, in a world with these batch sizes."""
    if kind == "batches":
        mine: Any = ElasticBatchSampler(
            lambda *_: [[index] for index in range(length)], tail="pad", rank=0, world_size=1
        )
    else:
        mine = sampler(length, shuffle=kind, tail="pad")
    mine.reshard(rank, len(sizes), batch_sizes=sizes)
    return [index for (index,) in mine] if kind == "batches" else list(mine)


def padded(kind: Any, length: int, sizes: list[int]) -> tuple[Counter[int], list[int]]:
    """What all ranks get together, and the order of the epoch."""
    shards = [shard(kind, length, rank, sizes) for rank in range(len(sizes))]
    return Counter(chain.from_iterable(shards)), shard(kind, length, 0, [1])


KINDS = [False, "exact", "stream", "batches", lambda *_: list(range(599, -1, -1))]


@pytest.mark.parametrize("kind", KINDS, ids=["none", "exact", "stream", "batches", "function"])
def test_a_pad_may_begin_before_the_last_block_of_a_rank(kind: Any) -> None:
    given, order = padded(kind, 600, [86, 85, 85])  # turns of 256, of which the last has 88
    assert sorted(order) == list(range(600))
    assert given == Counter(order) + Counter(order[:168])


@settings(max_examples=50)
@given(length=st.integers(1, 900), sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_a_pad_is_the_beginning_of_the_order(length: int, sizes: list[int]) -> None:
    given, order = padded("exact", length, sizes)
    assert given == Counter((order * (2 + sum(sizes) // length))[: given.total()])
    assert 0 <= given.total() - length < sum(sizes)


def test_different_batch_sizes_end_at_the_same_step() -> None:
    sizes = [48, 32, 16]
    for rank, size in enumerate(sizes):
        mine = sampler(96 * 5 + 40, rank=rank, world_size=3)
        mine.reshard(batch_sizes=sizes)
        assert len(mine) == 5 * size + {48: 18, 32: 12, 16: 6}[size]  # 40 hold 6 turns of 3, 2, 1


def test_a_used_up_epoch_is_not_begun_again_by_itself() -> None:
    mine = sampler(10)
    mine.record(list(mine))
    with pytest.raises(UsageError, match=r"call set_epoch\(1\)"):
        iter(mine)
    mine.set_epoch(1)
    assert len(list(mine)) == 10


def test_a_used_up_epoch_that_was_loaded_is_empty() -> None:
    mine, other = sampler(10), sampler(10)
    mine.record(list(mine))
    other.load_state_dict(mine.state_dict())
    other.set_epoch(0)
    assert list(other) == []
    other.set_epoch(1)
    assert len(list(other)) == 10


def test_the_current_epoch_goes_on_when_set_again() -> None:
    mine = sampler(10, shuffle=False)
    mine.record(list(islice(mine, 4)))
    mine.set_epoch(0)
    assert list(mine) == [4, 5, 6, 7, 8, 9]


def test_a_batch_is_a_number_a_tensor_or_indices() -> None:
    mine = sampler(10)
    indices = list(mine)
    mine.record(2)
    mine.record(torch.zeros(3, 7))
    mine.record(indices[5:9])
    assert mine.consumed == 9


@pytest.mark.parametrize("count", [-1, 6])
def test_recording_what_was_not_handed_out_is_refused(count: int) -> None:
    mine = sampler(10)
    _ = list(islice(mine, 5))
    with pytest.raises(ValueError, match="5 handed out ones are open"):
        mine.record(count)


def test_what_was_handed_out_in_the_world_before_is_void() -> None:
    mine = sampler(1000)
    indices = iter(mine)
    next(indices)
    mine.reshard(0, 2)
    with pytest.raises(ValueError, match="0 handed out ones are open"):
        mine.record(1)
    with pytest.raises(RuntimeError, match="void"):
        list(indices)


def test_the_middle_of_a_step_is_no_state() -> None:
    mine = sampler(100, rank=0, world_size=2)
    mine.reshard(batch_sizes=[30, 20])
    _ = list(islice(mine, 10))
    mine.record(4)
    with pytest.raises(RuntimeError, match=r"in the middle of a step \(1 of 3 parts\)"):
        mine.state_dict()
    mine.record(2)
    assert mine.state_dict()["consumed"] == 10


def test_an_uneven_tail_of_unknown_batches_is_not_guessed() -> None:
    mine = sampler(5, tail="uneven", rank=1, world_size=2)
    mine.record(list(mine))
    with pytest.raises(RuntimeError, match="batch_sizes"):
        mine.state_dict()


def test_uneven_gives_each_index_to_one_rank_of_which_one_may_have_none() -> None:
    shares = [list(sampler(10, tail="uneven", rank=r, world_size=4)) for r in range(4)]
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    assert sorted(chain.from_iterable(shares)) == list(range(10))
    mine = sampler(3, tail="uneven", rank=3, world_size=4)
    assert list(mine) == []
    assert mine.state_dict()["consumed"] == 0
    mine.reshard(1, 2)
    assert len(mine) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shuffle": "yes"}, "exact"),
        ({"tail": "cut"}, "drop, pad, uneven"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
        ({"rank": 1, "world_size": None}, "both"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sampler(**arguments)


@pytest.mark.parametrize("kind", [int, torch.tensor, float])
def test_what_equals_true_or_false_is_that_as_shuffle(kind: Any) -> None:
    """So are the 0 and 1 of `--shuffle` with type=int."""
    for told in (False, True):
        mine, plain = sampler(20, shuffle=kind(told)), sampler(20, shuffle=told)
        assert list(mine) == list(plain)
        assert mine.state_dict() == plain.state_dict()


@pytest.mark.parametrize("sizes", [[1], [1, 0], [1, 2, 3]])
def test_wrong_batch_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"batch sizes|at least one"):
        sampler(rank=0, world_size=2).reshard(batch_sizes=sizes)


def test_a_state_of_other_data_is_refused() -> None:
    """As that of a data set that has grown: another node may have the right one."""
    with pytest.raises(WrongHere, match=r"length is 99, here 100: .* load\(path, strict=False\)"):
        sampler(100).load_state_dict(sampler(99).state_dict())
    with pytest.raises(UsageError, match="shuffle is 'stream'"):
        sampler(100).load_state_dict(sampler(100, shuffle="stream").state_dict())


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "1", "WORLD_SIZE": "4"})
    mine = ElasticSampler(range(8), shuffle=False)
    assert list(mine) == [1, 5]
    os.environ["WORLD_SIZE"] = "2"
    assert list(mine) == [1, 3, 5, 7]


def test_commits_without_record_are_said() -> None:
    mine = sampler(10)
    indices = iter(mine)
    next(indices)
    mine.state_dict()
    next(indices)
    with pytest.warns(RuntimeWarning, match="nothing recorded since the one before"):
        mine.state_dict()


@pytest.mark.parametrize(
    ("handed", "recorded", "said"),
    [
        (10, [], "of 10 indices handed out in an epoch, 0 were recorded: loop over state.steps"),
        (10, [1] * 4, "of 10 indices handed out in an epoch, 4 were recorded"),
        (10, [3] * 3, ""),  # a last batch that a loader drops
        (1, [], ""),  # broken off
    ],
)
def test_an_epoch_that_was_not_recorded_is_said_once(
    handed: int, recorded: list[int], said: str
) -> None:
    mine = sampler(10)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in (1, 2):
            _ = list(islice(mine, handed + handed // 10))  # asks for more than there are
            for count in recorded:
                mine.record(count)
            mine.set_epoch(epoch)
            assert [said in str(each.message) for each in told] == [True] * bool(said)
    assert mine.epoch == 2


X, Y = torch.zeros(8, 3), torch.zeros(8)


@pytest.mark.parametrize(
    "batch",
    [[X, Y], (X, Y), {"x": X, "y": Y}, ["a", "b"], "text", torch.tensor(8), 8.0, None, [[1], [2]]],
)
def test_t1_a_batch_that_does_not_tell_its_samples_is_refused(batch: Any) -> None:
    mine = sampler()
    _ = list(mine)
    with pytest.raises(TypeError, match=r"state\.steps.*the number"):
        mine.record(batch)
    assert mine.consumed == 0
