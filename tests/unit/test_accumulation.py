"""The plan of a step: the same global batch in every world."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_etcd import ElasticSampler, accumulation_steps
from elastic_etcd.errors import UsageError


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 40))
def test_the_global_batch_is_the_same_in_every_world(batch: int, micro: int, world: int) -> None:
    if batch < world:
        with pytest.raises(ValueError, match="idle"):
            accumulation_steps(batch, micro, rank=0, world_size=world)
        return
    plans = [accumulation_steps(batch, micro, rank=r, world_size=world) for r in range(world)]
    assert sum(plan.batch_size for plan in plans) == batch
    assert sum(plan.weight(size) for plan in plans for size in plan.micro_batches) == pytest.approx(
        world
    )
    for plan in plans:
        assert plan.batch_sizes == plans[0].batch_sizes
        assert sum(plan.micro_batches) == plan.batch_size
        assert max(plan.micro_batches) <= micro
        assert max(plan.micro_batches) - min(plan.micro_batches) <= 1
        assert max(plan.batch_sizes) - min(plan.batch_sizes) <= 1
        assert len(plan) == -(-plan.batch_size // micro)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
def test_gradients_are_those_of_the_global_batch(world: int) -> None:
    inputs, targets = torch.randn(30, 4), torch.randn(30)
    weights = torch.randn(4, requires_grad=True)
    loss = torch.nn.functional.mse_loss
    loss(inputs @ weights, targets).backward()
    assert weights.grad is not None
    whole, weights.grad = weights.grad, None
    start = 0
    for rank in range(world):
        plan = accumulation_steps(30, 4, rank=rank, world_size=world)
        for size in plan.micro_batches:
            part = slice(start, start + size)
            mean = loss(inputs[part] @ weights, targets[part])
            (mean * plan.weight(size) / world).backward()  # DDP divides by the world
            start += size
    torch.testing.assert_close(weights.grad, whole)


def test_micro_batches_are_loaded_step_by_step_with_the_same_global_batches() -> None:
    def steps_of(world: int) -> list[set[int]]:
        steps: list[set[int]] = [set() for _ in range(10)]
        for rank in range(world):
            plan = accumulation_steps(30, 4, rank=rank, world_size=world)
            sampler = ElasticSampler(307, seed=2, rank=rank, world_size=world)
            sampler.reshard(batch_sizes=plan.batch_sizes)
            loader = DataLoader(list(range(307)), batch_sampler=plan.batches(sampler))
            assert len(loader) == 10 * len(plan)
            for number, batch in enumerate(loader):
                sampler.record(batch)
                steps[number // len(plan)].update(batch.tolist())
            assert sampler.consumed == 300
            with pytest.raises(UsageError, match=r"set_epoch\(1\)"):
                iter(sampler)
        return steps

    assert [len(step) for step in steps_of(1)] == [30] * 10
    assert steps_of(1) == steps_of(2) == steps_of(4) == steps_of(7)


@pytest.mark.parametrize(
    ("batch", "world", "sizes"),
    [(10, 3, None), (10, 3, [1, 1, 1]), (12, 3, [4, 4, 3]), (12, 2, None)],
    ids=["forgotten", "others", "others of an equal plan", "a plan of another world"],
)
def test_a_sampler_that_deals_out_otherwise_is_refused(
    batch: int, world: int, sizes: list[int] | None
) -> None:
    """Some rank would take a step more than another, which waits for it for ever."""
    for rank in range(3):
        sampler = ElasticSampler(60, rank=rank, world_size=3)
        sampler.reshard(batch_sizes=sizes)
        plan = accumulation_steps(batch, 2, rank=min(rank, world - 1), world_size=world)
        loader = DataLoader(list(range(60)), batch_sampler=plan.batches(sampler))
        with pytest.raises(UsageError, match=r"sampler.reshard\(batch_sizes=plan.batch_sizes\)"):
            next(iter(loader))


@pytest.mark.parametrize(("batch", "sizes"), [(12, None), (12, [2, 2, 2]), (10, [8, 6, 6])])
def test_a_sampler_that_deals_out_in_proportion_is_taken(
    batch: int, sizes: list[int] | None
) -> None:
    sampler = ElasticSampler(60, rank=0, world_size=3)
    sampler.reshard(batch_sizes=sizes)
    assert next(iter(accumulation_steps(batch, 4, rank=0, world_size=3).batches(sampler)))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((8, 0, 0, 1), "at least one"),
        ((8, 4, 3, 3), "rank 3"),
        ((0, 1, 0, 1), "idle"),
        ((8, 4, 1, None), "give both"),
        ((8, 4, None, 2), "give both"),
    ],
)
def test_wrong_plans_are_refused(arguments: Any, match: str) -> None:
    batch, micro, rank, world = arguments
    with pytest.raises(ValueError, match=match):
        accumulation_steps(batch, micro, rank=rank, world_size=world)
