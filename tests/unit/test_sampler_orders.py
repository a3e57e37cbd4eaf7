"""Orders and batches that a user's function gives: length-grouped, weighted, bucketed."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_etcd import ElasticBatchSampler, ElasticSampler
from elastic_etcd.errors import UsageError
from elastic_etcd.train.data.shards import Tail

LENGTHS = [len(str(n * n * 7919)) for n in range(203)]  # of the samples, as texts have them


class Numbers:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(LENGTHS)


def weighted(epoch: int, seed: int) -> torch.Tensor:
    """As WeightedRandomSampler draws: with replacement, another number in each epoch."""
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    weights = torch.tensor(LENGTHS, dtype=torch.float)
    return torch.multinomial(weights, 300 + epoch, replacement=True, generator=generator)


def grouped(epoch: int, seed: int) -> list[int]:
    """Samples of like length beside each other."""
    generator = torch.Generator().manual_seed(seed + epoch)
    drawn = torch.randperm(len(LENGTHS), generator=generator).tolist()
    return sorted(drawn, key=lambda index: LENGTHS[index])


def bucketed(epoch: int, seed: int) -> list[list[int]]:
    """Batches with about as many letters each, so of unlike sizes."""
    batches: list[list[int]] = [[]]
    for index in grouped(epoch, seed):
        if sum(LENGTHS[i] for i in batches[-1]) >= 40:
            batches.append([])
        batches[-1].append(index)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch))
    return [batches[number] for number in order]


def sampler(shuffle: Any, world: int = 1, rank: int = 0, **arguments: Any) -> ElasticSampler:
    arguments = {"tail": "uneven", **arguments}
    return ElasticSampler(Numbers(), shuffle=shuffle, rank=rank, world_size=world, **arguments)


@pytest.mark.parametrize("shuffle", [weighted, grouped])
def test_one_rank_gets_the_order_as_it_is(shuffle: Callable[[int, int], Sequence[int]]) -> None:
    ours = sampler(shuffle, seed=3)
    for epoch in (0, 1):
        ours.set_epoch(epoch)
        wanted = list(map(int, shuffle(epoch, 3)))
        assert len(ours) == ours.length == len(wanted)
        assert list(ours) == wanted
        ours.record(len(wanted))


def test_ranks_share_the_order_in_turn() -> None:
    shares = [list(sampler(weighted, 3, rank)) for rank in range(3)]
    for rank in range(3):
        assert shares[rank] == weighted(0, 0).tolist()[rank::3]


@settings(max_examples=60, deadline=None)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=5),
    epoch=st.integers(0, 3),
    kind=st.sampled_from([weighted, grouped]),
)
def test_each_place_of_a_given_order_is_used_once(
    worlds: list[tuple[int, int]], epoch: int, kind: Callable[[int, int], Sequence[int]]
) -> None:
    state: dict[str, Any] | None = None
    used: Counter[int] = Counter()
    for world, batches in [*worlds, (1, 1000)]:
        states = []
        for rank in range(world):
            mine = sampler(kind, world, rank)
            if state is None:
                mine.set_epoch(epoch)
            else:
                mine.load_state_dict(state)
            mine.reshard(rank, world)
            taken = list(islice(iter(mine), batches if world > 1 else None))
            mine.record(taken)
            used.update(taken)
            states.append((len(taken), mine.state_dict()))
        state = max(states, key=lambda told: told[0])[1]  # one at its end may have no part
    assert used == Counter(map(int, kind(epoch, 0)))


def test_the_state_is_small_and_knows_its_order() -> None:
    ours = sampler(weighted)
    iterator = iter(ours)
    ours.record(list(islice(iterator, 7)))
    state = ours.state_dict()
    assert (state["consumed"], state["length"], state["shuffle"]) == (7, 300, "given")
    assert all(isinstance(value, int | str | list) for value in state.values())


def test_an_order_that_is_another_one_after_a_restart_is_refused() -> None:
    state = sampler(weighted).state_dict()

    def other(epoch: int, seed: int) -> torch.Tensor:
        return weighted(epoch, seed).flip(0)

    sampler(weighted).load_state_dict(state)
    with pytest.raises(UsageError, match="the state's order is"):
        sampler(other).load_state_dict(state)
    with pytest.raises(UsageError, match="the state's shuffle is 'given', here 'exact'"):
        sampler(True).load_state_dict(state)
    with pytest.raises(UsageError, match="the state's shuffle is 'exact', here 'given'"):
        sampler(weighted).load_state_dict(ElasticSampler(300).state_dict())


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0, 203], "gives 0 to 203 for a data set of 203"),
        ([-1, 3], "gives -1 to 3 for a data set of 203"),
        ([0.5, 1.0], r"gives a row of indices, not float32 of shape \(2,\)"),
        ([[1, 2]], r"not int64 of shape \(1, 2\)"),
        ([True, False], "not bool"),
    ],
)
def test_what_is_no_order_is_refused(order: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampler(lambda _epoch, _seed: order)


def test_an_order_may_be_empty() -> None:
    assert list(sampler(lambda _epoch, _seed: [])) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
def test_each_batch_once_from_two_ranks_to_three(workers: int, tail: Tail) -> None:
    used: list[tuple[int, ...]] = []
    states: list[dict[str, Any]] = []
    for world, most in ((2, 4), (3, None)):
        for rank in range(world):
            mine = ElasticBatchSampler(bucketed, tail=tail, rank=rank, world_size=world)
            mine.set_epoch(2)
            if world == 3:
                mine.load_state_dict(states[0])
                mine.reshard(rank, world)
            loader = DataLoader(Numbers(), batch_sampler=mine, num_workers=workers)
            assert len(loader) == len(mine)
            for batch in islice(loader, most):
                used.append(tuple(batch.tolist()))
                mine.record()
            states.append(mine.state_dict())
    assert states[0] == states[1]
    wanted = Counter(map(tuple, bucketed(2, 0)))
    missing, again = wanted - Counter(used), Counter(used) - wanted
    assert missing.total() <= (2 if tail == "drop" else 0)
    assert again.total() <= (2 if tail == "pad" else 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader_of_batches_goes_on() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh() -> Any:
        mine = ElasticBatchSampler(bucketed, rank=1, world_size=2)
        return stateful(Numbers(), batch_sampler=mine, num_workers=2)

    whole = [batch.tolist() for batch in fresh()]
    loader = fresh()
    first = [batch.tolist() for batch in islice(loader, 5)]
    state = loader.state_dict()
    loader = fresh()
    loader.load_state_dict(state)
    assert first + [batch.tolist() for batch in loader] == whole


def test_orders_are_compared_only_where_there_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    mine = ElasticSampler(range(10), shuffle=lambda _epoch, _seed: range(10))
    mine.set_epoch(1)
    assert list(mine) == [0, 2, 4, 6, 8]


def test_batches_are_counted_and_not_samples() -> None:
    mine = ElasticBatchSampler(bucketed)
    batch = next(iter(mine))
    assert len(batch) > 1
    with pytest.raises(TypeError):
        mine.record(batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recorded"):
        mine.record(1000)
    mine.record()
    assert mine.consumed == 1


def test_other_batches_after_a_restart_are_refused() -> None:
    def smaller(epoch: int, seed: int) -> list[list[int]]:
        return [batch[:-1] for batch in bucketed(epoch, seed)]

    state = ElasticBatchSampler(bucketed).state_dict()
    with pytest.raises(UsageError, match="the state's order is"):
        ElasticBatchSampler(smaller).load_state_dict(state)


def test_t17_a_data_set_that_grows_is_a_function_of_the_epoch() -> None:
    """As docs/migration.md says to those who have Horovod's sampler."""
    sizes = [20]  # a file that only grows, in a script

    def order(epoch: int, seed: int) -> torch.Tensor:
        return torch.randperm(sizes[epoch], generator=torch.Generator().manual_seed(seed + epoch))

    def trained(ranks: list[ElasticSampler], count: int | None) -> list[int]:
        used = []
        for mine in ranks:
            indices = list(islice(mine, count))
            mine.record(indices)
            used += indices
        return used

    two = [sampler(order, 2, rank) for rank in range(2)]
    assert sorted(trained(two, None)) == list(range(20))
    sizes.append(33)
    for mine in two:
        mine.set_epoch(1)
    used = trained(two, 8)
    sizes.append(50)  # what has come since is of the next epoch
    three = [sampler(order, 3, rank) for rank in range(3)]
    for mine in three:
        mine.load_state_dict(two[0].state_dict())
    assert sorted(used + trained(three, None)) == list(range(33))
