"""States of several ranks: they agree on the newest snapshot, and only who lacks it gets it."""

import os
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train import collectives
from elastic_etcd.train.collectives import World
from elastic_etcd.train.state import sync
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_format import Version
from tests.support.forked import Child, commit_alone, group, ranks
from tests.support.states import before_each, commits, kill_in, logged, newest, received


@given(st.integers(1, 40), st.data())
def test_each_who_lacks_it_gets_it_once_from_one_who_has_it(size: int, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    pairs = list(sync.transfers(holders, range(size)))
    having = dict.fromkeys(holders, 0)  # and after which round
    busy = dict.fromkeys(range(size), 0)
    for sender, receiver in pairs:
        assert sender in having
        assert receiver not in having
        wave = max(busy[sender], having[sender]) + 1
        busy[sender] = having[receiver] = wave
    assert set(having) == set(range(size))
    assert max(having.values()) <= ceil(log2(size / len(holders)))


class Sampler:
    """What a state takes for a sampler: it has a state_dict and can be sharded anew."""

    def __init__(self) -> None:
        self.consumed = 0
        self.rank_and_size = (0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.consumed = saved["consumed"]

    def reshard(self, rank: int, world_size: int) -> None:
        self.rank_and_size = (rank, world_size)


def made(rank: int) -> ElasticState:
    torch.manual_seed(rank)
    bare = nn.Linear(300, 4)
    wrapped = nn.parallel.DistributedDataParallel(bare)
    nn.init.constant_(bare.weight, rank)
    model = wrapped if rank == 1 else bare  # as a script may, that wraps it after the first sync
    optimizer = torch.optim.Adam(model.parameters())
    bare(torch.ones(300)).sum().backward()
    if rank != 2:
        optimizer.step()
    return ElasticState(model=model, optimizer=optimizer, sampler=Sampler(), epoch=rank)


def held(state: ElasticState) -> tuple[Any, ...]:
    """All that a rank has: values and snapshot."""
    model = getattr(state.model, "module", state.model)
    weights = [t.tolist() for t in model.state_dict().values()]
    moments = [t.tolist() for row in state.optimizer.state.values() for t in row.values()]
    return weights, moments, state.epoch, state.sampler.consumed, newest(state).header


def several_syncs(rank: int) -> list[Any]:
    sync.BUCKET = 1000
    state = made(rank)
    sizes = received()
    stages: list[Any] = []

    def synced() -> None:
        sizes.clear()
        state.sync()
        stages.append((held(state), state.sampler.rank_and_size, sum(sizes) > 0))

    synced()  # nobody has a snapshot
    if rank != 0:  # two have a newer one
        state.epoch, state.sampler.consumed = 10, 64
        commit_alone(state)
    synced()
    state.epoch = 20 + rank
    synced()  # all have the newest
    return stages


def test_ranks_start_from_rank_0_and_go_on_from_the_newest(tmp_path: Path) -> None:
    first, second, third = zip(*ranks(3, tmp_path, several_syncs), strict=True)
    for stage, epoch, receive in (
        (first, 0, [False, True, True]),
        (second, 10, [True, False, False]),
        (third, 10, [False, False, False]),
    ):
        assert all(what == stage[0][0] for what, _, _ in stage)
        assert stage[0][0][2] == epoch
        assert [world for _, world, _ in stage] == [(0, 3), (1, 3), (2, 3)]
        assert [received for _, _, received in stage] == receive
    assert second[0][0][3] == 64
    assert first[0][0][1]  # a newcomer's optimizer has rank 0's moments


def of_most(rank: int, _: Path) -> Any:
    """Rank 0 alone has another value at the same commit."""
    state = ElasticState(weight=torch.zeros(2), epoch=0)
    state.sync()
    state.weight = torch.full((2,), 7.0 if rank else 3.0)
    state.commit()
    state.sync()
    return state.weight.tolist()


def of_two_lineages(rank: int) -> Any:
    """Both have committed once, without having met."""
    state = ElasticState(epoch=rank + 5)
    state.commit()
    state.sync()
    again = state._snapshots.version()
    state.sync()
    assert state._snapshots.version() == again
    return state.epoch, again


def test_of_two_that_are_as_new_the_lower_rank_s_counts(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, of_two_lineages)
    assert one == other
    assert one[0] == 5


def after_others(rank: int) -> Any:
    """Rank 1 comes back with more commits, of a generation that the job has left."""
    os.environ["ELASTIC_ETCD_GENERATION"] = "7"
    state = ElasticState(epoch=0)
    for _ in range(5 if rank else 3):
        state.epoch += 1
        commit_alone(state)
    os.environ["ELASTIC_ETCD_GENERATION"] = "8"
    if rank == 0:
        state.epoch = 100
        commit_alone(state)
    assert not state.sync()  # rank 0's commit is of this world
    state.commit()
    os.environ["ELASTIC_ETCD_GENERATION"] = "9"
    assert state.sync()
    return state.epoch, state._snapshots.version()


def test_the_later_generation_s_commit_is_the_newer(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, after_others)
    assert one == other
    assert one[0] == 100
    assert one[1].counter == 5


def with_unlike_values(rank: int, width: int) -> Any:
    """As DDP trains: each rank has statistics of its own batches; and a weight that has rotted."""
    told = logged()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    state = ElasticState(model=model, best=0.0, large=torch.zeros(100_000))
    state.sync()
    model[1].running_mean.fill_(rank)
    state.commit()
    sizes = received()
    state.sync()
    stages = [(held_by(state), told())]
    if rank == 2:
        with torch.no_grad():
            model[0].weight[0, 0] += 1
        state.best = 0.5
    state.commit()
    state._at_commit = True  # as check() leaves it at a planned change
    state.sync()
    stages.append((held_by(state), told()))
    return stages, sizes


def held_by(state: ElasticState) -> Any:
    values = {name: t.tolist() for name, t in state.model.state_dict().items()}
    return newest(state).header, values, state.best


@pytest.mark.parametrize("width", [3, 200])  # a snapshot within one block, and of several
def test_t7_after_a_sync_all_ranks_have_the_same(width: int, tmp_path: Path) -> None:
    found = ranks(3, tmp_path, with_unlike_values, width)
    for stage in (0, 1):
        values = [stages[stage][0] for stages, _ in found]
        assert values[0] == values[1] == values[2]
    assert found[0][0][1][0][1]["1.running_mean"] == [0.0] * width
    assert all(sizes == [] for _, sizes in found)  # only what differed has travelled
    first, second = ([stages[stage][1] for stages, _ in found] for stage in (0, 1))
    mean = "had committed another model.1.running_mean than rank 0, whose counts"
    assert first == [[], [f"INFO: rank 1 {mean}"], [f"INFO: rank 2 {mean}"]]
    rotten = "had committed another best, model.0.weight than rank 0, whose counts"
    assert second == [[], [], [f"WARNING: rank 2 {rotten}"]]


def with_unlike_values_and_a_newcomer(rank: int, _: Path) -> list[float]:
    state = ElasticState(data=torch.zeros(100_000))
    state.sync()
    if rank == 2:
        state = ElasticState(data=torch.ones(100_000))  # that has no snapshot
    else:
        state.data[-1] += rank + 5
        commit_alone(state)
    state.sync()
    return list(state.data[[0, -1]].tolist())


def in_these_worlds(folder: Path, *worlds: World) -> list[World]:
    """A process's way through them; it commits in the first one of all."""
    state, olds = ElasticState(data=torch.zeros(3)), []
    state.on_reset(lambda old, new: olds.append((old, new)))
    for world in worlds:
        os.environ["ELASTIC_ETCD_GENERATION"] = str(world.generation)
        with group(world.rank, world.world_size, folder / str(world.generation)):
            if state.sync():
                state._reset(world)
            assert state._loops.ranks_before == (3 if world.generation > 1 else 0)
            if world.generation == 1:
                state.commit()
    assert all(new.generation > 1 for _, new in olds)
    return [old for old, _ in olds]


def test_t2_the_old_world_is_that_of_the_commit_for_all(tmp_path: Path) -> None:
    """Two losses after one commit, and a newcomer: a callback does the same on all ranks."""
    for generation in (1, 2, 3):
        (tmp_path / str(generation)).mkdir()
    ways = [
        (World(1, 0, 3), World(2, 0, 2), World(3, 1, 3)),
        (World(1, 1, 3), World(2, 1, 2), World(3, 0, 3)),
        (World(1, 2, 3),),
        (World(3, 2, 3),),
    ]
    processes = [Child(in_these_worlds, tmp_path, *way) for way in ways]
    assert [process.result() for process in processes] == [
        [World(1, 0, 3)] * 2,
        [World(1, 1, 3)] * 2,
        [],
        [World(1, -1, 3)],
    ]


def with_another_default_device(rank: int, _: Path) -> list[float]:
    torch.set_default_device("meta")  # as with "cuda", nothing of a state's own is to be made there
    with torch.device("cpu"):
        state = ElasticState(data=torch.zeros(100_000))
    state.sync()
    state.data[-1] += rank
    state.commit()
    state.sync()
    return list(state.data[[0, -1]].tolist())


def while_rank_0_dies(rank: int, folder: Path) -> Any:
    """The lowest holder is killed before it has told what differs."""
    state = ElasticState(data=torch.zeros(100_000))
    try:
        with group(rank, 2, folder):
            state.sync()
            state.data += rank
            state.commit()
            if rank == 0:
                kill_in(dist, "broadcast", kind=torch.uint8)
            state.sync()
    except RuntimeError:
        state._rewind()
        return float(state.data.sum()), state._snapshots.version()
    return None


def test_t7_a_rank_that_dies_meanwhile_leaves_the_others_with_what_they_had(
    tmp_path: Path,
) -> None:
    children = [Child(while_rank_0_dies, rank, tmp_path) for rank in range(2)]
    dead, (total, version) = [child.result() for child in children]
    assert dead is None
    assert total == 100_000
    assert version.counter == 1


def with_files(rank: int, folder: Path, which: list[str], commits: int) -> Any:
    """Each rank loads one of two trainings' files, or none; rank 0 may have trained already."""
    os.environ["ELASTIC_ETCD_GENERATION"] = "4"
    told = logged()
    for number, name in enumerate(("one", "other")):
        writer = ElasticState(epoch=0)
        for writer.epoch in range(1, 4 + number):
            writer.commit()
        if rank == 0:
            writer.save(folder / name)
    dist.barrier()
    state = ElasticState(epoch=0)
    for _ in range(commits if rank == 0 else 0):
        state.epoch += 10
        commit_alone(state)
    if which[rank]:
        state.load(folder / which[rank])
    try:
        state.sync()
    except UsageError as error:
        return str(error), told()
    return state._position(), told()


def test_t9_a_file_that_counts_or_does_not_is_told(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_files, tmp_path, ["", "one"], 0)
    place = "commit 3 (epoch 3) of the file that rank 1 has loaded,"
    assert one == other == (place, [])


def test_t9_a_file_of_another_training_that_does_not_count_is_told(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_files, tmp_path, ["", "one"], 2)
    assert one[0] == other[0] == "commit 2 (epoch 20)"
    for _, told in (one, other):
        assert "WARNING: the file that rank 1 has loaded, at its commit 3, does not" in str(told)


def set_after_a_load(rank: int, folder: Path) -> Any:
    told = logged()
    state = ElasticState(epoch=7)
    state.commit()
    if rank == 0:
        state.save(folder / "file")
    dist.barrier()
    state = ElasticState(epoch=0)
    if rank:
        state.load(folder / "file")
        state.epoch = 1
    state.sync()
    return state.epoch, len(told())


def test_t9_files_of_two_trainings_are_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = ranks(2, tmp_path, with_files, tmp_path, ["one", "other"], 0)
    assert one[0] == other[0]
    assert "rank 0 has loaded, at its commit 3, and another that rank 1 has loaded" in one[0]


def dying(rank: int, folder: Path) -> Any:
    """Rank 0, which alone has the newest, is killed while it sends; the others go on."""
    sync.BUCKET = 1000
    (folder / "before").mkdir(exist_ok=True)
    (folder / "after").mkdir(exist_ok=True)
    state = ElasticState(data=torch.zeros(100_000), count=0)
    try:
        with group(rank, 3, folder / "before"):
            state.sync()
            if rank == 0:
                state.count = 1
                commit_alone(state)
                kill_in(dist, "send", 20)
            state.sync()
    except RuntimeError as error:
        broken = str(error)
    assert commits(state) == 0
    state._rewind()
    with group(rank - 1, 2, folder / "after"):
        state.sync()
        state.count += 5
        state.commit()
        state.sync()
    return state.count, state._snapshots.version(), broken


def test_a_sender_that_dies_leaves_all_others_with_what_they_had(tmp_path: Path) -> None:
    children = [Child(dying, rank, tmp_path) for rank in range(3)]
    dead, one, other = [child.result() for child in children]
    assert dead is None
    assert one[:2] == other[:2]
    assert one[0] == 5
    assert one[1].counter == 1


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def from_an_evil_peer(rank: int, folder: Path) -> Any:
    state = ElasticState(allow_pickle=rank == 0, value=Evil(folder) if rank == 0 else 3)
    try:
        state.sync()
    except MalformedState as error:
        return state.value, str(error)
    return None


def test_a_peer_s_pickle_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    _, (value, error) = ranks(2, tmp_path, from_an_evil_peer, folder)
    assert "allow_pickle" in error
    assert value == 3
    assert not folder.exists()


def spoil(tensor: torch.Tensor, _: int) -> None:
    if tensor.numel() > 1000:
        tensor[500] ^= 1


def from_a_faulty_peer(rank: int) -> Any:
    state = ElasticState(data=torch.full((1000,), float(rank)))
    if rank == 0:
        commit_alone(state)
        before_each(dist, "send", spoil)
    try:
        state.sync()
    except MalformedState as error:
        return str(error), state._snapshots.newest(), float(state.data.sum())
    return None


def test_what_does_not_arrive_as_it_was_sent_is_no_snapshot(tmp_path: Path) -> None:
    _, (error, newest, total) = ranks(2, tmp_path, from_a_faulty_peer)
    assert "rank 0 did not arrive" in error
    assert newest is None
    assert total == 1000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            [{"model": 1}, {"model": 1, "epoch": 2}],
            ["", "the snapshot is of model; this state is of model, epoch"],
        ),
        ([{"epoch": 0, "best": {"path": Path("x")}}] * 2, ["best['path'] is a "] * 2),
    ],
    ids=["other names", "t21: what can't be kept, on every rank alike"],
)
def test_states_that_can_not_be_are_refused(
    values: list[dict[str, Any]], words: list[str], tmp_path: Path
) -> None:
    for said, expected in zip(ranks(2, tmp_path, refusal, values), words, strict=True):
        assert said.startswith(expected)


def refusal(rank: int, values: list[dict[str, Any]]) -> str:
    try:
        ElasticState(**values[rank]).sync()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return str(error)
    return ""


def only_rank_0_saves(rank: int, folder: Path) -> bool:
    state = ElasticState(epoch=3)
    state.commit()
    state.save(folder / f"from{rank}")
    return (folder / f"from{rank}").exists()


def from_a_file(rank: int, folder: Path) -> Any:
    """Rank 1's node alone has the file; rank 0 begins anew."""
    writer = ElasticState(epoch=9)
    writer.commit()
    writer.save(folder / "file")
    dist.barrier()
    state = ElasticState(epoch=0)
    if rank == 1:
        state.load(folder / "file")
    state.sync()
    return state.epoch, newest(state).header.version.age()


AGREED: dict[str, tuple[Any, list[Any]]] = {  # a script, and what it comes to on each rank
    "t6: the values that most ranks have committed count": (of_most, [[7.0, 7.0]] * 3),
    "t7: a newcomer is no obstacle to ranks that differ": (
        with_unlike_values_and_a_newcomer,
        [[0.0, 5.0]] * 3,
    ),
    "t10: ranks with another default device": (with_another_default_device, [[0.0, 0.0]] * 2),
    "only rank 0 saves": (only_rank_0_saves, [True, False]),
    "a file that one rank loaded is what all go on from": (
        from_a_file,
        [(9, Version(0, 1, 0).age())] * 2,
    ),
    "what is set after a load is told once, by the first of those that have loaded the file": (
        set_after_a_load,
        [(7, 0), (7, 1), (7, 0)],
    ),
}


@pytest.mark.parametrize("name", AGREED)
def test_all_ranks_go_on_from_the_same(name: str, tmp_path: Path) -> None:
    script, found = AGREED[name]
    assert ranks(len(found), tmp_path, script, tmp_path) == found


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_a_group_that_takes_host_memory_is_given_it(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    assert collectives.device_of() == torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert collectives.device_of() == torch.device("cuda", 1)
