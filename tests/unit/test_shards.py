"""Sharded values in a changing world: each rank's pieces, their copies, and what others take."""

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.system.limits import Free
from elastic_etcd.train.state import snapshot_store
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import Child, ranks
from tests.support.sharded_worlds import builder, live

MANY = [pytest.mark.nightly(part="sharded"), pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("processes", "seeds"),
    [
        pytest.param(5, range(2, 4), marks=pytest.mark.timeout(600)),
        pytest.param(8, range(500), marks=MANY),
    ],
)
def test_a_world_of_any_size_goes_on_from_the_last_commit(
    tmp_path: Path, processes: int, seeds: range
) -> None:
    children = [Child(live, process, tmp_path, seeds, processes) for process in range(processes)]
    assert [child.result(500 if processes == 5 else 7200) for child in children] == [[]] * processes


def refused(rank: int) -> list[str]:
    """What a state says to scripts that can't be right."""
    del rank
    said = []
    early = ElasticState(build=builder(1), epoch=0)
    twice = ElasticState(build=builder(1), model=nn.Linear(1, 1))
    for call in (early.commit, twice.sync, lambda: early.save("file")):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


def test_what_can_not_be_is_refused_by_name(tmp_path: Path) -> None:
    for early, twice, file in ranks(2, tmp_path, refused)[:1]:
        assert early == "commit(): the values of `build` are made where training begins"
        assert twice == "build(world) makes 'model', which the state has already"
        assert file == "nothing to save: commit() first"


def asked(rank: int, free: int) -> str:
    """What a commit says on a node of two ranks, of which each needs so much for its pieces."""
    del rank
    os.environ |= {"GROUP_RANK": "0", "ELASTIC_ETCD_COPIES": "2"}
    there: Any = snapshot_store
    there.free_memory = lambda: Free(free, "the machine's memory")
    state = ElasticState(build=wide, epoch=0)
    try:
        state.sync()
    except WrongHere as error:
        return str(error)
    return ""


def wide(world: Any) -> dict[str, Any]:
    return {"model": fully_shard(nn.Linear(1 << 10, 1 << 10), mesh=world.mesh())}  # 4 MiB


def test_a_node_is_asked_once_for_the_memory_of_all_its_ranks(tmp_path: Path) -> None:
    both = 4 * (2 << 20) + (1 << 16)  # two snapshots of a half, on each of two ranks
    for number, free in enumerate((both, both * 3 // 4)):
        (folder := tmp_path / str(number)).mkdir()
        told = ranks(2, folder, asked, free)
        if free == both:
            assert told == ["", ""]
            continue
        for each in told:
            assert "two commits of the pieces of 2 ranks on this node" in each
            assert "8.01 MiB more of host memory are needed, 6.05 MiB" in each
            assert "of the machine's memory are free. Less is needed" in each


def test_what_goes_with_build_is_a_value_without_it() -> None:
    state = ElasticState(first=True)
    assert state.first is True
    with pytest.raises(UsageError, match="build is a function"):
        ElasticState(build=3)  # type: ignore[arg-type]
