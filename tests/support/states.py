"""What tests of states share: a node's memory files, what a rank logs, and where it is killed."""

import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.reduction import DupFd
from typing import Any

import torch
import torch.distributed as dist

from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_bytes import TensorSlice
from elastic_etcd.train.state.snapshot_memfds import HEADER, StateSnapshot
from elastic_etcd.train.state.snapshot_store import Snapshots
from tests.support.forked import Child


class Node:
    """The memory files of a node, which outlive its ranks; without `shares` each has its own."""

    def __init__(self, ranks: int = 1, *, shares: bool = True) -> None:
        self.shared = [_memfd(what) for what in ("node0", "node1", "lock") if shares]
        self.own = [[_memfd(f"{rank}.{half}") for half in (0, 1)] for rank in range(ranks)]
        weakref.finalize(self, _close, self._all())

    def rank(self, rank: int = 0) -> Snapshots:
        """As a process that has just begun has them."""
        return opened([os.dup(fd) for fd in self._of(rank)], rank)

    def ranks(self) -> list[Snapshots]:
        """All of them."""
        return [self.rank(rank) for rank in range(len(self.own))]

    def passed_on(self, rank: int = 0) -> list[Any]:
        """A rank's descriptors for a child, which makes `opened` of them."""
        return [DupFd(fd) for fd in self._of(rank)]

    def memory(self) -> int:
        """In bytes, without the first pages."""
        return sum(max(0, os.fstat(fd).st_blocks * 512 - HEADER) for fd in self._all())

    def _of(self, rank: int) -> list[int]:
        return [*self.own[rank], *self.shared]

    def _all(self) -> list[int]:
        return [*self.shared, *(fd for own in self.own for fd in own)]


def opened(fds: Sequence[Any], rank: int = 0) -> Snapshots:
    """A rank's snapshots, in files that are this process's or were passed on to it."""
    own = [fd if isinstance(fd, int) else fd.detach() for fd in fds]
    return Snapshots(own[:2], own[2:], rank)


class Partner(Child):
    """A child that tells where it is, and waits there until it is answered, by its last argument.

    The other end of that pipe is `here`.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.here, there = Pipe()
        super().__init__(function, *args, there)

    def wait(self) -> None:
        """Wait until it is at its place."""
        assert self.here.poll(60)


def at_once(pieces: Iterator[TensorSlice]) -> list[list[TensorSlice]]:
    """All pieces of a commit in one batch."""
    return [list(pieces)]


def newest(of: ElasticState | Snapshots) -> StateSnapshot:
    """The newest snapshot, which is there and whole."""
    snapshots = of._snapshots if isinstance(of, ElasticState) else of
    found = snapshots.newest_intact()
    assert found is not None
    return found


def commits(of: ElasticState | Snapshots) -> int:
    """How many commits the newest snapshot is of; 0 without one."""
    snapshots = of._snapshots if isinstance(of, ElasticState) else of
    version = snapshots.version()
    return version.counter if version else 0


def logged(level: int = logging.INFO) -> Callable[[], list[str]]:
    """The lines that this process logs from now on; each call gives the new ones."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname}: {record.getMessage()}"
    )
    logging.getLogger("elastic_etcd").addHandler(handler)
    logging.getLogger("elastic_etcd").setLevel(logging.INFO)

    def take() -> list[str]:
        found = lines[:]
        lines.clear()
        return found

    return take


def before_each(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call `act`, with a call's arguments, before each call of a function of this process's.

    Nothing undoes it: for a process that ends with its test.
    """
    real = getattr(owner, name)

    def instead(*args: Any, **more: Any) -> Any:
        act(*args)
        return real(*args, **more)

    setattr(owner, name, instead)


def kill_in(owner: Any, name: str, number: int = 1, kind: torch.dtype | None = None) -> None:
    """End this process at the number-th call of a function; of a collective, of such tensors."""
    left = number

    def count(*args: Any) -> None:
        nonlocal left
        left -= kind is None or args[0].dtype == kind
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each(owner, name, count)


def received(act: Callable[[], object] = lambda: None) -> list[int]:
    """The sizes of what this rank receives from now on, before each of which it acts."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor, *_: Any) -> None:
        sizes.append(tensor.numel())
        act()

    before_each(dist, "recv", note)
    return sizes


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _memfd(name: str) -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, HEADER)
    return fd
