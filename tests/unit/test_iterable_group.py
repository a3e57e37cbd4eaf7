"""ElasticIterables of several processes that talk over gloo: what they agree on, how they end."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_etcd import ElasticIterable, ElasticState
from elastic_etcd.errors import UsageError
from tests.support.forked import ranks_that_end

Told = list[list[dict[str, Any]]]  # of each rank, for each story

pytestmark = pytest.mark.timeout(300)  # the first test starts a process that loads torch

WORLD = 2
SIZES = [40, 3, 17, 25, 60, 8, 11]


def read(shard: int, start: int) -> Iterator[int]:
    return iter(range(shard * 1000 + start, shard * 1000 + SIZES[shard]))


def everything() -> list[int]:
    return [shard * 1000 + n for shard, size in enumerate(SIZES) for n in range(size)]


def stories(rank: int) -> list[dict[str, Any]]:
    told = [committed(lengths) for lengths in (SIZES, None)]
    told += [ended(), own_epoch(rank), own_shards(rank), too_few()]
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank tells of each story."""
    return ranks_that_end(WORLD, tmp_path_factory.mktemp("group"), stories, 100)


def committed(lengths: list[int] | None) -> dict[str, Any]:
    """Three batches, a commit, two more that are rolled back, and a sync."""
    data = ElasticIterable(range(len(SIZES)), read, lengths=lengths, seed=2)
    state = ElasticState(data=data)
    batches = iter(data.loader(4, num_workers=2, multiprocessing_context="fork"))
    used = []
    for number, batch in enumerate(batches):
        data.record()
        if number < 3:
            used += batch.tolist()
        if number == 2:
            state.commit()
        if number == 4:
            break
    state.restore()
    state.sync()
    return {"used": used, "state": data.state_dict()}


@pytest.mark.parametrize("story", [0, 1])
def test_a_commit_knows_what_all_ranks_have_trained_on(told: Told, story: int) -> None:
    first, second = (rank[story] for rank in told)
    assert first["state"] == second["state"]
    used = first["used"] + second["used"]
    assert len(used) == 24
    lengths = None if story else SIZES
    for rank in range(3):
        world: dict[str, Any] = {"rank": rank, "world_size": 3, "tail": "uneven"}
        data = ElasticIterable(range(len(SIZES)), read, lengths=lengths, seed=2, **world)
        data.load_state_dict(first["state"])
        used += [int(sample) for sample in data]
    assert sorted(used) == everything()


def ended() -> dict[str, Any]:
    """Epochs of shards of unknown length, until no rank has to wait for another."""
    told: dict[str, Any] = {"batches": [], "used": []}
    data = ElasticIterable(range(len(SIZES)), read, seed=2)
    for epoch in range(3):
        data.set_epoch(epoch)
        batches = []
        for batch in data.loader(4):
            dist.all_reduce(torch.zeros(1))  # as DDP does: hangs if one rank has a batch less
            data.record()
            batches.append(batch.tolist())
        told["batches"].append(len(batches))
        told["used"].append(list(chain(*batches)))
        data.agree()
    return told


def test_ranks_end_an_epoch_together_without_lengths(told: Told) -> None:
    first, second = (rank[2] for rank in told)
    assert first["batches"] == second["batches"]
    for epoch in range(3):
        used = first["used"][epoch] + second["used"][epoch]
        assert len(used) == len(set(used)) > 0
        assert set(used) < set(everything())


def own_epoch(rank: int) -> dict[str, Any]:
    data = ElasticIterable(range(len(SIZES)), read, lengths=SIZES)
    data.set_epoch(rank)
    list(islice(data, 3))
    with pytest.raises(RuntimeError, match=r"different epochs: \[0, 1\]; call set_epoch on all"):
        data.agree()
    return {}


def test_ranks_in_different_epochs_are_told(told: Told) -> None:
    assert told[0][3] == told[1][3] == {}


def own_shards(rank: int) -> dict[str, Any]:
    """Each rank has the shards in an order of its own, as glob.glob() may give them."""
    shards = range(len(SIZES))
    data = ElasticIterable(list(shards)[:: 1 - 2 * rank], read)
    with pytest.raises(UsageError, match=r"ranks \[1\] have other shards than rank 0") as raised:
        data.agree()
    return {"said": str(raised.value)}


def test_shards_that_differ_are_refused_on_every_rank(told: Told) -> None:
    assert told[0][4] == told[1][4]


def too_few() -> dict[str, Any]:
    """A file for two ranks: the epoch would end on both at once."""
    data = ElasticIterable([0], read)
    with pytest.raises(UsageError, match="an epoch of 1 file of unknown length for 2 ranks") as no:
        list(ElasticState(data=data).steps(data.loader(4)))
    return {"said": str(no.value)}


def test_fewer_files_than_ranks_are_refused_on_every_rank(told: Told) -> None:
    assert told[0][5] == told[1][5]
