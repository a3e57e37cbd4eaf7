"""What memory is free, and a commit that would need more."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_etcd.core.words import shown
from elastic_etcd.errors import UsageError
from elastic_etcd.system.limits import (
    UNKNOWN,
    Free,
    free_memory,
    free_processes,
)
from elastic_etcd.train.state import snapshot_store as room
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.disks import memory_limit
from tests.support.forked import Child

MIB = 1 << 20


def machine(folder: Path, cgroup: str) -> Path:
    """A /proc of a machine with 100 MiB available, whose process is in this cgroup."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:  {100 * 1024} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    return proc


def limit(folder: Path, version: int, most: str, used: int, files: int = 0) -> None:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    kinds = ("active_file", "inactive_file", "slab_reclaimable", "unevictable")
    lines = [f"{prefix}{kind} {files}\n" for kind in kinds]
    (folder / "memory.stat").write_text("".join(lines))


def test_g5_free_is_what_the_machine_has_where_there_is_no_limit(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/job\n")
    limit(tmp_path / "cgroups/job", 2, "max", 10)
    assert free_memory(proc, tmp_path / "cgroups") == Free(100 * MIB, "the machine's memory")


@pytest.mark.parametrize(
    ("version", "cgroup", "root"),
    [(2, "0::/pod/job\n", ""), (1, "3:cpu:/x\n4:memory,hugetlb:/pod/job\n", "memory,hugetlb")],
)
def test_g5_free_is_what_the_tightest_cgroup_allows(
    version: int, cgroup: str, root: str, tmp_path: Path
) -> None:
    cgroups = tmp_path / "cgroups"
    limit(cgroups / root / "pod/job", version, str(90 * MIB), 10 * MIB)
    limit(cgroups / root / "pod", version, str(80 * MIB), 60 * MIB, files=5 * MIB)
    limit(cgroups / root, version, str(1 << 62), 0)
    free = free_memory(machine(tmp_path, cgroup), cgroups)
    assert free.size == 35 * MIB  # of 80, 60 are used, of which 15 can be had back
    assert "the 80 MiB that " in free.of
    assert f"{root}/pod/memory." in free.of


def test_g5_what_can_not_be_read_is_no_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) == UNKNOWN
    proc = machine(tmp_path, "no cgroup\n0::/job\n")
    limit(tmp_path / "job", 2, str(MIB), 10)
    (tmp_path / "job/memory.stat").write_text("file\n")
    assert free_memory(proc, tmp_path).size == 100 * MIB
    (proc / "self/cgroup").unlink()
    assert free_memory(proc, tmp_path).size == 100 * MIB


def test_g5_what_can_be_swapped_out_makes_room(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/job\n")
    with (proc / "meminfo").open("a") as file:
        file.write(f"SwapFree: {7 * 1024} kB\n")
    assert free_memory(proc, tmp_path).size == 107 * MIB
    limit(tmp_path / "job", 2, str(30 * MIB), 10 * MIB)
    assert free_memory(proc, tmp_path).size == 27 * MIB
    (tmp_path / "job/memory.swap.max").write_text(f"{5 * MIB}\n")
    (tmp_path / "job/memory.swap.current").write_text(f"{MIB}\n")
    assert free_memory(proc, tmp_path).size == 24 * MIB


def test_g5_only_a_snapshot_that_needs_more_memory_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ElasticState(weights=torch.zeros(MIB), epoch=1)
    state.commit()
    state.commit()
    monkeypatch.setattr(room, "free_memory", lambda: Free(0, "nothing"))
    state.epoch = 2
    state.commit()
    state.weights = torch.zeros(2 * MIB)
    with pytest.raises(UsageError, match=r"takes 8.00 MiB.*8.00 MiB more.*0.00 MiB of nothing"):
        state.commit()
    state.restore()
    assert (state.epoch, len(state.weights)) == (2, MIB)


def test_t16_a_save_without_room_for_a_copy_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = ElasticState(weights=torch.zeros(MIB), epoch=1)
    state.commit()
    monkeypatch.setattr(room, "free_memory", lambda: Free(MIB, "the machine's memory"))
    state.save(tmp_path / "one", wait=False)
    assert state._snapshots._saving is None
    assert (tmp_path / "one").stat().st_size > 4 * MIB
    assert "save(wait=False) waits, with no room for a copy: 4.00 MiB more" in caplog.text
    monkeypatch.setattr(room, "free_memory", lambda: UNKNOWN)
    state.save(tmp_path / "two", wait=False)
    saving: Any = state._snapshots._saving
    saving.result()


def test_g5_a_container_sees_its_own_cgroup_only(tmp_path: Path) -> None:
    limit(tmp_path / "cgroups/memory", 1, str(50 * MIB), 20 * MIB)
    proc = machine(tmp_path, "4:memory:/docker/of-the-host\n")
    assert free_memory(proc, tmp_path / "cgroups").size == 30 * MIB


def committed_within(cgroup: Path, megabytes: int) -> str:
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    state = ElasticState(weights=torch.zeros(megabytes * MIB // 4), epoch=1)
    try:
        for state.epoch in range(3):
            state.commit()
    except UsageError as error:
        return str(error)
    state.restore()
    return f"commit {state.epoch}"


def test_g5_a_commit_that_the_cgroup_has_no_memory_for_is_an_error_with_the_figures() -> None:
    with memory_limit(300 * MIB) as cgroup:
        assert Child(committed_within, cgroup, 20).result() == "commit 2"
        told = Child(committed_within, cgroup, 120).result()
    assert "a snapshot of this state takes 120.00 MiB, and there are two of them" in told
    assert "240.00 MiB more of host memory are needed" in told
    assert "of the 300 MiB that " in told


@pytest.mark.parametrize(
    ("size", "text"), [(3 << 19, "1.50 MiB"), (1 << 30, "1.00 GiB"), (3 << 29, "1.50 GiB")]
)
def test_a_size_in_words(size: int, text: str) -> None:
    assert shown(size) == text


def test_g5_free_processes_are_what_the_tightest_cgroup_allows(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/pod/job\n")
    assert free_processes(proc, tmp_path) == UNKNOWN.size
    for folder, most, used in (("pod/job", "max", "30"), ("pod", "100", "40")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "pids.max").write_text(f"{most}\n")
        (tmp_path / folder / "pids.current").write_text(f"{used}\n")
    assert free_processes(proc, tmp_path) == 60
