"""Durable checkpoints of sharded states: written in the background, read in a world of any size."""

import io
import logging
import os
import signal
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.collectives import gather
from elastic_etcd.train.sharded import checkpoint_directory
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.disks import disk_that_may_stand_still, small_disk, stand_still, turn_again
from tests.support.forked import ranks
from tests.support.sharded_worlds import builder, train, whole
from tests.support.states import logged

NIGHTLY = pytest.mark.nightly(part="sharded")


def trained(rank: int, seed: int, steps: int = 3) -> ElasticState:
    """A state after some steps and a commit."""
    os.environ |= {"GROUP_RANK": str(rank), "ELASTIC_ETCD_GENERATION": "1"}
    state = ElasticState(build=builder(seed), epoch=0, note="first")
    state.sync()
    for _ in range(steps):
        train(state, rank)
    state.note = "committed"
    state.commit()
    return state


def save(rank: int, seed: int, folder: Path) -> None:
    state = trained(rank, seed)
    kept = whole(state)
    state.save(folder / "saved", wait=False)
    train(state, rank)  # meanwhile
    state._finish()
    if rank == 0:
        torch.save(kept, folder / "kept.pt")


def load(rank: int, seed: int, folder: Path) -> tuple[bool, int, str]:
    os.environ |= {"GROUP_RANK": str(rank), "ELASTIC_ETCD_GENERATION": "7"}
    state = ElasticState(build=builder(seed), first=pytest.fail, epoch=0, note="")
    state.load(folder / "saved")
    from_before = state.sync()
    version = state._snapshots.version()
    assert from_before
    assert version
    assert (version.generation, version.counter) == (0, 1)
    kept = torch.load(folder / "kept.pt")
    found = whole(state)
    train(state, rank)
    state.commit()
    state.restore()
    return same(found, kept), state.epoch, state.note


class World:
    """What `build` is given, made by torch alone."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.device = torch.device("cpu")

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> Any:
        lengths = (2, self.world_size // 2) if shape else (self.world_size,)
        return init_device_mesh("cpu", lengths, mesh_dim_names=names)


def load_by_torch(rank: int, seed: int, folder: Path) -> bool:
    """In a script that knows nothing of this program."""
    del rank
    values = builder(seed)(World(dist.get_world_size()))
    model, optimizer = values["model"], values["optimizer"]
    weights, moments = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": moments}
    dcp.load(read, checkpoint_id=folder / "saved" / "commit-1")
    set_state_dict(
        *(model, optimizer), model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    found = {f"model.{name}": each for name, each in model.state_dict().items()}
    for number, each in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": moment for name, moment in each.items()}
    gathered = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in found.items()
    }
    return same(gathered, torch.load(folder / "kept.pt"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def place(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@pytest.mark.parametrize(
    ("seed", "before", "after"),
    [
        pytest.param(1, 2, 3, marks=NIGHTLY),
        pytest.param(2, 4, 2, marks=NIGHTLY),
        (3, 3, 1),
        (5, 4, 4),
    ],
)
def test_a_checkpoint_is_read_in_a_world_of_any_size_also_by_torch_alone(
    tmp_path: Path, seed: int, before: int, after: int
) -> None:
    ranks(before, place(tmp_path, "a"), save, seed, tmp_path)
    written = tmp_path / "saved" / "commit-1"
    assert names(tmp_path / "saved") == ["commit-1"]
    parts = {f"__{rank}_0.distcp" for rank in range(before)}
    beside = {".metadata", "digests.json", "state.safetensors"}
    assert {*names(written)} == parts | beside
    entries = len(dcp.FileSystemReader(written).read_metadata().storage_data)
    data = b"".join(path.read_bytes() for path in written.glob("*.distcp"))
    assert data.count(b"PK\5\6") == entries, "replicas are written once"
    assert ranks(after, place(tmp_path, "b"), load_by_torch, seed, tmp_path) == [True] * after
    assert (
        ranks(after, place(tmp_path, "c"), load, seed, tmp_path) == [(True, 4, "committed")] * after
    )


def commit(state: ElasticState, rank: int) -> None:
    train(state, rank)
    state.commit()


def last_of(state: ElasticState) -> Any:
    """The save that was begun last."""
    assert state._built
    (saves,) = state._built._saves.values()
    return saves._last


def keep(rank: int, folder: Path) -> None:
    """Saves one after another: how many stay, how often, and whose."""
    saved, state = folder / "saved", trained(rank, 1)
    for _ in range(3):
        state.save(saved, keep=2)
        state.save(saved, wait=False, every=3600)
        state.save(folder / "seldom", wait=False, every=3600)
        commit(state, rank)
    assert names(saved) == ["commit-2", "commit-3"]
    state.save(saved, every=3600)  # but the last one was a moment ago
    assert names(saved) == ["commit-2", "commit-3"]
    state.save(saved, keep=2)
    state.save(saved, keep=2)  # nothing has been committed since
    assert names(saved) == ["commit-3", "commit-4"]
    state._finish()
    assert names(folder / "seldom") == ["commit-1"]
    told, other = logged(logging.WARNING), trained(rank, 2)
    if rank == 0:
        (saved / "commit-9.1f.tmp").mkdir()
        (saved / "commit-9.tmp.mine").mkdir()
    gather([1])
    other.save(saved)
    if rank == 0:
        assert len(told()) == 2
        aside = [name.partition(".")[0] for name in names(saved)]
        assert aside == ["commit-1", "commit-3", "commit-4", "commit-9"]
        assert "commit-9.tmp.mine" in names(saved)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_as_many_stay_as_are_to_be_kept_and_those_of_another_training(tmp_path: Path) -> None:
    ranks(2, place(tmp_path, "world"), keep, tmp_path)


def damaged(rank: int, folder: Path) -> None:
    """The newest checkpoint whose files are whole is read."""
    saved, state = folder / "saved", trained(rank, 1)
    kept = {}
    for number in (1, 2, 3):
        kept[number] = whole(state)
        state.save(saved, keep=3)
        commit(state, rank)
    told = logged(logging.WARNING)
    for number, spoil in ((3, flip), (2, cut)):
        if rank == 0:
            spoil(saved / f"commit-{number}" / "__1_0.distcp")
        gather([1])
        read_again(state, saved, kept[number - 1])
        lines = told()
        assert len(lines) == (rank == 0) * (4 - number)
        assert all("is left out: rank" in line for line in lines)
    if rank == 0:
        (saved / "commit-1" / "state.safetensors").unlink()
    gather([1])
    with pytest.raises(MalformedState, match="could be read whole"):
        state.load(saved)
    with pytest.raises(FileNotFoundError):
        state.load(folder / "nowhere")


def read_again(state: ElasticState, saved: Path, kept: dict[str, torch.Tensor]) -> None:
    state.load(saved)
    assert same(whole(state), kept)


def flip(file: Path) -> None:
    """A bit of a piece's bytes."""
    place = next(
        place
        for index, place in dcp.FileSystemReader(file.parent).read_metadata().storage_data.items()
        if place.relative_path == file.name and index.fqn == "model.first.weight"
    )
    data = bytearray(file.read_bytes())
    start, end = place.offset, place.offset + place.length
    with zipfile.ZipFile(io.BytesIO(data[start:end])) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("data/0"))
        data[data.index(archive.read(name), start)] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def test_the_one_before_counts_where_the_newest_is_damaged(tmp_path: Path) -> None:
    ranks(2, place(tmp_path, "world"), damaged, tmp_path)


def fill(rank: int, disk: Path) -> None:
    """A disk that is full for one rank is said once; the training goes on."""
    state, told = trained(rank, 1), logged(logging.WARNING)
    state.save(disk)
    filler = disk / "filler"
    if rank == 0:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
    gather([1])
    for _ in range(3):
        commit(state, rank)
        state.save(disk, wait=False)
        error = last_of(state).whole.exception()
        gather([1])
        assert isinstance(error, OSError)
    (line,) = told()
    assert "was not saved, and training goes on: [Errno 28] No space left" in line
    commit(state, rank)
    with pytest.raises(OSError, match="No space left"):
        state.save(disk)
    state.save(disk, wait=False, every=3600)
    if rank == 0:
        filler.unlink()
    gather([1])
    state.save(disk)
    gather([1])
    assert names(disk) == ["commit-5"]


def test_a_full_disk_costs_no_step_and_is_said_once(tmp_path: Path) -> None:
    disk = place(tmp_path, "disk")
    with small_disk(disk):
        ranks(2, place(tmp_path, "world"), fill, disk)


def wait_for_disk(rank: int, disk: Path) -> None:
    """A disk that stands still holds up no step, and saves go on when it does."""
    state, told = trained(rank, 1), logged(logging.WARNING)
    state.save(disk)
    gather([1])
    if rank == 0:
        stand_still(disk)
    gather([1])
    for _ in range(4):
        commit(state, rank)
        state.save(disk, wait=False)
    assert last_of(state).version.counter == 2
    assert not last_of(state).part.done()
    lines = told()
    assert len(lines) == (rank == 0)
    assert all("commit-3 is not saved" in line for line in lines)
    gather([1])
    if rank == 0:
        turn_again(disk)
    state._finish()
    gather([1])
    assert names(disk) == ["commit-2"]


def test_a_disk_that_stands_still_costs_no_step(tmp_path: Path) -> None:
    disk = place(tmp_path, "disk")
    with disk_that_may_stand_still(disk, tmp_path / "image"):
        ranks(2, place(tmp_path, "world"), wait_for_disk, disk / "saved")


def killed(rank: int, folder: Path) -> None:
    """Both processes end when the second checkpoint has all its parts, but is no whole yet."""
    state = trained(rank, 1)
    kept = whole(state)
    state.save(folder / "saved")
    if rank == 0:
        torch.save(kept, folder / "kept.pt")
    commit(state, rank)
    checkpoint_directory.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    state.save(folder / "saved", wait=False)
    last_of(state).part.result()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_job_that_is_killed_in_a_save_goes_on_from_the_one_before(tmp_path: Path) -> None:
    assert ranks(2, place(tmp_path, "a"), killed, tmp_path) == [None, None]
    left, whole = sorted(names(tmp_path / "saved"), key=len, reverse=True)
    assert whole == "commit-1"
    assert left.startswith("commit-2.")
    assert len(list((tmp_path / "saved" / left).glob("*.record"))) == 2
    assert ranks(3, place(tmp_path, "b"), load, 1, tmp_path) == [(True, 4, "committed")] * 3
    ranks(1, place(tmp_path, "c"), save, 1, tmp_path)  # another training
    one, other = names(tmp_path / "saved")
    assert one == "commit-1"
    assert not other.endswith(".tmp")


def lose(rank: int, folder: Path) -> tuple[int, list[str]]:
    """Pieces that no rank has any more are read from the newest checkpoint."""
    state = trained(rank, 1)
    kept, told = whole(state), logged(logging.WARNING)
    state.save(folder / "saved")
    commit(state, rank)
    state._end_world()
    state.load(folder / "saved")
    assert state._built
    state._built.drop()
    assert state.sync()
    assert same(whole(state), kept)
    return state.epoch, told()


def test_a_job_that_has_lost_its_pieces_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (epoch, told), (other, none) = ranks(2, place(tmp_path, "a"), lose, tmp_path)
    assert (epoch, other, none) == (3, 3, [])
    (line,) = told
    assert "all go on from " in line
    assert "more of them at once than there were other copies" in line


def unwritable(rank: int, folder: Path) -> None:
    """The end of a world that waits for a save raises on all ranks."""
    state = trained(rank, 1)
    (folder / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        state.save(folder / "file")


def test_an_error_is_raised_on_all_ranks_where_they_wait(tmp_path: Path) -> None:
    ranks(2, place(tmp_path, "a"), unwritable, tmp_path)
