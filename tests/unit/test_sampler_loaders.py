"""What loaders prefetch is not counted: torch's DataLoader, and torchdata's StatefulDataLoader."""

from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from elastic_etcd import ElasticSampler, accumulation_steps

LENGTH = 203


class Numbers:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return LENGTH


LOADERS = [(0, False), (2, False), (2, True), (8, True)]
pytestmark = [
    # Forking is how DataLoader starts workers; torch and pytest have threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def loader_of(
    sampler: ElasticSampler, workers: int, persistent: bool, kind: type[Any] = DataLoader
) -> Any:
    return kind(
        Numbers(), batch_size=5, sampler=sampler, num_workers=workers, persistent_workers=persistent
    )


def taken(loader: Any, batches: int | None, sampler: ElasticSampler | None) -> list[int]:
    indices: list[int] = []
    for batch in islice(iter(loader), batches):
        if sampler is not None:
            sampler.record(batch)
        indices += batch.tolist()
    return indices


@pytest.mark.parametrize(("workers", "persistent"), LOADERS)
def test_each_index_once_from_two_ranks_to_three(workers: int, persistent: bool) -> None:
    arguments: dict[str, Any] = {"seed": 4, "tail": "uneven"}
    samplers = [ElasticSampler(LENGTH, rank=r, world_size=2, **arguments) for r in range(2)]
    loaders = [loader_of(sampler, workers, persistent) for sampler in samplers]
    for epoch in range(2):
        used = []
        for sampler, loader in zip(samplers[:2], loaders[:2], strict=True):
            sampler.set_epoch(epoch)
            sampler.reshard(samplers.index(sampler), 2)
            used += taken(loader, 3, sampler)
        states = [sampler.state_dict() for sampler in samplers[:2]]
        assert states[0] == states[1]
        assert states[0]["consumed"] == len(used) == 30
        if epoch == 0:
            samplers.append(ElasticSampler(LENGTH, rank=2, world_size=3, **arguments))
            loaders.append(loader_of(samplers[2], workers, persistent))
        for rank, (sampler, loader) in enumerate(zip(samplers, loaders, strict=True)):
            sampler.load_state_dict(states[0])
            sampler.reshard(rank, 3)
            used += taken(loader, None, sampler)
        assert sorted(used) == list(range(LENGTH))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("workers", "persistent", "batches"),
    [(0, False, 0), (0, False, 7), (2, False, 1), (2, True, 20), (8, True, 7)],
)
def test_a_stateful_loader_goes_on(
    workers: int, persistent: bool, batches: int, recorded: bool
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh() -> tuple[ElasticSampler, Any]:
        sampler = ElasticSampler(LENGTH, seed=4, tail="pad", rank=1, world_size=2)
        return sampler, loader_of(sampler, workers, persistent, stateful)

    sampler, loader = fresh()
    whole = taken(loader, None, sampler if recorded else None)
    sampler, loader = fresh()
    first = taken(loader, batches, sampler if recorded else None)
    state = loader.state_dict()
    sampler, loader = fresh()
    loader.load_state_dict(state)
    assert first + taken(loader, None, sampler if recorded else None) == whole
    sampler.set_epoch(1)
    assert len(taken(loader, None, None)) == len(whole)


def test_a_stateful_loader_goes_on_in_another_world() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    used = []
    for rank in range(2):
        sampler = ElasticSampler(LENGTH, tail="uneven", rank=rank, world_size=2)
        loader = loader_of(sampler, 2, False, stateful)
        used += taken(loader, 4, None)
        state = loader.state_dict()
    for rank in range(3):
        sampler = ElasticSampler(LENGTH, tail="uneven", rank=rank, world_size=3)
        loader = loader_of(sampler, 2, False, stateful)
        loader.load_state_dict(state)
        used += taken(loader, None, None)
    assert sorted(used) == list(range(LENGTH))


def test_a_stateful_loaders_state_within_a_step_is_refused() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sampler = ElasticSampler(LENGTH, rank=0, world_size=2)
    sampler.reshard(batch_sizes=[15, 10])  # turns of 3 and 2
    loader = loader_of(sampler, 0, False, stateful)
    taken(loader, 2, None)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="in the middle of a step"):
        iter(loader)


def test_a_finished_stateful_loader_begins_the_epoch_that_is_asked_for() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sampler = ElasticSampler(LENGTH)
    loader = loader_of(sampler, 2, False, stateful)
    taken(loader, None, None)
    state = loader.state_dict()
    sampler = ElasticSampler(LENGTH)
    loader = loader_of(sampler, 2, False, stateful)
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    assert len(taken(loader, None, None)) == LENGTH
    assert sampler.epoch == 1


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_p2_the_length_stays_while_an_iteration_runs(workers: int, persistent: bool) -> None:
    """Scripts divide by len(loader) and ask whether a batch is the last one."""
    sampler = ElasticSampler(LENGTH, rank=0, world_size=1)
    loader = loader_of(sampler, workers, persistent)
    for epoch, left in ((0, 41), (1, 31)):
        sampler.set_epoch(epoch)
        if epoch:
            taken(loader, 10, sampler)
            sampler.load_state_dict(sampler.state_dict())  # as after a change of world
        assert len(loader) == left
        lasts = []
        for number, batch in enumerate(loader):
            sampler.record(batch)
            lasts.append(number + 1 == len(loader))
        assert lasts == [False] * (left - 1) + [True]
        assert len(loader) == left


def test_p2_the_length_of_micro_batches_is_what_an_iteration_gives() -> None:
    sampler = ElasticSampler(LENGTH, rank=0, world_size=1)
    batches = accumulation_steps(10, 5, rank=0, world_size=1).batches(sampler)
    for batch in islice(batches, 20):
        sampler.record(batch)
        assert len(batches) == 40
    assert len(list(batches)) == len(batches) == 20
