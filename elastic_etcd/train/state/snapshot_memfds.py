"""Memory files (memfd), each with a place for a snapshot: a header in the first page, then a body.

The header is cleared before the body is written and set after it, so that a process that is killed
in between leaves no snapshot there. A `SharedMemfd` is the node's: its first page also says of each
local rank whether it holds that snapshot, and nobody clears another's newest.
"""

import errno
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elastic_etcd.errors import UsageError
from elastic_etcd.system.kernel import new_memfd
from elastic_etcd.times import COPY_PATIENCE
from elastic_etcd.train.state.snapshot_bytes import digest_of
from elastic_etcd.train.state.snapshot_format import Header, Version, unpack

HEADER = 4096  # one page, so that the body is aligned as memory is
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: all page faults at once, a third of their time
_AGAIN = 0.0005  # seconds until a lock is tried again
_MARKS = 256  # the place of the local ranks' marks in the first page, a byte for each
MOST_RANKS = HEADER - _MARKS  # of a node; those after them share nothing
_NOTHING, _OLDER, _NEWEST = range(3)


class Memfd:
    """A memory file of this rank's own. It owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self.pid = os.getpid()
        if os.fstat(fd).st_size < HEADER:
            os.ftruncate(fd, HEADER)
        self._map_memory(os.fstat(fd).st_size)

    def snapshot(self) -> "StateSnapshot | None":
        """The snapshot that is there; None while there is no complete one."""
        header = Header.unpack(self.memory[:HEADER])
        if header is None or header.size > self.capacity:
            return None
        return StateSnapshot(self, header)

    def held(self) -> "StateSnapshot | None":
        """The snapshot, if it is one of this rank's."""
        return self.snapshot()

    def body(self, size: int) -> torch.Tensor:
        """Its first `size` bytes: the memory itself, not a copy."""
        return self._bytes[HEADER : HEADER + size]

    @property
    def capacity(self) -> int:
        """Bytes of the largest body that it has memory for."""
        return len(self.memory) - HEADER

    def clear(self, size: int = 0) -> torch.Tensor:
        """The body, of `size` bytes, to be written; the snapshot is gone. Raises OSError."""
        if os.getpid() != self.pid:
            raise UsageError("a state belongs to the worker, not to a process forked from it")
        if size > self.capacity:
            os.ftruncate(self.fd, HEADER + size)
            self._map_memory(HEADER + size)
            try:
                self.memory.madvise(_POPULATE_WRITE)  # all of the memory now, or an error
            except OSError as error:  # before Linux 5.14 the pages come one by one
                if error.errno != errno.EINVAL:
                    raise
        self.memory[:HEADER] = bytes(HEADER)
        return self.body(size)

    def set(self, header: Header) -> "StateSnapshot":
        """Say that the body is written."""
        packed = header.pack()
        self.memory[: len(packed)] = packed
        return StateSnapshot(self, header)

    def release(self) -> None:
        """Give the memory back, with the snapshot."""
        if self.capacity:
            self.clear()
            os.ftruncate(self.fd, HEADER)
            self._map_memory(HEADER)

    def drop(self) -> None:
        """The snapshot is none of this rank's any more."""
        self.clear()

    def protect(self, header: Header) -> bool:  # noqa: ARG002 - nobody else writes this one
        """Whether the snapshot of this header is still there; from here on nobody clears it."""
        return True

    def _map_memory(self, length: int) -> None:
        self.memory = mmap.mmap(self.fd, length)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)


def scratch_memfd(size: int) -> Memfd:
    """Memory for a body of so many bytes, which goes with its last user. Raises OSError."""
    memfd = Memfd(new_memfd("elastic_etcd-scratch"))
    memfd.clear(size)
    return memfd


class NodeLock:
    """A lock of the node's ranks: a byte of a file.

    It is the process's: the kernel takes it from one that dies. The file has nothing but locks,
    since to close any descriptor of a file ends them, as mmap does with its copy.
    """

    def __init__(self, fd: int, byte: int) -> None:
        self._fd, self._byte = fd, byte

    @contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[bool]:
        """Whether it could be locked in so many seconds, and then until the end of this."""
        had = self._lock(time.monotonic() + patience)
        try:
            yield had
        finally:
            if had:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._byte)

    def _lock(self, deadline: float) -> bool:
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    return False
                threading.Event().wait(_AGAIN)
            else:
                return True


class SharedMemfd(Memfd):
    """A memory file of the node's, as a local rank sees it, with its lock."""

    def __init__(self, fd: int, lock: NodeLock, local_rank: int) -> None:
        super().__init__(fd)
        self.locked = lock.locked
        self._mark = _MARKS + local_rank

    def snapshot(self) -> "StateSnapshot | None":
        """The snapshot that is there, whoever holds it."""
        self._follow()
        return super().snapshot()

    def held(self) -> "StateSnapshot | None":
        """The snapshot, if this rank holds it."""
        snapshot = self.snapshot()
        # A mark that is seen after the header belongs to it: both are cleared at once.
        return snapshot if self.memory[self._mark] else None

    def hold(self) -> None:
        """The snapshot is this rank's newest; nobody else clears it."""
        self.memory[self._mark] = _NEWEST

    def hold_as_older(self) -> None:
        """The snapshot is this rank's newest no more: others may clear it."""
        if self.memory[self._mark] == _NEWEST:  # any other mark may be another's to clear
            self.memory[self._mark] = _OLDER

    def drop(self) -> None:
        """The snapshot is none of this rank's any more."""
        self.memory[self._mark] = _NOTHING

    def protect(self, header: Header) -> bool:
        """Whether this rank still holds this snapshot; from here on nobody clears it."""
        if self.memory[self._mark] == _NEWEST:
            return True
        with self.locked(COPY_PATIENCE) as locked:
            there = self.held()
            if not locked or there is None or there.header != header:
                return False
            self.hold()
        return True

    def take(self, header: Header) -> "StateSnapshot | None":
        """Hold the snapshot of this header, of another rank, if it is there and intact."""
        with self.locked(COPY_PATIENCE) as locked:
            snapshot = self.snapshot()
            if not locked or snapshot is None or snapshot.header != header:
                return None
            self.hold()
        if snapshot.is_intact():
            return snapshot
        self.drop()
        return None

    def is_of(self, version: Version) -> bool:
        """Whether the snapshot that is there is of this commit."""
        there = self.snapshot()
        return there is not None and there.header.version == version

    def is_free(self) -> bool:
        """Whether it is nobody else's newest."""
        end = _MARKS + min(MOST_RANKS, int(os.environ.get("LOCAL_WORLD_SIZE", MOST_RANKS)))
        marks = enumerate(self.memory[_MARKS:end], _MARKS)
        return all(mark != _NEWEST or byte == self._mark for byte, mark in marks)

    def clear(self, size: int = 0) -> torch.Tensor:
        """The body, for this rank, which has the lock, to write."""
        self._follow()
        return super().clear(size)

    def _follow(self) -> None:
        """Another rank may have made it larger; nobody makes it smaller."""
        size = os.fstat(self.fd).st_size
        if size > HEADER + self.capacity:
            self._map_memory(size)


@dataclass(frozen=True)
class StateSnapshot:
    """A snapshot in memory, written to its end; good until its memfd is cleared."""

    memfd: Memfd
    header: Header

    @property
    def body(self) -> torch.Tensor:
        """All after the header: the memory itself, not a copy."""
        return self.memfd.body(self.header.size)

    @property
    def memory(self) -> memoryview:
        """The body, as bytes."""
        return memoryview(self.memfd.memory)[HEADER : HEADER + self.header.size]

    def load(self) -> tuple[dict[str, Any], dict[str, tuple[torch.Tensor, bool]]]:
        """The parts, and the tensors as views of the memory, with whether they were on a GPU.

        Raises MalformedState.
        """
        start = self.header.objects_at
        objects = bytes(self.memory[start : start + self.header.objects])
        return unpack(objects, self.body)

    def copy(self) -> "StateSnapshot":
        """The same in memory of its own. Raises OSError."""
        memfd = scratch_memfd(self.header.size)
        memfd.body(self.header.size).copy_(self.body)
        return memfd.set(self.header)

    def is_intact(self) -> bool:
        """Whether the body has the header's digest; reads all of it."""
        return digest_of(self.body) == self.header.digest
