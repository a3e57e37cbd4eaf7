"""What all ranks exchange beside training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_etcd.train import collectives, sync_point
from elastic_etcd.train.state import sync
from elastic_etcd.train.sync_point import SyncPoint, WorldBroken
from tests.support.forked import Child, group

COLLECTIVES: dict[str, Callable[[], Any]] = {
    "gather": lambda: collectives.gather([1]),
    "gather_json": lambda: collectives.gather_json({}),
    "broadcast": lambda: collectives.broadcast(torch.ones(1), 0),
    "sync any": lambda: sync._any_rank(torch.ones(1)),
}


def without_an_error() -> Iterator[str]:
    """Which of them give something in a world that is broken, as NCCL's do."""
    for name, call in COLLECTIVES.items():
        try:
            call()
        except WorldBroken:
            continue
        yield name


def in_a_broken_world(folder: Path) -> list[str]:
    with group(0, 1, folder):
        for call in COLLECTIVES.values():
            call()
        point = SyncPoint(0, 1, dict)
        sync_point.install(point)
        point.interrupt("n2 is lost")
        found = list(without_an_error())
        sync_point.install(None)
    return found


def test_g8_no_collective_of_ours_gives_what_may_be_garbage(tmp_path: Path) -> None:
    assert Child(in_a_broken_world, tmp_path).result() == []


@pytest.mark.parametrize("value", ["", "é" * 300, {"rank 0 on n1": [1, None]}])
def test_values_arrive(tmp_path: Path, value: object) -> None:
    assert Child(gathered, tmp_path, value).result() == [value]


def gathered(folder: Path, value: object) -> list[Any]:
    with group(0, 1, folder):
        return collectives.gather_json(value)
