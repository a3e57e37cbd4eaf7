"""One generation after the other in one process, and what is left of each."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_etcd.errors import UsageError
from elastic_etcd.train import abort, process_group, sync_point
from elastic_etcd.train.process_group import ProcessGroup


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_was_not_initialised_leaves_no_name_behind(store: TCPStore) -> None:
    """A group's name is in its keys: a survivor and a fresh process must have the same."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(store.port)}
    group = ProcessGroup(1, env | {"WORLD_SIZE": "2"})
    with pytest.raises(RuntimeError):  # its peer never comes
        group.init("gloo", {"timeout": timedelta(seconds=1)})
    group.teardown(broken=True)
    group.release()
    group = ProcessGroup(2, env | {"WORLD_SIZE": "1"})
    group.init("gloo", {})
    assert dist.group.WORLD.group_name == "0"
    group.teardown(broken=False)
    group.release()


def alone(store: TCPStore, generation: int = 1) -> ProcessGroup:
    """A group of one rank."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return ProcessGroup(generation, env | {"MASTER_PORT": str(store.port)})


def end(group: ProcessGroup, *, broken: bool) -> None:
    group.teardown(broken=broken)
    group.release()


@pytest.mark.parametrize(
    ("given", "handling", "dump"),
    [
        ({}, "0", "0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "0", "0"),  # the agent gives it to each worker
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "0", "1"),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, "2", "0"),
    ],
)
def test_g1_the_watchdog_of_nccl_neither_ends_a_worker_nor_holds_it_up(
    store: TCPStore,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    handling: str,
    dump: str,
) -> None:
    """It reads these when the group is made. A user who wants the dumps has them."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("TORCH_NCCL_")}
    monkeypatch.setattr(os, "environ", environ | given)
    group = alone(store)
    group.init("gloo", {})
    end(group, broken=False)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == handling
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == dump
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "1"
    assert os.environ["TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN"] == "0"


def test_g2_what_nccl_has_met_breaks_each_world(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog would have ended the process; and of later groups it tells nobody."""
    error = ""
    monkeypatch.setattr(abort, "uses_nccl", lambda: True)
    monkeypatch.setattr(abort, "nccl_error", lambda: error)
    monkeypatch.setattr(process_group, "NCCL_LOOK", 0.01)
    for generation in (1, 2):
        group = alone(store, generation)
        group.init("gloo", {})
        assert not sync_point.current().check()
        error = "TIMEOUT"
        with pytest.raises(sync_point.WorldBroken, match="NCCL has met an error: TIMEOUT"):
            train()
        assert group.own_reason == group.broken
        error = ""
        end(group, broken=True)


def train() -> None:
    while not sync_point.current().check():
        time.sleep(0.01)


def test_g3_a_rank_that_does_not_come_out_says_where_it_stands(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_group, "PARK_LATE", 0.05)
    group = alone(store)
    group.init("gloo", {})
    group.interrupt("n2 is lost")
    initialises_a_communicator(caplog)
    end(group, broken=True)
    (told,) = [r.getMessage() for r in caplog.records if "not out of" in r.getMessage()]
    assert told.startswith("rank 0 is not out of generation 1 0.05 s after this: n2 is lost; it is")
    assert f"initialises_a_communicator ({__file__}:" in told


INTERRUPTED = """
from elastic_etcd.train.process_group import ProcessGroup

env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
ProcessGroup(1, env).interrupt("n2 is lost")
raise SystemExit(3)
"""


def test_a_process_ends_though_nobody_has_torn_down_a_broken_world() -> None:
    """A signal's handler may raise where the loop waits for its next world, or tears one down."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, check=False)
    assert run.returncode == 3


def initialises_a_communicator(caplog: pytest.LogCaptureFixture) -> None:
    while "not out of" not in caplog.text:
        time.sleep(0.01)


def test_g3_who_comes_out_in_time_says_nothing(
    store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    group = alone(store)
    group.init("gloo", {})
    group.interrupt("n2 is lost")
    end(group, broken=True)
    assert "not out of" not in caplog.text
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]


@pytest.mark.parametrize(
    ("backend", "local_rank", "options", "device"),
    [
        (None, 1, {}, 1),
        ("nccl", 1, {}, 1),
        ("gloo", 1, {}, None),
        ("gloo", 5, {}, None),  # more workers than GPUs, or MPS
        ("NCCL", 5, {"device_id": torch.device("cuda", 0)}, torch.device("cuda", 0)),
        ("cuda:nccl", 0, {"device_id": 1}, 1),
    ],
)
def test_g6_only_nccl_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    local_rank: int,
    options: dict[str, Any],
    device: Any,
) -> None:
    current: list[Any] = []
    monkeypatch.setattr(abort, "uses_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    used = process_group._prepare(backend, local_rank, options)
    assert used == (backend or "cpu:gloo,cuda:nccl")
    assert current == ([] if device is None else [device])


@pytest.mark.parametrize(("local_rank", "device"), [(1, 1), (2, 0), (5, 1)])
def test_g6_workers_share_gpus_where_nccl_lets_them(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, device: int
) -> None:
    current: list[Any] = []
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(abort, "uses_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    process_group._prepare(None, local_rank, {})
    assert current == [device]


def test_g6_a_worker_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "uses_nccl", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=r"local rank 2 has no GPU .* sees 2\."):
        process_group._prepare(None, 2, {})
