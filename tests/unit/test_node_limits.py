"""What `elastic-etcd check` says of what a node lets its workers use, and of its link."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.agent import node_checks
from elastic_etcd.system.limits import Free
from tests.support.disks import small_disk
from tests.support.job import ROOT

LINK = """
from elastic_etcd.agent import node_checks
for given in ("lo", "t0"):
    found = node_checks.address(given, "127.0.0.1:1")
    print(*(f"{each.found}: {each.cure}" for each in found), sep="; ")
"""


def faults(nproc: int) -> list[str]:
    return [f"{each.found}: {each.cure}" for each in node_checks.limits(nproc) if each.cure]


def test_a_node_with_enough_of_all_has_no_fault() -> None:
    assert faults(1) == []
    assert [each.name for each in node_checks.limits(1)] == [
        "memory",
        "shm",
        "processes",
        "descriptors",
    ]


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "free_memory", lambda: Free(600 << 20, "the machine's memory"))
    assert faults(2) == []
    found = "600.00 MiB of the machine's memory are free, 768.00 MiB are asked for, for 3 workers"
    assert faults(3) == [f"{found}: allow more"]


def test_too_few_processes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "free_processes", lambda: 40)
    assert faults(1) == []
    assert faults(2) == ["40 more are allowed, 64 are asked for, for 2 workers: see TasksMax="]


def test_too_few_descriptors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    assert faults(1) == []
    assert faults(4) == ["300 are allowed, 384 are asked for, for 4 workers: see ulimit -n"]


def test_too_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_checks, "_SHARED_MEMORY", tmp_path)
    with small_disk(tmp_path):
        found = f"0.25 MiB are free in {tmp_path}, 16.00 MiB are asked for, for 1 worker"
        assert faults(1) == [f"{found}: make it larger (--shm-size)"]
    monkeypatch.setattr(node_checks, "_SHARED_MEMORY", tmp_path / "none")
    assert faults(1) == []


def test_an_interface_without_a_link_is_told() -> None:
    """In a network namespace whose tunnel has nobody at its end."""
    made = "ip link set lo up && ip tuntap add t0 mode tun && ip address add 10.1.2.3/24 dev t0"
    command = f'{made} && ip link set t0 up && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command, sys.executable, LINK],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no network namespace with a tunnel here: {done.stderr}")
    cure = "look at its cable, or give another --advertise"
    assert done.stdout.splitlines() == [
        "other nodes reach this one at 127.0.0.1: ; lo, which has 127.0.0.1, has a link: ",
        f"other nodes reach this one at 10.1.2.3: ; t0, which has 10.1.2.3, has no link: {cure}",
    ]
