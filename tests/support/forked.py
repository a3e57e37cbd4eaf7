"""Real processes for tests of what runs beside torch: forked from one that has imported it."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_etcd.train.process_group import teardown_agentless

_last: list[Any] = []  # the latest group
_forkserver = multiprocessing.get_context("forkserver")
# All that tests which fork import: a module that is missing here costs each child its import again.
_forkserver.set_forkserver_preload(
    [
        "tests.support.forked",
        "elastic_etcd.train.sharded.built",
        "elastic_etcd.train.state.elastic_state",
        "hypothesis",
        "torch.distributed.fsdp",
    ]
)


class Child:
    """A process that runs `function(*args)`; its result is sent back, and so is a traceback."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.results, results = _forkserver.Pipe(duplex=False)
        self.process = _forkserver.Process(target=_run, args=(results, function, *args))
        self.process.start()
        results.close()

    def result(self, timeout: float = 120) -> Any:
        """What it returned; None if it was killed."""
        if not self.results.poll(timeout):
            self.end()
            pytest.fail(f"a process is not done within {timeout} s")
        try:
            failed, value = self.results.recv()
        except EOFError:
            failed, value = False, None
        self.end()
        if failed:
            pytest.fail(value)
        return value

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.results.close()
        self.process.close()


def _run(results: Connection, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each collection looks at all of torch's modules
    try:
        results.send((False, function(*args)))
    except BaseException:  # noqa: BLE001 - the test tells it
        with suppress(OSError):
            results.send((True, traceback.format_exc()))


def ranks(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns on each rank of a gloo group; None from the killed."""
    children = [Child(_ranked, rank, size, folder, function, *args) for rank in range(size)]
    return [child.result() for child in children]


def ranks_that_end(
    size: int, folder: Path, function: Callable[[int], Any], patience: float
) -> list[Any]:
    """The same for processes that end by themselves, which has to go well in so many seconds."""
    processes = [
        _forkserver.Process(target=_to_the_end, args=(rank, size, folder, function))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patience)
        if process.exitcode is None:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _to_the_end(rank: int, size: int, folder: Path, function: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    torch.save(function(rank), folder / f"{rank}.pt")
    dist.barrier()
    teardown_agentless()


def _ranked(rank: int, size: int, folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    with group(rank, size, folder):
        return function(rank, *args)


@contextmanager
def group(rank: int, size: int, folder: Path, backend: str = "gloo") -> Any:
    """A group of `size` ranks that meet in `folder`, which is this group's own.

    It is held until the next one, since the end of a DDP module that outlives it may hang in its.
    """
    gc.collect()
    _last.clear()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
        dist.barrier()
    finally:
        _last.append(dist.group.WORLD)
        dist.destroy_process_group()


def commit_alone(state: Any) -> None:
    """As a rank that commits in the step in which others are lost, or before they came."""
    object.__setattr__(state, "_agree", lambda: True)
    state.commit()
    del state._agree
