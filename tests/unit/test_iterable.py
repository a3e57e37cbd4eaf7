"""ElasticIterable: streamed samples, each once in an epoch, over worlds, workers, commits, ends."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate, get_worker_info

from elastic_etcd import ElasticIterable
from elastic_etcd.errors import UsageError
from elastic_etcd.train.data.shards import Tail

pytestmark = [
    # Forking is how DataLoader starts workers; torch and pytest have threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SIZES = [7, 0, 31, 12, 1, 25, 9, 18]  # samples in each shard
ALL = sum(SIZES)


class Read:
    """Shards are numbers; a sample is one too, and tells its shard. Knows what was opened."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.opened: list[tuple[int, int]] = []

    def __call__(self, shard: int, start: int) -> Iterator[int]:
        self.opened.append((shard, start))
        return iter(range(shard * 1000 + start, shard * 1000 + self.sizes[shard]))

    def samples(self) -> list[int]:
        return [shard * 1000 + n for shard, size in enumerate(self.sizes) for n in range(size)]


def iterable(sizes: list[int] = SIZES, *, told: bool = True, **arguments: Any) -> ElasticIterable:
    world = {"rank": 0, "world_size": 1}
    lengths = sizes if told else None
    return ElasticIterable(range(len(sizes)), Read(sizes), lengths=lengths, **(world | arguments))


def everything(sizes: list[int] = SIZES) -> list[int]:
    return Read(sizes).samples()


class Rank:
    """One process with a loader."""

    def __init__(self, data: ElasticIterable, batch: int, workers: int = 0, **more: Any) -> None:
        self.data = data
        self.batches: Iterator[Any] = iter(data.loader(batch, num_workers=workers, **more))

    def train(self) -> list[int]:
        """A batch, empty at the end."""
        for batch in islice(self.batches, 1):
            self.data.record()
            return [int(sample) for sample in batch]
        return []


def agree(ranks: list[Rank]) -> None:
    """What agree() does, of ranks in one process."""
    own = [rank.data._layout.join(list(chain(*rank.data._by_worker))) for rank in ranks]
    for rank in ranks:
        data = rank.data
        data._remaining = data._layout.join([*chain(*own), *data._left_over])
        data._agreed = True


def worlds() -> Any:
    """World sizes, and how many steps each of them takes."""
    return st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), max_size=12),
    worlds=worlds(),
    told=st.booleans(),
    shuffle=st.booleans(),
    buffer=st.sampled_from([0, 1, 5, 64]),
    batch=st.integers(1, 6),
    ahead=st.integers(0, 3),
    tail=st.sampled_from(["drop", "pad", "uneven"]),
    rolled_back=st.sets(st.integers(0, 3)),
)
def test_each_sample_once_over_any_worlds(
    sizes: list[int],
    worlds: list[tuple[int, int]],
    told: bool,
    shuffle: bool,
    buffer: int,
    batch: int,
    ahead: int,
    tail: Tail,
    rolled_back: set[int],
) -> None:
    if not told and tail == "pad":
        tail = "uneven"
    common: dict[str, Any] = {"shuffle": shuffle, "buffer": buffer, "told": told, "tail": tail}
    used: list[int] = []
    state: dict[str, Any] = {}
    for number, (world, steps) in enumerate([*worlds, (2, 1000)]):
        ranks = []
        for rank in range(world):
            data = iterable(sizes, rank=rank, world_size=world, **common)
            data.set_epoch(3)
            if state:
                data.load_state_dict(state)
            ranks.append(Rank(data, batch))
        trained: list[int] = []
        for step in range(steps):
            batches = [rank.train() for rank in ranks]
            trained += chain(*batches)
            if told and tail != "uneven":
                assert len(set(map(len, batches))) == 1, step  # nobody waits for another
            if not any(batches):
                break
        if number in rolled_back and number < len(worlds):
            continue
        for each in ranks:  # prefetched, and then dropped
            list(islice(each.batches, ahead if number < len(worlds) else 0))
        agree(ranks)
        states = [rank.data.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        used += trained
    missing = Counter(everything(sizes)) - Counter(used)
    again = Counter(used) - Counter(everything(sizes))
    if told and tail == "drop":
        assert not again
        assert missing.total() < 2
    elif told and tail == "pad":
        assert not missing
    else:
        assert not again
        assert not missing


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [4, None])
def test_what_workers_prefetch_is_not_counted(
    workers: int, told: bool, batch_size: int | None
) -> None:
    used: list[int] = []
    state: dict[str, Any] = {}
    for world, most in ((2, 3), (3, 1000)):
        ranks = [
            iterable(told=told, tail="uneven", rank=rank, world_size=world) for rank in range(world)
        ]
        running = []
        for data in ranks:
            if state:
                data.load_state_dict(state)
            loader = data.loader(
                batch_size, num_workers=workers, prefetch_factor=4 if workers else None
            )
            running.append(Rank.__new__(Rank))
            running[-1].data = data
            for batch in islice(loader, most):
                used += batch.tolist() if batch_size else [int(batch)]
                data.record()
        agree(running)
        state = ranks[0].state_dict()
    assert sorted(used) == everything()
    empty = 1 << 40 if not told and workers == 3 else 0  # a shard that no batch has come from
    assert sum(stop - start for start, stop in state["remaining"]) == empty


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_that_come_out_of_order_are_counted_by_their_marks(workers: int) -> None:
    data = iterable(tail="uneven")
    loader = data.loader(3, num_workers=workers, in_order=False)
    used = [sample for batch in take(data, loader, 7) for sample in batch.tolist()]
    data.load_state_dict(data.state_dict())
    used += [sample for batch in take(data, loader, None) for sample in batch.tolist()]
    assert sorted(used) == everything()


def take(data: ElasticIterable, loader: Any, most: int | None) -> Iterator[Any]:
    for batch in islice(loader, most):
        yield batch
        data.record()


def drop_some(samples: list[int]) -> Any:
    """A collate_fn that leaves samples out, as one that meets broken pictures does."""
    return [sample for sample in samples if sample % 3]


def test_what_a_collate_fn_leaves_out_is_not_read_again() -> None:
    data = iterable(SIZES, shuffle=False)
    used = list(chain(*take(data, data.loader(4, collate_fn=drop_some, num_workers=2), 9)))
    data.load_state_dict(data.state_dict())
    used += chain(*take(data, data.loader(4, collate_fn=drop_some), None))
    assert sorted(used) == [sample for sample in everything() if sample % 3]


def test_shards_are_opened_where_reading_goes_on() -> None:
    data = iterable([10, 20, 30], shuffle=False)
    list(take(data, data.loader(5), 3))
    state = data.state_dict()
    assert state["remaining"] == [[15, 60]]
    data = iterable([10, 20, 30], shuffle=False)
    data.load_state_dict(state)
    list(data.loader(5))
    assert data._open.opened == [(1, 5), (2, 0)]  # type: ignore[attr-defined]


def test_each_epoch_has_another_order_of_shards_and_within_them() -> None:
    def shards(epoch: int, **arguments: Any) -> list[int]:
        data = iterable(**arguments)
        data.set_epoch(epoch)
        return [int(sample) for sample in data]

    assert shards(0) == shards(0) != shards(1)
    assert shards(0, shuffle=False) == shards(1, shuffle=False) == everything()
    shuffled = shards(0, shuffle=False, buffer=16)
    assert shuffled != shards(1, shuffle=False, buffer=16)
    assert [sample // 1000 for sample in shuffled] == [sample // 1000 for sample in everything()]
    assert sorted(shuffled) == everything()
    blocks = [sample % 1000 // 16 for sample in shuffled if sample // 1000 == 2]
    assert blocks == [0] * 16 + [1] * 15


@pytest.mark.parametrize("told", [True, False])
def test_the_state_is_small(told: bool) -> None:
    sizes = [3] * 5000
    ranks = [iterable(sizes, told=told, rank=rank, world_size=8) for rank in range(8)]
    running = [Rank(data, 4, 0) for data in ranks]
    for _ in range(50):
        for rank in running:
            rank.train()
    agree(running)
    state = ranks[0].state_dict()
    assert len(state["remaining"]) <= 9
    assert all(data.state_dict() == state for data in ranks)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_the_length_is_exact_where_lengths_are_given(workers: int, drop_last: bool) -> None:
    for rank in range(3):
        data = iterable(rank=rank, world_size=3)
        loader = data.loader(4, num_workers=workers, drop_last=drop_last)
        assert len(loader) == len(list(loader)) > 0
    with pytest.raises(TypeError, match="give ElasticIterable lengths"):
        len(iterable(told=False).loader(4))


def test_a_shard_that_is_shorter_than_told_is_said() -> None:
    data = ElasticIterable(
        ["a", "b"], lambda _, start: range(start, 5), lengths=[5, 6], shuffle=False
    )
    with pytest.raises(
        ValueError, match="shard 'b' ended after 5 samples, but its length was given as 6"
    ):
        list(data.loader(2))


def test_recording_more_than_was_given_is_an_error() -> None:
    data = iterable()
    loader = data.loader(4)
    with pytest.raises(ValueError, match=r"recorded 1 batches, but 0 that data\.loader"):
        data.record()
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="recorded 4 batches, but 1 that"):
        data.record(len(batch))
    with pytest.raises(TypeError):
        data.record(batch)
    data.record()
    plain = iter(DataLoader(iterable(), batch_size=4))
    assert default_collate(list(next(plain))).shape == (4,)


def test_a_used_up_epoch_is_an_error_and_forgetting_is_said() -> None:
    data = iterable()
    loader = data.loader(4)
    list(loader)
    with pytest.raises(UsageError, match=r"epoch 0 has been used up: call set_epoch\(1\)"):
        iter(loader)
    with pytest.warns(RuntimeWarning, match="26 batches of an epoch were not recorded"):
        data.set_epoch(1)
    assert len(list(take(data, loader, None))) == len(list(range(0, ALL, 4)))
    data.set_epoch(2)


def test_an_iterator_is_void_after_the_next_one() -> None:
    data = iterable()
    loader = data.loader(4)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="this iterator is void"):
        next(first)
    data.reshard(0, 2)
    with pytest.raises(RuntimeError, match="this iterator is void"):
        next(second)


def test_breaking_off_goes_on_after_what_is_recorded() -> None:
    data = iterable(SIZES, shuffle=False)
    used = list(take(data, data.loader(4, num_workers=3), 5))
    used += take(data, data.loader(7), 2)
    used += take(data, data.loader(3, num_workers=2), None)
    assert sorted(chain(*(batch.tolist() for batch in used))) == everything()


def test_ranks_have_to_agree_before_a_state() -> None:
    data = iterable(world_size=2)
    state = data.state_dict()
    rank = Rank(data, 4)
    assert data.state_dict() == state
    rank.train()
    with pytest.raises(UsageError, match=r"agree\(\) on all ranks"):
        data.state_dict()
    with pytest.raises(UsageError, match=r"agree\(\) on all ranks"):
        data.reshard(0, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tail": "pad", "told": False}, "drop, uneven .pad: with lengths., not 'pad'"),
        ({"tail": "most"}, "tail is one of drop, pad, uneven, not 'most'"),
        ({"buffer": -1}, "0 or more samples, not -1"),
        ({"sizes": [3, -1]}, "a shard has 0 or more samples, not -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not in a world of 2"),
        ({"rank": None}, "give both rank and world_size"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        iterable(**arguments)


def test_other_lengths_and_persistent_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 lengths for 2 shards"):
        ElasticIterable(["a", "b"], Read([]), lengths=[1])
    with pytest.raises(ValueError, match="persistent workers"):
        iterable().loader(4, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize(
    "other", [{"told": False}, {"sizes": SIZES[:-1]}, {"shuffle": False}, {"buffer": 3}]
)
def test_a_state_of_other_data_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"the state's (shards|samples|shuffle|buffer) is"):
        iterable().load_state_dict(iterable(**other).state_dict())


def listed(shards: list[Any], lengths: list[int] | None = None) -> ElasticIterable:
    return ElasticIterable(shards, Read([]), lengths=lengths, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("shards", "lengths"),
    [
        (["/a/2.tar", "/a/1.tar"], [4, 4]),  # as glob.glob() may give them
        (["/a/1.tar", "/a/2.tar"], [1, 7]),
        (["/a/1.tar", "/a/3.tar"], [4, 4]),
    ],
)
def test_shards_of_another_order_names_or_lengths_are_refused(
    shards: list[Any], lengths: list[int]
) -> None:
    state = listed(["/a/1.tar", "/a/2.tar"], [4, 4]).state_dict()
    with pytest.raises(UsageError, match=r"the state's order is .*sort what glob.glob\(\) gives"):
        listed(shards, lengths).load_state_dict(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["/mnt/a/1.tar", "/mnt/a/2.tar"], [Path("/data/1.tar"), Path("/data/2.tar")]),
        (["s3://b/1.tar?Signature=x"], ["s3://b/1.tar?Signature=y/z"]),  # presigned
        (["a/1/"], ["b/1"]),
        ([0, 1], list(torch.arange(2).numpy())),
        ([("/mnt/a", object())], [("/data/a", object())]),  # nothing is known of others
    ],
)
def test_shards_are_known_by_their_base_names(one: list[Any], other: list[Any]) -> None:
    """Nodes may have other mount points, and starts other signatures."""
    listed(other).load_state_dict(listed(one).state_dict())


def test_a_state_from_before_orders_were_kept_is_taken() -> None:
    state = listed(["1.tar"]).state_dict()
    del state["order"]
    listed(["1.tar"]).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 7])
def test_a_stateful_loader_goes_on(workers: int, batches: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh() -> tuple[ElasticIterable, Any]:
        data = iterable(rank=1, world_size=2)
        return data, data.loader(4, num_workers=workers, kind=stateful)

    data, loader = fresh()
    whole = [batch.tolist() for batch in take(data, loader, None)]
    data, loader = fresh()
    first = [batch.tolist() for batch in take(data, loader, batches)]
    state = loader.loader.state_dict()
    data, loader = fresh()
    loader.loader.load_state_dict(state)
    assert first + [batch.tolist() for batch in take(data, loader, None)] == whole


def worker_seen(_shard: int, start: int) -> Iterator[bool]:
    return (get_worker_info() is None for _ in range(start, 10))


@pytest.mark.parametrize("buffer", [0, 4])
def test_nobody_else_splits_what_is_one_workers(buffer: int) -> None:
    """webdataset and datasets split by get_worker_info(): the second worker would get nothing."""
    data = ElasticIterable([0], worker_seen, lengths=[10], buffer=buffer, rank=0, world_size=1)
    seen = [batch.tolist() for batch in data.loader(5, num_workers=2, collate_fn=with_worker)]
    assert seen == [[True] * 6] * 2


def with_worker(samples: list[bool]) -> Any:
    return default_collate([*samples, get_worker_info() is not None])


def test_lengths_may_be_a_tensor_and_the_state_is_plain() -> None:
    data = ElasticIterable(
        (shard for shard in "ab"), Read([]), lengths=torch.tensor([3, 4]), rank=0, world_size=1
    )
    assert {type(bound) for part in data.state_dict()["remaining"] for bound in part} == {int}


def test_ranks_end_together_only_where_there_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    data = iterable([4, 4], told=False, rank=None, world_size=None, shuffle=False)
    assert data.world_size == 2
    assert len(list(data.loader(1))) == 4


def test_ranks_take_part_in_each_step_unless_one_may_have_fewer() -> None:
    shares = {
        (tail, world): iterable(tail=tail, rank=0, world_size=world)._shares_step()
        for tail in ("pad", "uneven")
        for world in (1, 2)
    }
    assert shares.pop(("uneven", 2)) is False
    assert all(shares.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_p2_the_length_of_a_loader_stays_while_it_runs(workers: int) -> None:
    data = iterable()
    loader = data.loader(4, num_workers=workers)
    total = len(loader)
    for _ in islice(loader, 3):
        data.record()
        assert len(loader) == total
    assert loader.remaining() < total
    lengths = []
    for _ in loader:
        data.record()
        lengths.append(len(loader))
    assert set(lengths) == {len(lengths)}
