"""ee.seed_all: which ranks and worlds draw the same numbers, and which do not."""

import os
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import elastic_etcd as ee
from tests.support.forked import ranks


class Draws:
    """What a data loader's worker draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return draw()


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])  # noqa: NPY002
    torch.set_rng_state(kept[2])


def world(patch: pytest.MonkeyPatch, generation: int, rank: int) -> None:
    patch.setenv("ELASTIC_ETCD_GENERATION", str(generation))
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", "4")


def test_the_same_seed_generation_and_rank_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed, generation, rank in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]:
        world(monkeypatch, generation, rank)
        ee.seed_all(ee.ElasticState(), seed)
        first = [draw(), draw()]
        ee.seed_all(ee.ElasticState(), seed)
        assert [draw(), draw()] == first
        found.append(first)
    for of_each in zip(*(chain.from_iterable(first) for first in found), strict=True):
        assert len(set(of_each)) == len(found)


def test_a_restore_in_the_same_world_draws_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 1, 0)
    state = ee.ElasticState(epoch=0)
    ee.seed_all(state)
    draw()
    state.commit()
    after = [draw(), draw()]
    state.restore()
    assert [draw(), draw()] == after
    state.restore()
    assert [draw(), draw()] == after


def test_in_another_world_a_rank_draws_what_a_newcomer_there_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world(monkeypatch, 1, 1)
    state = ee.ElasticState(epoch=0)
    ee.seed_all(state, 7)
    state.commit()
    world(monkeypatch, 2, 0)  # a world of one, as far as sync() is concerned
    state.restore()
    state.sync()
    found = draw()
    ee.seed_all(ee.ElasticState(), 7)
    assert found == draw()


def between_ranks(rank: int, folder: Path) -> tuple[list[float], list[float], list[list[float]]]:
    os.environ["ELASTIC_ETCD_GENERATION"] = "3"
    state = ee.ElasticState(epoch=0)
    ee.seed_all(state, seed=rank)  # rank 0's counts
    state.sync()
    first = draw()
    again = ee.ElasticState()
    ee.seed_all(again, seed=0)
    assert draw() == first, "rank 0's seed counts, and the rank is its own"
    loader = DataLoader(Draws(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    of_workers = list(loader)
    state.commit()
    committed = draw()
    draw()
    state.restore()
    assert draw() == committed
    dist.barrier()
    state.save(folder / "file")
    return first, committed, of_workers


def test_ranks_and_their_loaders_workers_draw_other_numbers(tmp_path: Path) -> None:
    found = ranks(2, tmp_path, between_ranks, tmp_path)
    drawn = [
        n
        for first, committed, loaded in found
        for n in (*first, *committed, *chain.from_iterable(loaded))
    ]
    assert len(set(drawn)) == len(drawn) == 2 * 3 * (2 + 4)
