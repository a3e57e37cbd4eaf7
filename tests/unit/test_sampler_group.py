"""Samplers of several processes that talk over gloo: uneven inputs, and what ranks agree on."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elastic_etcd import ElasticSampler
from elastic_etcd.errors import UsageError
from tests.support.forked import ranks_that_end

Told = list[list[dict[str, Any]]]  # of each rank, for each story

WORLD = 2


def stories(rank: int) -> list[dict[str, Any]]:
    return [uneven(), own_pace(rank), own_size(rank), own_order(rank)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each rank tells of each story."""
    return ranks_that_end(WORLD, tmp_path_factory.mktemp("group"), stories, 50)


def uneven() -> dict[str, Any]:
    """DDP's Join with one more step on rank 0, in one epoch, and a short batch in the other."""
    told: dict[str, Any] = {"indices": [], "states": []}
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for length in (17, 21):
        sampler = ElasticSampler(length, tail="uneven")
        indices: list[int] = []
        with Join([model]):
            for batch in DataLoader(list(range(length)), batch_size=4, sampler=sampler):
                model(batch.float()[:, None]).sum().backward()
                sampler.record(batch)
                indices += batch.tolist()
        told["indices"].append(indices)
        told["states"].append(sampler.state_dict()["consumed"])
    return told


def test_an_uneven_tail_is_joined(told: Told) -> None:
    first, second = (rank[0] for rank in told)
    for number, length in enumerate((17, 21)):
        mine, others = first["indices"][number], second["indices"][number]
        assert len(mine) == len(others) + 1
        assert sorted(mine + others) == list(range(length))
    assert first["states"] == [17, 21]
    assert second["states"] == [16, 21]  # without a part in the fifth step of the first


def own_pace(rank: int) -> dict[str, Any]:
    """Every rank records what it likes, then all agree."""
    sampler = ElasticSampler(60, shuffle=False, tail="uneven")
    indices = iter(sampler)
    used = list(islice(indices, 3 + 4 * rank))
    sampler.record(used)
    sampler.agree()
    state = sampler.state_dict()
    next(indices)
    sampler.record(1)
    with pytest.raises(UsageError, match="agree again"):
        sampler.state_dict()
    return {"used": used, "state": state}


def test_ranks_that_go_at_their_own_pace_agree(told: Told) -> None:
    state = told[0][1]["state"]
    assert told[1][1]["state"] == state
    assert state["consumed"] == 3 + 7
    assert [list(range(*part)) for part in state["skipped"]] == [[6, 8, 10, 12]]  # rank 0's
    used = [index for rank in told for index in rank[1]["used"]]
    for rank in range(3):
        sampler = ElasticSampler(60, shuffle=False, tail="uneven", rank=rank, world_size=3)
        sampler.load_state_dict(state)
        used += list(sampler)
    assert sorted(used) == list(range(60))


def own_size(rank: int) -> dict[str, Any]:
    """Every rank knows its own batch size only."""
    sampler = ElasticSampler(600)
    sampler.reshard(batch_sizes=[30, 20][rank])
    return {"length": len(sampler)}


def test_batch_sizes_are_gathered(told: Told) -> None:
    assert [rank[2]["length"] for rank in told] == [360, 240]


def own_order(rank: int) -> dict[str, Any]:
    """Every rank draws its own order in epoch 1, which nobody notices by lengths."""

    def order(epoch: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + epoch * rank)
        return torch.randperm(60, generator=generator)

    sampler = ElasticSampler(60, shuffle=order)
    sampler.set_epoch(0)
    with pytest.raises(
        ValueError, match=r"shuffle\(1, 0\) gives ranks \[1\] another order"
    ) as raised:
        sampler.set_epoch(1)
    return {"said": str(raised.value)}


def test_orders_that_differ_are_refused_on_every_rank(told: Told) -> None:
    assert told[0][3] == told[1][3]
