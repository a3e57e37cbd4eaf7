"""Checkpoints in memory, on one node: when they are complete, what is kept, and what is refused."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from elastic_etcd.agent import directories
from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.checkpoint.checkpoint_folder import (
    MANIFEST,
    Checkpoint,
    check_intact,
    found_in,
    read_manifest,
)
from elastic_etcd.train.checkpoint.latest_checkpoint import read_offer
from elastic_etcd.train.checkpoint.memory_checkpoint import memory_checkpoint
from tests.support.disks import small_disk


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an agent, for its only worker, in generation 3."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("ELASTIC_ETCD_MEMORY", str(folder))
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "3")
    monkeypatch.setenv("ELASTIC_ETCD_LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    return folder


@pytest.fixture
def small(memory: Path) -> Iterator[Path]:
    with small_disk(memory):
        yield memory


def write(
    step: int, text: str = "weights", error: Exception | None = None, **options: object
) -> bool:
    """As a script does, which may end with an error; whether one was due."""
    with memory_checkpoint(step, **options) as folder:  # type: ignore[arg-type]
        if folder:
            (folder / "model").mkdir()
            (folder / "model" / "state.pt").write_text(text)
            (folder / "empty").touch()
        if error:
            raise error
    return folder is not None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_complete_at_the_end(memory: Path) -> None:
    with memory_checkpoint(20, every=10) as folder:
        assert folder
        (folder / "state.pt").write_text("weights")
        assert found_in(memory) == {}
    assert found_in(memory) == {Checkpoint(20, 3): memory / "step-20-3"}
    assert names(memory / "step-20-3") == [MANIFEST, "state.pt"]
    check_intact(memory / "step-20-3", Checkpoint(20, 3))


@pytest.mark.parametrize(
    ("steps", "every", "due"),
    [
        (range(1, 32), 10, [10, 20, 30]),
        ([0, 0, 1, 1, 2], 1, [1, 2]),  # training begins with what is there
    ],
)
def test_between_them_nothing_is_due(
    memory: Path, steps: Sequence[int], every: int, due: list[int]
) -> None:
    assert [step for step in steps if write(step, every=every)] == due
    assert names(memory) == [f"step-{step}-3" for step in due[-2:]]


def test_an_exception_leaves_the_older_one(memory: Path) -> None:
    write(1)
    with pytest.raises(ZeroDivisionError):
        write(2, error=ZeroDivisionError())
    assert names(memory) == ["step-1-3"]


def test_what_a_killed_worker_left_is_no_part_of_the_next(memory: Path) -> None:
    (memory / ".0").mkdir()
    (memory / ".0" / "half").touch()
    write(1)
    assert names(memory) == ["step-1-3"]
    assert not (memory / "step-1-3" / "half").exists()


def test_the_newest_and_the_one_before_it_are_kept(memory: Path) -> None:
    for step in range(1, 6):
        with memory_checkpoint(step) as folder:
            assert folder
            assert names(memory) == [".0", *([f"step-{step - 1}-3"] if step > 1 else [])]
            (folder / "state.pt").touch()
    assert names(memory) == ["step-4-3", "step-5-3"]


def test_the_same_step_is_not_due_again(memory: Path) -> None:
    """As where a callback is called for each of the batches whose gradients are accumulated.

    A checkpoint is known by its step: another one of that name on some nodes would be taken for it.
    """
    assert write(1, "first")
    assert not write(1, "second")
    assert (memory / "step-1-3" / "model" / "state.pt").read_text() == "first"


def test_a_step_whose_block_raised_is_still_due(memory: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write(1, error=ZeroDivisionError())
    assert write(1)


def test_what_other_workers_write_is_dropped(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_LOCAL_RANK", "1")
    assert write(1)
    assert names(memory) == []


def test_a_node_that_writes_nothing_has_no_checkpoint(memory: Path) -> None:
    with memory_checkpoint(1) as folder:
        assert folder
        (folder / "empty").mkdir()
    assert names(memory) == []


def test_the_disk_sees_one_in_n(memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "new" / "disk"
    for step in range(1, 7):
        write(step, disk=disk, disk_every=3)
    assert names(disk) == ["step-3-3", "step-6-3"], "nothing is removed"
    for checkpoint, path in found_in(disk).items():
        check_intact(path, checkpoint)


def test_only_rank_0_writes_to_the_disk(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    write(1, disk=tmp_path / "disk")
    assert names(memory) == ["step-1-3"]
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_our_launcher_only_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.delenv("ELASTIC_ETCD_MEMORY", raising=False)
    monkeypatch.setenv("RANK", rank)
    disk = tmp_path / "disk"
    due = [step for step in range(1, 7) if write(step, disk=disk, disk_every=3)]
    assert due == [3, 6], "on every rank alike"
    assert [*found_in(disk)] == ([Checkpoint(6, 0), Checkpoint(3, 0)] if rank == "0" else [])


@pytest.mark.parametrize(
    ("directory", "options", "said"),
    [
        ("here", {"every": 0}, "a multiple of it"),
        ("here", {"every": 4, "disk_every": 10}, "a multiple of it"),
        ("here", {"disk_every": 0}, "a multiple of it"),
        (None, {"every": 10}, "give disk="),  # without our launcher
        ("", {}, "--memory-dir"),  # the agent could make none
    ],
)
def test_what_can_not_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, directory: str | None, options: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv("ELASTIC_ETCD_MEMORY", raising=False)
    if directory is not None:
        monkeypatch.setenv("ELASTIC_ETCD_MEMORY", directory)
    with pytest.raises(UsageError, match=said):
        write(1, **options)


def test_a_memory_that_is_too_small_is_an_error_with_the_figures(small: Path) -> None:
    with pytest.raises(UsageError, match=r"this checkpoint takes 0\.2\d MiB or more, 0\.00 MiB of"):
        write(1, "x" * 300_000)
    assert names(small) == []


def test_a_memory_that_is_too_small_for_two_is_told_at_the_first(small: Path) -> None:
    with pytest.raises(UsageError, match=r"the next checkpoint takes 0\.1\d MiB or more, 0\.0\d"):
        write(1, "x" * 200_000)
    assert names(small) == ["step-1-3"], "which is there all the same"
    with pytest.raises(UsageError, match="--shm-size"):
        write(2)


def test_a_memory_for_two_is_large_enough(small: Path) -> None:
    for step in range(1, 5):
        assert write(step, "x" * 100_000)
    assert names(small) == ["step-3-3", "step-4-3"]


def test_an_error_of_the_script_s_own_stays_what_it_is(small: Path) -> None:
    with pytest.raises(KeyError), memory_checkpoint(1):
        raise KeyError("x")


HOSTILE = [
    *("/etc/passwd", "../x", "a/../../x", "a/..", ".", "..", "./a", "a/./b", "a//b", "a/"),
    *("", "x" * 1025, "a\0b", MANIFEST),
]


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"step": -1},
        {"step": "1"},
        {"generation": 1 << 63},
        {"files": []},
        {"files": [{"name": "a", "size": -1, "crc": 0}]},
        {"files": [{"name": "a", "size": 1, "crc": 1 << 32}]},
        {"files": [{"name": "a"}]},
        {"files": None},
        *({"files": [{"name": name, "size": 1, "crc": 0}]} for name in HOSTILE),
    ],
)
def test_what_is_no_manifest_is_refused(change: dict[str, object]) -> None:
    files = [{"name": "a", "size": 1, "crc": 0}]
    whole = {"step": 1, "generation": 2, "files": files}
    assert read_manifest(json.encode(whole), Checkpoint(1, 2)).size == 1
    with pytest.raises(MalformedState):
        read_manifest(json.encode(whole | change), Checkpoint(1, 2))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"[]", b"{}", b"[" * 10_000),
        b'{"step": 1, "generation": 2, "files": [{"name": "\x80", "size": 1, "crc": 0}]}',
        b'{"addr": "\x80", "port": 1, "nonce": "%s", "held": []}' % (b"0" * 32),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedState):
        read_manifest(data, Checkpoint(1, 2))
    with pytest.raises(MalformedState):
        read_offer(data)


@pytest.mark.parametrize("damage", ["other", "longer", "shorter", "gone", "manifest"])
def test_what_is_damaged_is_found(memory: Path, damage: str) -> None:
    write(1)
    file = memory / "step-1-3" / "model" / "state.pt"
    match damage:
        case "other":
            file.write_text("Weights")
        case "longer":
            file.write_text("weights!")
        case "shorter":
            file.write_text("weight")
        case "gone":
            file.unlink()
        case "manifest":
            (memory / "step-1-3" / MANIFEST).write_text("{}")
    with pytest.raises((MalformedState, OSError)):
        check_intact(memory / "step-1-3", Checkpoint(1, 3))


def test_other_folders_are_none(memory: Path) -> None:
    for name in ("step-1-1", "step-01", "checkpoint-3", "step--1-2", "step-1-1.x"):
        (memory / name).mkdir()
    (memory / "step-7-7").touch()
    assert found_in(memory) == {}, "without a manifest"
    assert found_in(memory / "nowhere") == {}


def test_the_most_steps_are_the_newest() -> None:
    order = [Checkpoint(110, 9), Checkpoint(120, 3), Checkpoint(120, 4)]
    assert sorted(order, reverse=True) == order[::-1]


def test_m9_a_memory_that_somebody_has_removed_is_made_anew(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As logind does at a logout (RemoveIPC), or a cleaner."""
    write(1)
    shutil.rmtree(memory)
    assert write(2)
    assert names(memory) == ["step-2-3"]
    assert memory.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("has been removed") == 1
    directories._remove_former(memory.parent, memory.name)
    assert names(memory) == ["step-2-3"], "it is no dead agent's"


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize("error", [None, RuntimeError("Parent directory does not exist.")])
def test_m9_a_memory_that_goes_in_the_block_costs_that_checkpoint(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str,
    error: Exception | None,
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_LOCAL_RANK", local_rank)
    with memory_checkpoint(1) as folder:
        assert folder
        shutil.rmtree(memory)
        if error:  # of torch's writer
            raise error
    assert write(2)
    assert found_in(memory).keys() == ({Checkpoint(2, 3)} if local_rank == "0" else set())
