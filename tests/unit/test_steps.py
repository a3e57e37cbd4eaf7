"""state.steps in one process: what it counts, when it commits, what it refuses."""

import logging
import multiprocessing
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from traceback import clear_frames
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from tqdm import tqdm

from elastic_etcd import (
    ElasticSampler,
    ElasticState,
    WorldChanged,
    accumulation_steps,
    heartbeat,
    steps_per_epoch,
)
from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import ActivityPages, ToldPlace
from elastic_etcd.train import sync_point
from elastic_etcd.train.data.sampler import Indices
from elastic_etcd.train.sync_point import SyncPoint

LENGTH, BATCH = 43, 5
pytestmark = [
    # Forking is how DataLoader starts workers; torch and pytest have threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:.*no accelerator is found:UserWarning"),
]


class Pairs:
    """Each item is a row of pixels and its label, which is its index."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index

    def __len__(self) -> int:
        return LENGTH


def made(**arguments: Any) -> ElasticState:
    """A state as a script has it, with a sampler in the order of the data."""
    sampler = ElasticSampler(LENGTH, shuffle=False, rank=0, world_size=1, **arguments)
    return ElasticState(sampler=sampler, step=0)


def from_clean_process(workers: int) -> Any:
    """Where workers come from: a fork of the whole suite's process, with its threads, may hang."""
    if not workers:
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.utils.data"])
    return context


def loader_of(state: ElasticState, **arguments: Any) -> Any:
    context = from_clean_process(arguments.get("num_workers", 0))
    arguments["multiprocessing_context"] = context
    return DataLoader(Pairs(), **({"batch_size": BATCH, "sampler": state.sampler} | arguments))


def labels(batch: Any) -> list[int]:
    found: list[int] = batch[1].tolist()
    return found


LOADERS: dict[str, Callable[[ElasticState], Any]] = {
    "plain": loader_of,
    "workers": lambda s: loader_of(s, num_workers=2),
    "persistent": lambda s: loader_of(s, num_workers=2, persistent_workers=True),
    "pinned": lambda s: loader_of(s, pin_memory=True),
    "batch_sampler": lambda s: DataLoader(
        Pairs(), batch_sampler=BatchSampler(s.sampler, BATCH, drop_last=False)
    ),
    "batches as samples": lambda s: DataLoader(
        Pairs(),
        batch_size=None,
        sampler=BatchSampler(s.sampler, BATCH, drop_last=False),
        collate_fn=lambda item: item,
    ),
}


@pytest.mark.parametrize("kind", [k for k in LOADERS if k != "batches as samples"])
def test_t1_what_is_counted_is_what_was_trained_on(kind: str) -> None:
    state = made()
    loader = LOADERS[kind](state)
    seen: list[int] = []
    for _ in range(3):  # epochs, each of two loops
        for batch in islice(state.steps(loader), 4):
            seen += labels(batch)
        state.commit()
        assert state.sampler.consumed == 4 * BATCH
        for batch in state.steps(loader):
            seen += labels(batch)
        assert state.sampler.consumed == LENGTH
        assert seen == list(range(LENGTH))
        seen.clear()
        state.sampler.set_epoch(state.sampler.epoch + 1)


class Encoding(UserDict[str, Any]):
    """What tokenizers give."""


COLLATES: dict[str, Any] = {
    "lists": lambda items: [[x for x, _ in items], [y for _, y in items]],
    "dict": lambda items: {"x": torch.stack([x for x, _ in items])},
    "encoding": lambda items: Encoding(x=[x for x, _ in items]),
    "drops every third": lambda items: [y for _, y in items if y % 3],
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("call", ["commit", "check"])
def test_t8_no_commit_within_a_step_of_several_batches(call: str) -> None:
    state = made()
    loop = state.steps(loader_of(state), accumulate=3)
    for number, _ in enumerate(loop, 1):
        if loop.ends_step:
            getattr(state, call)()
        else:
            with pytest.raises(UsageError, match=rf"{call}\(\) within a step of 3 batches"):
                getattr(state, call)()
        if number == 5:
            break
    getattr(state, call)()


@pytest.mark.parametrize(
    ("length", "rank", "world", "batch"), [(43, 0, 1, 44), (43, 0, 1, 10_000), (3, 1, 4, 1)]
)
def test_t15_an_epoch_without_a_batch_is_refused(
    length: int, rank: int, world: int, batch: int
) -> None:
    sampler = ElasticSampler(length, rank=rank, world_size=world)
    loader = DataLoader(range(length), batch, sampler=sampler, drop_last=batch > 1)
    words = f"no batch in an epoch of {length} samples for rank {rank} of {world}"
    with pytest.raises(UsageError, match=words):
        list(ElasticState(sampler=sampler).steps(loader))


def test_t15_a_rest_without_a_batch_is_none_of_that() -> None:
    state = made()
    loader = DataLoader(Pairs(), 4, sampler=state.sampler, drop_last=True)
    assert len(list(islice(state.steps(loader), LENGTH // 4))) == LENGTH // 4
    assert list(state.steps(loader)) == []


@pytest.mark.parametrize("collate", COLLATES)
def test_t2_it_does_not_matter_what_collate_makes_of_a_batch(collate: str) -> None:
    state = made()
    loader = loader_of(state, collate_fn=COLLATES[collate])
    for number, _ in enumerate(state.steps(loader, commit_every=1)):
        assert state.sampler.consumed == min(number * BATCH, LENGTH)
    assert state.sampler.consumed == LENGTH


def test_samples_without_batches_are_counted() -> None:
    state = made()
    loader = DataLoader(Pairs(), batch_size=None, sampler=state.sampler)
    for _ in islice(state.steps(loader), 7):
        pass
    state.commit()
    assert state.sampler.consumed == 7


def test_a_loader_may_drop_its_last_batch() -> None:
    state = made()
    assert len(list(state.steps(loader_of(state, drop_last=True), commit_every=1))) == 8
    assert state.sampler.consumed == 40
    state.sampler.set_epoch(1)


def test_batches_from_different_samplers_in_turn_are_counted() -> None:
    state = ElasticState(
        few=ElasticSampler(10, rank=0, world_size=1), many=ElasticSampler(40, rank=0, world_size=1)
    )
    batches: Any = ([*f, *m] for f, m in zip(
        BatchSampler(state.few, 1, drop_last=False), BatchSampler(state.many, 4, drop_last=False),
        strict=True,
    ))  # fmt: skip
    loader = DataLoader(Pairs(), batch_sampler=batches)
    for _ in islice(state.steps(loader), 3):
        pass
    state.commit()
    assert (state.few.consumed, state.many.consumed) == (3, 12)


class Twins(ElasticSampler):
    """Deals out batches: what it counts are batches, of whatever sizes."""

    def __iter__(self) -> Iterator[Any]:
        blocks: Any = self._blocks()
        return Indices.of(self, (map(self.batch, block) for block in blocks))

    def batch(self, index: int) -> Any:
        return [index] * (1 + index % 3)


def test_a_sampler_of_batches_counts_batches() -> None:
    state = ElasticState(sampler=Twins(10, rank=0, world_size=1))
    for _ in islice(state.steps(DataLoader(Pairs(), batch_sampler=state.sampler)), 4):
        pass
    state.commit()
    assert state.sampler.consumed == 4


def test_it_counts_commits_and_checks_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    state = made()
    told: list[str] = []
    commit, check = state.commit, state.check

    def committed(every: int = 1) -> None:
        told.append(f"commit {state.sampler.consumed}")
        commit(every)

    def checked() -> None:
        told.append(f"check {state.sampler.consumed}")
        check()

    monkeypatch.setitem(state.__dict__, "commit", committed)
    monkeypatch.setitem(state.__dict__, "check", checked)
    loop = iter(state.steps(loader_of(state), commit_every=2))
    for _ in range(3):
        next(loop)
        told.append("train")
    assert told == ["train", "commit 5", "check 5", "train", "commit 10", "check 10", "train"]


def test_t14_by_default_it_commits(caplog: pytest.LogCaptureFixture) -> None:
    state = made()
    for _ in state.steps(loader_of(state)):
        state.step += 1
    state.restore()
    assert state.step >= LENGTH // BATCH // 2
    assert len(caplog.messages) <= 1  # once, whatever it has come to


@pytest.mark.parametrize("arguments", [{"commit_every": None}, {"check": False}])
def test_t14_a_loop_may_commit_nothing(arguments: dict[str, Any]) -> None:
    state = made()
    assert len(list(state.steps(loader_of(state), **arguments))) == 9
    with pytest.raises(UsageError, match="nothing to restore"):
        state.restore()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_may_be_left_after_each_batch_and_begun_again(workers: int, drop_last: bool) -> None:
    """Also where loader and workers are ahead, so that the sampler has nothing more to give."""
    state = made()
    arguments = {"num_workers": workers, "persistent_workers": bool(workers)}
    loader = loader_of(state, drop_last=drop_last, **arguments)
    steps = state.steps(loader, commit_every=2)
    batches = LENGTH // BATCH if drop_last else -(-LENGTH // BATCH)
    for left_after in range(batches + 1):
        state.sampler.set_epoch(left_after)
        trained = [label for batch in islice(steps, left_after) for label in labels(batch)]
        for batch in steps:
            trained += labels(batch)
        assert trained == list(range(LENGTH))[: batches * BATCH]
        with pytest.raises(UsageError, match=f"epoch {left_after} has been used up"):
            next(iter(steps))


def test_an_error_in_the_body_leaves_the_last_commit_as_it_was() -> None:
    state = made()

    def train() -> None:
        for _ in state.steps(loader_of(state), commit_every=2):
            state.step += 1
            if state.step == 6:
                raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        train()
    state.restore()
    assert (state.step, state.sampler.consumed) == (4, 20)


def test_an_error_in_the_data_ends_the_loop_and_is_the_user_s() -> None:
    class Broken(Pairs):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 12:
                raise OSError("a rotten file")
            return super().__getitem__(index)

    state = made()
    loader = DataLoader(Broken(), BATCH, sampler=state.sampler)
    with pytest.raises(OSError, match="a rotten file"):
        list(state.steps(loader, commit_every=1))
    state.restore()
    assert state.sampler.consumed == 10


@pytest.fixture
def point() -> Iterator[SyncPoint]:
    """A world of one that can be told to stop."""
    alone = SyncPoint(0, 1, dict)
    sync_point.install(alone)
    yield alone
    sync_point.install(None)


def test_a_planned_change_passes_through_and_the_next_loop_goes_on(point: SyncPoint) -> None:
    state = made()
    trained: list[int] = []
    loader = loader_of(state, num_workers=2)

    def train() -> None:
        for batch in state.steps(loader, commit_every=100):
            state.step += 1
            trained.extend(labels(batch))
            if state.step == 3:
                point.stop()

    with pytest.raises(WorldChanged):
        train()
    state._leave()  # as ee.run does
    sync_point.install(None)
    state.restore()  # as a newcomer has it
    assert (state.step, state.sampler.consumed) == (3, 15)
    train()
    assert trained == list(range(LENGTH))


@pytest.mark.parametrize("accumulate", [1, 2, 4, 20])
def test_accumulated_batches_are_committed_and_checked_as_one_step(
    accumulate: int, point: SyncPoint
) -> None:
    state = made()
    committed: list[int] = []
    steps = state.steps(loader_of(state), commit_every=1, accumulate=accumulate)
    commit = state.commit

    def watched(every: int = 1) -> None:
        commit(every)
        committed.append(state.sampler.consumed)

    state.__dict__["commit"] = watched
    ends = [steps.ends_step for _ in steps]
    wanted = [min(n * BATCH, LENGTH) for n in range(1, 10) if n % accumulate == 0 or n == 9]
    assert committed == wanted
    assert point.steps == sum(ends) == len(wanted)
    assert ends == [n % accumulate == 0 or n == 9 for n in range(1, 10)]


def test_steps_of_several_batches_need_a_length() -> None:
    """Else nobody knows in time that the last step is incomplete, and it is never made."""
    state = made()

    class Unknown:
        def __iter__(self) -> Iterator[list[int]]:
            yield from BatchSampler(state.sampler, BATCH, drop_last=False)

    loader = DataLoader(Pairs(), batch_sampler=Unknown())
    with pytest.raises(UsageError, match="without a length"):
        next(iter(state.steps(loader, accumulate=2)))
    for _ in state.steps(loader, commit_every=1):
        pass
    state.restore()
    assert state.sampler.consumed == LENGTH


@pytest.mark.parametrize("workers", [0, 2])
def test_t16_the_length_is_that_of_the_loop_and_does_not_shrink(workers: int) -> None:
    state = made()
    steps = state.steps(loader_of(state, num_workers=workers))
    bar = tqdm(steps, disable=True)
    assert len(bar) == 9  # its total
    assert {len(steps) for _ in bar} == {9}
    assert len(steps) == 0
    state.sampler.set_epoch(1)
    for number, _ in enumerate(steps):
        assert len(steps) == 9
        if number == 3:
            break
    assert len(state.steps(loader_of(state))) == 5


def test_t16_steps_per_epoch_stay_while_one_trains() -> None:
    state = made()
    loader = loader_of(state)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, epochs=2, steps_per_epoch=steps_per_epoch(loader)
    )
    for epoch in range(2):
        state.sampler.set_epoch(epoch)
        for _ in state.steps(loader, commit_every=1):
            assert steps_per_epoch(loader) == 9
            assert steps_per_epoch(loader, accumulate=4) == 3
            optimizer.step()
            scheduler.step()
    assert scheduler.last_epoch == scheduler.total_steps
    with pytest.raises(UsageError, match="no ElasticSampler"):
        steps_per_epoch(DataLoader(Pairs()))


def test_an_evaluation_in_the_middle_changes_nothing() -> None:
    state = made()
    trained: list[int] = []
    loader, other = loader_of(state, num_workers=2), DataLoader(Pairs(), BATCH)
    for batch in state.steps(loader, commit_every=1):
        trained += labels(batch)
        assert len(list(other)) == 9
    assert trained == list(range(LENGTH))


def test_the_loader_can_still_be_looped_over_by_itself() -> None:
    state = made()
    loader = loader_of(state, num_workers=2, persistent_workers=True)
    assert len(list(loader)) == 9
    state.sampler.record(LENGTH)
    for epoch in (1, 2):
        state.sampler.set_epoch(epoch)
        assert len(list(state.steps(loader, commit_every=1))) == 9
    state.sampler.set_epoch(3)
    for batch in loader:
        state.sampler.record(batch[1])
    assert state.sampler.consumed == LENGTH
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (BATCH, False)


def test_loops_one_after_the_other_are_counted_each() -> None:
    state = ElasticState(
        one=ElasticSampler(LENGTH, rank=0, world_size=1),
        other=ElasticSampler(LENGTH, rank=0, world_size=1),
    )
    for sampler in (state.one, state.other, state.one):
        sampler.set_epoch(sampler.epoch + 1)
        loader = DataLoader(Pairs(), BATCH, sampler=sampler)
        for _ in islice(state.steps(loader, commit_every=1), 4):
            pass
    state.commit()
    assert state.one.state_dict()["epoch"] == 2
    assert (state.one.consumed, state.other.consumed) == (20, 20)


def two() -> tuple[ElasticState, Any, Any]:
    one, other = (ElasticSampler(LENGTH, shuffle=False, rank=0, world_size=1) for _ in range(2))
    state = ElasticState(one=one, other=other)
    return state, DataLoader(Pairs(), 5, sampler=one), DataLoader(Pairs(), 3, sampler=other)


def test_two_loops_at_the_same_time_that_both_commit_are_refused() -> None:
    state, one, other = two()
    with pytest.raises(UsageError, match=r"two loops .* check=False"):
        list(zip(state.steps(one), state.steps(other), strict=False))
    with pytest.raises(UsageError, match="check=False"):
        state.steps(other, check=False, commit_every=2)


@pytest.mark.parametrize("batches", [1, 3, 99])
@pytest.mark.parametrize("call", ["commit", "check"])
def test_no_commit_within_a_step_in_which_another_loop_runs(batches: int, call: str) -> None:
    """The other loop of this step is one of some batches, broken off or at its end."""
    state, one, other = two()
    loop = state.steps(one, accumulate=3)
    for epoch, _ in enumerate(loop):
        state.other.set_epoch(epoch)
        for number, _ in enumerate(state.steps(other, check=False), 1):
            if number == batches:
                break
        if not loop.ends_step:
            with pytest.raises(UsageError, match=rf"{call}\(\) within a step of 3 batches"):
                getattr(state, call)()
    getattr(state, call)()


@pytest.mark.parametrize("by_hand", [True, False])
def test_two_loops_at_the_same_time_are_counted_together(by_hand: bool) -> None:
    state, one, other = two()
    first = state.steps(one, check=False) if by_hand else state.steps(one, commit_every=2)
    rows = 0
    for _ in zip(first, state.steps(other, check=False), strict=False):
        rows += 1
        if by_hand:
            state.commit(every=2)
            state.check()
    assert rows == 9
    state.restore()
    assert (state.one.consumed, state.other.consumed) == (40, 24)


def foreign(_: ElasticState) -> Any:
    return DataLoader(Pairs(), BATCH, shuffle=True)


def anothers(_: ElasticState) -> Any:
    return loader_of(made())


class Buckets(BatchSampler):  # type: ignore[misc]  # torch is untyped to mypy
    """Takes 20 indices at a time and gives them in four batches."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        while many := list(islice(indices, 20)):
            yield from (many[n : n + 5] for n in range(0, len(many), 5))


class Filtering(BatchSampler):  # type: ignore[misc]
    """Leaves out some indices."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield [index for index in batch if index != 11]


class Twice:
    """A loader around a loader, which gives each batch twice."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            yield batch


class Half(Twice):
    def __iter__(self) -> Iterator[Any]:
        yield from islice(self.loader, None, None, 2)


class Stream(IterableDataset[int]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Prepared:
    """As accelerate's DataLoaderShard shows itself."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader


REFUSED: dict[str, tuple[Callable[[ElasticState], Any], str]] = {
    "another sampler": (foreign, "do not come from an ElasticSampler of the state"),
    "another ElasticSampler": (anothers, "is not the state's"),
    "in_order": (lambda s: loader_of(s, num_workers=2, in_order=False), "leave in_order out"),
    "buckets": (
        lambda s: DataLoader(Pairs(), batch_sampler=Buckets(s.sampler, 5, drop_last=False)),
        "took 20 indices for a batch of 5",
    ),
    "filter": (
        lambda s: DataLoader(Pairs(), batch_sampler=Filtering(s.sampler, 5, drop_last=False)),
        "took 5 indices for a batch of 4",
    ),
    "repeated": (lambda s: Twice(loader_of(s)), "no sampler has handed out"),
    "lost": (lambda s: Half(loader_of(s)), "has lost batches"),
    "iterable": (lambda _: DataLoader(Stream(), BATCH), "IterableDataset"),
    "accelerate": (lambda s: Prepared(loader_of(s)), r"leave it out of accelerator.prepare"),
    "a list": (lambda _: [1, 2], "is no DataLoader"),
    "an iterator": (lambda s: iter(loader_of(s)), "is no DataLoader"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_t2_what_can_t_be_counted_is_refused_with_what_to_do(kind: str) -> None:
    make, match = REFUSED[kind]
    state = made()
    with pytest.raises(UsageError, match=match):
        list(state.steps(make(state)))


@pytest.mark.parametrize(
    "arguments", [{"accumulate": 0}, {"commit_every": 0}, {"commit_every": "x"}]
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    state = made()
    with pytest.raises(UsageError, match="at least 1"):
        state.steps(loader_of(state), **arguments)


def test_a_state_without_a_sampler_is_refused() -> None:
    with pytest.raises(UsageError, match="has no ElasticSampler"):
        ElasticState(step=0).steps(DataLoader(Pairs(), BATCH))


def test_a_loader_that_accelerate_has_prepared_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    state = made()
    prepared = accelerate.Accelerator(cpu=True).prepare(loader_of(state))
    with pytest.raises(UsageError, match=r"leave it out of accelerator.prepare"):
        list(state.steps(prepared))


def test_a_batch_is_not_recorded_twice() -> None:
    state = made()
    loop = iter(state.steps(loader_of(state)))
    next(loop)
    with pytest.raises(UsageError, match=r"leave record\(\) out"):
        state.sampler.record(5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_batches_of_an_older_world_ends(workers: int) -> None:
    state = made()
    loop = iter(state.steps(loader_of(state, num_workers=workers)))
    next(loop)
    state.sampler.reshard(0, 2)
    with pytest.raises((UsageError, RuntimeError), match="begun anew"):
        next(loop)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_is_counted_and_keeps_its_state(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    state = made()
    trained: list[int] = []
    in_workers = {"num_workers": workers, "multiprocessing_context": from_clean_process(workers)}
    loader = stateful(Pairs(), BATCH, sampler=state.sampler, **in_workers)
    for batch in islice(state.steps(loader, commit_every=1), 4):
        trained += labels(batch)
    state.commit()
    assert state.sampler.consumed == 20
    saved = loader.state_dict()
    other = made()
    loader = stateful(Pairs(), BATCH, sampler=other.sampler, **in_workers)
    loader.load_state_dict(saved)
    for batch in other.steps(loader, commit_every=1):
        trained += labels(batch)
    assert trained == list(range(LENGTH))
    assert other.sampler.consumed == LENGTH


@pytest.mark.parametrize("planned", [False, True])
def test_t17_rank_0_says_what_a_step_is_now_and_was(
    caplog: pytest.LogCaptureFixture, planned: bool
) -> None:
    sampler = ElasticSampler(1000, rank=0, world_size=4)
    state = ElasticState(sampler=sampler)

    def begin(world: int, rank: int = 0) -> list[str]:
        caplog.clear()
        sampler.reshard(rank, world)
        arguments: dict[str, Any] = {"batch_size": 8, "sampler": sampler}
        caplog.set_level(logging.INFO, "elastic_etcd")
        if planned:
            plan = accumulation_steps(96, 8, rank=rank, world_size=world)
            sampler.reshard(batch_sizes=plan.batch_sizes)
            arguments = {"batch_sampler": plan.batches(sampler)}
        loader = DataLoader(range(1000), **arguments)
        steps = state.steps(loader, accumulate=len(plan) if planned else 1)
        for _ in steps:
            if steps.ends_step:
                break
        return [r.getMessage() for r in caplog.records if "a step is" in r.getMessage()]

    assert begin(4) == begin(4) == []
    assert begin(3) == ([] if planned else ["a step is 24 samples, was 32"])
    assert begin(5, rank=1) == []
    assert begin(4) == ([] if planned else ["a step is 32 samples, was 40"])


def test_t17_rank_0_in_a_new_process_knows_how_many_ranks_there_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "elastic_etcd")
    state = ElasticState(sampler=ElasticSampler(LENGTH, rank=0, world_size=3))
    state._loops.ranks_before = 4
    next(iter(state.steps(loader_of(state))))
    assert "a step is 15 samples, of 3 ranks, which were 4" in caplog.text


class Torn(Pairs):
    """The sample 12 can't be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 12:
            raise ValueError("torn")
        return super().__getitem__(index)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ToldPlace | None]]:
    """The place in the training that this process tells an agent."""
    pages = ActivityPages()
    pages.begin(0)
    monkeypatch.setattr(activity, "_page", pages.all()[0])
    monkeypatch.setattr(activity, "_looked", True)
    yield lambda: pages.reached(0)
    pages.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batch_in_hand_is_told_with_its_indices(
    told: Callable[[], ToldPlace | None], workers: int
) -> None:
    state = made()
    steps = state.steps(loader_of(state, num_workers=workers), commit_every=2)
    assert told() is None
    for number, (_, labels) in enumerate(steps):
        commits, since = divmod(number, 2)
        expected = ToldPlace(since, commits, (0, number), tuple(labels.tolist()))
        assert told() == (expected if commits else None)
    assert told() == ToldPlace(1, 4), "no batch is in hand any more"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_read_is_told_though_it_never_comes(
    told: Callable[[], ToldPlace | None], workers: int
) -> None:
    state = made()
    context = from_clean_process(workers)
    loader = DataLoader(
        Torn(), BATCH, sampler=state.sampler, num_workers=workers, multiprocessing_context=context
    )
    with pytest.raises(ValueError, match="torn") as caught:
        for _ in state.steps(loader, commit_every=1):
            pass
    clear_frames(caught.tb)  # with the cycle through torch's frames workers would end in 5 s each
    assert told() == ToldPlace(0, 2, (0, 2), (10, 11, 12, 13, 14))


def test_batches_are_counted_in_the_epoch_over_all_worlds(
    told: Callable[[], ToldPlace | None],
) -> None:
    half = made().sampler.state_dict() | {"consumed": 20}
    sampler = ElasticSampler(LENGTH, shuffle=False, rank=1, world_size=2)
    sampler.load_state_dict(half)
    state = ElasticState(sampler=sampler)
    state.commit()
    found = [told() for _ in state.steps(loader_of(state), check=True, commit_every=None)]
    assert [reached and reached.batch for reached in found] == [(0, 2), (0, 3), (0, 4)]


def test_a_step_that_the_script_tells_counts_more_than_commits(
    told: Callable[[], ToldPlace | None],
) -> None:
    heartbeat(1000)
    made().commit()
    assert told() == ToldPlace(1000)
    heartbeat(-1)
    heartbeat(1 << 63)
    heartbeat()
    assert told() == ToldPlace(1000)


def test_the_last_batch_is_committed_when_the_loop_asks_for_the_next() -> None:
    state = made()
    for _ in state.steps(loader_of(state), commit_every=1):
        state.step += 1
    state.restore()
    assert (state.step, state.sampler.consumed) == (9, LENGTH)


def test_a_break_counts_the_last_batch_and_so_does_a_commit_in_the_body() -> None:
    state = made()
    loader = loader_of(state)
    for _ in state.steps(loader, commit_every=None):
        state.step += 1
        if state.step == 2:
            state.commit()
            assert state.sampler.consumed == 10
        if state.step == 4:
            break
    with state.sampler._length_of("rest"):
        assert len(state.sampler) == LENGTH - 20
    assert labels(next(iter(state.steps(loader))))[0] == 20
    state.restore()
    assert (state.step, state.sampler.consumed) == (2, 10)
    assert labels(next(iter(state.steps(loader))))[0] == 10


def test_continue_and_errors_that_are_caught_skip_a_batch() -> None:
    state = made()
    trained: list[int] = []
    for batch in state.steps(loader_of(state), commit_every=1):
        if 7 in labels(batch):
            continue
        trained += labels(batch)
    assert sorted({*range(LENGTH)} - {*trained}) == [5, 6, 7, 8, 9]
    assert state.sampler.consumed == LENGTH


def test_a_loader_around_a_loader_may_look_ahead() -> None:
    class Ahead(Twice):
        def __iter__(self) -> Iterator[Any]:
            batches = iter(self.loader)
            waiting = list(islice(batches, 3))
            while waiting:
                yield waiting.pop(0)
                waiting += islice(batches, 1)

    state = made()
    trained: list[int] = []
    for batch in state.steps(Ahead(loader_of(state)), commit_every=1):
        assert state.sampler.consumed == len(trained)
        trained += labels(batch)
    assert trained == list(range(LENGTH))
