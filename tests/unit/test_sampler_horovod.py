"""The same stories told to a sampler that counts and to one that keeps sets, as Horovod's does."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

import torch

from elastic_etcd import ElasticBatchSampler, ElasticSampler
from tests.support.processed_indices import ProcessedIndices, united

BATCH = 4


def trained(samplers: list[ElasticSampler], steps: int | None = None) -> list[int]:
    """All ranks train so many steps, or to the end; they record each."""
    used = []
    for sampler in samplers:
        indices = list(islice(sampler, None if steps is None else steps * BATCH))
        for start in range(0, len(indices), BATCH):
            sampler.record(indices[start : start + BATCH])
        used += indices
    return used


def trained_sets(samplers: list[ProcessedIndices], steps: int | None = None) -> list[int]:
    used = []
    for sampler in samplers:
        indices = list(sampler)[: None if steps is None else steps * BATCH]
        for number in range(-(-len(indices) // BATCH)):
            sampler.record_batch(number, BATCH)
        used += indices
    return used


def ours(length: int, world: int) -> list[ElasticSampler]:
    return [ElasticSampler(length, tail="uneven", rank=r, world_size=world) for r in range(world)]


def theirs(length: int, world: int) -> list[ProcessedIndices]:
    return [ProcessedIndices(length, rank, world) for rank in range(world)]


def wrong(used: Iterable[int], length: int) -> tuple[int, int]:
    """How many indices were lost, how many repeated."""
    times = Counter(used)
    return length - len(times), sum(count - 1 for count in times.values())


def test_a_world_that_does_not_divide_repeats() -> None:
    assert wrong(trained_sets(theirs(101, 4)), 101) == (0, 3)
    assert wrong(trained(ours(101, 4)), 101) == (0, 0)


def test_an_undisturbed_world_that_divides_is_right_in_both() -> None:
    assert wrong(trained_sets(theirs(100, 4)), 100) == (0, 0)
    assert wrong(trained(ours(100, 4)), 100) == (0, 0)


def test_what_a_lost_rank_had_committed_is_repeated() -> None:
    # Each rank committed five steps, then rank 2 dies: nobody else knows what it had processed.
    sets = theirs(120, 3)
    used = trained_sets(sets, 5)
    used += trained_sets(united(sets[:2]))
    assert wrong(used, 120) == (0, 5 * BATCH)

    counts = ours(120, 3)
    used = trained(counts, 5)
    for rank, sampler in enumerate(counts[:2]):
        sampler.reshard(rank, 2)
    used += trained(counts[:2])
    assert wrong(used, 120) == (0, 0)


def test_a_step_that_only_one_rank_committed_is_lost() -> None:
    # Rank 2 dies while the others commit the third step: rank 1 has, rank 0 has not. The new world
    # takes the model from rank 0, of the second step, and what is processed from both.
    sets = theirs(120, 3)
    used = trained_sets(sets, 2)
    for sampler in sets:
        list(sampler)
    sets[1].record_batch(2, BATCH)
    used += trained_sets(united(sets[:2]))
    assert wrong(used, 120) == (BATCH, 2 * BATCH)

    counts = ours(120, 3)
    used = trained(counts, 2)
    second = counts[0].state_dict()
    trained(counts, 1)  # rolled back: the count comes from the same rank as the model
    for rank, sampler in enumerate(counts[:2]):
        sampler.load_state_dict(second)
        sampler.reshard(rank, 2)
    used += trained(counts[:2])
    assert wrong(used, 120) == (0, 0)


def test_sets_grow_with_the_data_and_a_count_does_not() -> None:
    sets, counts = theirs(4000, 1), ours(4000, 1)
    trained_sets(sets, 900)
    trained(counts, 900)
    assert len(sets[0].processed) == 3600
    assert counts[0].state_dict()["consumed"] == 3600
    assert counts[0].state_dict()["skipped"] == []


# --- what docs/migration.md says to do where Horovod's sampler takes what ours refuses


def test_t17_a_data_set_that_grows_is_a_function_of_the_epoch() -> None:
    sizes = [20]  # a file that only grows, in a script

    def order(epoch: int, seed: int) -> torch.Tensor:
        return torch.randperm(sizes[epoch], generator=torch.Generator().manual_seed(seed + epoch))

    def ranks(world: int) -> list[ElasticSampler]:
        more = {"shuffle": order, "tail": "uneven", "world_size": world}
        return [ElasticSampler(10**9, rank=rank, **more) for rank in range(world)]  # type: ignore[arg-type]

    two = ranks(2)
    assert wrong(trained(two), 20) == (0, 0)
    sizes.append(33)
    for sampler in two:
        sampler.set_epoch(1)
    used = trained(two, steps=2)
    sizes.append(50)  # what has come since is of the next epoch
    three = ranks(3)
    for sampler in three:
        sampler.load_state_dict(two[0].state_dict())
    assert wrong(used + trained(three), 33) == (0, 0)


def test_t17_any_set_of_indices_is_a_batch() -> None:
    sets = [[0, 9, 5], [1], [2, 3, 4, 6], [8], [7, 10], [11, 12]]

    def ranks(world: int) -> list[ElasticBatchSampler]:
        of = {"tail": "uneven", "world_size": world}
        return [ElasticBatchSampler(lambda *_: sets, rank=r, **of) for r in range(world)]  # type: ignore[arg-type]

    used, two, three = [], ranks(2), ranks(3)
    for sampler in two:
        used += next(iter(sampler))
        sampler.record()
    for newcomer in three:
        newcomer.load_state_dict(two[0].state_dict())
        used += [index for batch in newcomer for index in batch]
    assert wrong(used, 13) == (0, 0)
