"""What a node lets its workers use, and its link, before it joins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.agent import preflight
from elastic_etcd.system.limits import Free
from tests.support.disks import small_disk
from tests.support.job import ROOT

LINK = """
from elastic_etcd.agent import preflight
from elastic_etcd.agent.address import find_address
for given in ("lo", "t0"):
    print(*preflight._link(find_address(given, "127.0.0.1:1", several=True)), sep="; ")
"""


def test_a_node_with_enough_of_all_has_no_fault() -> None:
    assert list(preflight._limits(1)) == []


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: Free(600 << 20, "the machine's memory"))
    assert list(preflight._limits(2)) == []
    assert list(preflight._limits(3)) == [
        (
            "600.00 MiB of the machine's memory are free, 768.00 MiB are asked for, for 3 workers: "
            "allow more"
        )
    ]


def test_too_few_processes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_processes", lambda: 40)
    assert list(preflight._limits(1)) == []
    assert list(preflight._limits(2)) == [
        ("40 more processes are allowed, 64 are asked for, for 2 workers: see TasksMax=")
    ]


def test_too_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", tmp_path)
    with small_disk(tmp_path):
        assert list(preflight._limits(1)) == [
            (
                f"0.25 MiB are free in {tmp_path}, 16.00 MiB are asked for, for 1 worker: make "
                "it larger (--shm-size)"
            )
        ]
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", tmp_path / "none")
    assert list(preflight._limits(1)) == []


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
    found = "t0, which has 10.1.2.3, has no link: look at its cable, or give another --advertise"
    assert done.stdout.splitlines() == ["", found]
