"""What all ranks exchange beside training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_etcd.train import collectives, sync_point
from elastic_etcd.train.sharded import exchange
from elastic_etcd.train.state import replicas, sync
from elastic_etcd.train.sync_point import SyncPoint, WorldBroken
from tests.support.forked import Child, group

COLLECTIVES: dict[str, Callable[[], Any]] = {
    "gather": lambda: collectives.gather([1]),
    "gather_texts": lambda: collectives.gather_texts("text"),
    "gather_json": lambda: exchange.gather_json({}),
    "sync broadcast": lambda: sync._broadcast(torch.ones(1), 0),
    "sync any": lambda: sync._any_rank(torch.ones(1)),
    "replicas broadcast": lambda: replicas._broadcast([1], 0),
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


@pytest.mark.parametrize("text", ["", "rank 0 on n1", "é" * 300])
def test_texts_arrive(tmp_path: Path, text: str) -> None:
    assert Child(texts, tmp_path, text).result() == [text.encode()[:512].decode(errors="ignore")]


def texts(folder: Path, text: str) -> list[str]:
    with group(0, 1, folder):
        return collectives.gather_texts(text)
