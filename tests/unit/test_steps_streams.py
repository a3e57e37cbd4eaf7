"""state.steps over streamed samples, and over batches of one's own."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
from torch.utils.data import DataLoader
from tqdm import tqdm

from elastic_etcd import ElasticBatchSampler, ElasticIterable, ElasticState, steps_per_epoch
from elastic_etcd.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SIZES = [7, 31, 12, 25]


def read(shard: int, start: int) -> Iterator[int]:
    return iter(range(shard * 100 + start, shard * 100 + SIZES[shard]))


def streamed(**arguments: Any) -> ElasticIterable:
    common: dict[str, Any] = {"lengths": SIZES, "rank": 0, "world_size": 1}
    return ElasticIterable(range(len(SIZES)), read, **(common | arguments))


def everything() -> list[int]:
    return [shard * 100 + n for shard, size in enumerate(SIZES) for n in range(size)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_counts_what_it_was_given(workers: int) -> None:
    data = streamed()
    state = ElasticState(data=data)
    steps = state.steps(data.loader(4, num_workers=workers), commit_every=3)
    total = len(steps)
    used: list[int] = []
    batches = [batch.tolist() for batch in islice(steps, 8)]  # six are committed
    used += chain(*batches[:6])
    state.restore()
    for number, batch in enumerate(steps):
        used += batch.tolist()
        if number == 4:
            state.commit()  # in the body: with the batch in hand
            break
    state.restore()
    if not workers:  # what remains is split anew among them, each of which has a short batch
        assert len(steps) == total - 11
    for batch in steps:
        used += batch.tolist()
    assert sorted(used) == everything()
    assert data.state_dict()["remaining"] == []
    data.set_epoch(1)
    assert sorted(chain(*(batch.tolist() for batch in steps))) == everything()


def test_recording_by_hand_in_the_loop_is_refused() -> None:
    data = streamed()
    next(iter(ElasticState(data=data).steps(data.loader(4))))
    with pytest.raises(UsageError, match="leave record"):
        data.record()


def test_a_loader_of_other_data_is_refused() -> None:
    with pytest.raises(UsageError, match="the loader's ElasticIterable is not the state's"):
        ElasticState(data=streamed()).steps(streamed().loader(4))
    with pytest.raises(UsageError, match=r"take its loader\(\)"):
        ElasticState(data=streamed()).steps(DataLoader(streamed()))


def test_nothing_is_committed_where_ranks_may_differ_by_a_step() -> None:
    data = streamed(world_size=2, tail="uneven")
    state = ElasticState(data=data)
    assert len(list(state.steps(data.loader(4), commit_every=1))) > 0
    with pytest.raises(UsageError, match="nothing to restore"):
        state.restore()


def bucketed(epoch: int, _seed: int) -> list[list[int]]:
    return [[epoch, 1], [2, 3, 4], [5], [6, 7], [8, 9, 10, 11]]


def test_batches_of_ones_own_are_counted_as_batches() -> None:
    sampler = ElasticBatchSampler(bucketed, rank=0, world_size=1)
    loader = DataLoader(list(range(12)), batch_sampler=sampler)
    state = ElasticState(sampler=sampler)
    steps = state.steps(loader, commit_every=2)
    first = [batch.tolist() for batch in islice(steps, 3)]  # two are committed
    state.restore()
    assert sampler.consumed == 2
    assert first[:2] + [batch.tolist() for batch in steps] == bucketed(0, 0)


def test_a_stream_s_loader_is_given_as_it_is() -> None:
    state = ElasticState(data=streamed())
    for wrong in (lambda: state.steps(tqdm(state.data.loader(4))),
                  lambda: steps_per_epoch(state.data.loader(4))):  # fmt: skip
        with pytest.raises(UsageError, match="a stream's loader"):
            wrong()
    assert len(tqdm(state.steps(state.data.loader(4)), disable=True)) == len(state.data.loader(4))


EMPTY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"lengths": None, "rank": 4, "world_size": 5},
        {"batch_size": 4},
        "4 files of unknown length for 5 ranks with 1 worker",
    ),
    (
        {"lengths": None},
        {"batch_size": 50, "num_workers": 2, "drop_last": True},
        "4 files of unknown length for 1 rank with 2 workers each and batches of 50",
    ),
    (
        {"tail": "uneven"},
        {"batch_size": 40, "num_workers": 2, "drop_last": True},
        "75 samples for 1 rank with 2 workers each and batches of 40",
    ),
]


@pytest.mark.parametrize(("arguments", "loader", "words"), EMPTY)
def test_an_epoch_in_which_nothing_would_be_trained_is_refused(
    arguments: dict[str, Any], loader: dict[str, Any], words: str
) -> None:
    data = streamed(**arguments)
    with pytest.raises(UsageError, match=f"no batch in an epoch of {words}"):
        list(ElasticState(data=data).steps(data.loader(**loader)))


@pytest.mark.parametrize("lengths", [SIZES, None])
def test_the_end_of_an_epoch_may_have_no_batch(lengths: list[int] | None) -> None:
    """Where it goes on in another world, or where all but its last samples were trained on."""
    data = streamed(lengths=lengths)
    state = ElasticState(data=data)
    list(islice(state.steps(data.loader(4)), 18))
    state.commit()
    data.reshard(4, 5)
    assert list(state.steps(data.loader(4))) == []
    empty = ElasticIterable([], read, lengths=lengths and [], rank=0, world_size=1)
    assert list(ElasticState(data=empty).steps(empty.loader(4))) == []


def test_one_rank_may_have_nothing_of_an_uneven_epoch() -> None:
    data = streamed(lengths=None, rank=4, world_size=5, tail="uneven")
    assert list(ElasticState(data=data).steps(data.loader(4))) == []


def test_breaking_off_counts_the_last_batch() -> None:
    data = streamed()
    steps = ElasticState(data=data).steps(data.loader(4))
    used = []
    for batch in steps:
        used += batch.tolist()
        if len(used) >= 20:
            break
    used += [sample for batch in steps for sample in batch.tolist()]
    assert sorted(used) == everything()
