"""One snapshot per node: what local ranks have committed alike lies in memory once.

Two memory files are the node's; their first page says of each local rank what it holds there. The
first rank that commits takes a file's lock, copies its values and writes the header last; the
others sum theirs and, where the whole header is the same, hold that file. Nobody clears what is
another's newest. Who differs, or would wait for long, has two memory files of its own.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from elastic_etcd.times import COPY_PATIENCE
from elastic_etcd.train.state.free_memory import check_memory
from elastic_etcd.train.state.snapshot import (
    HEADER,
    Draft,
    Header,
    Memfd,
    MemfdPair,
    StateSnapshot,
    Version,
)

_TIMES = 10  # this rank's own time for its sums, if that is longer than COPY_PATIENCE
_AGAIN = 0.0005  # seconds until a lock is tried again
_MARKS = 256  # where in the first page the local ranks' are, a byte for each
MOST_RANKS = HEADER - _MARKS  # of a node; those after them share nothing
_NOTHING, _OLDER, _NEWEST = range(3)

log = logging.getLogger(__name__)


class SharedMemfd(Memfd):
    """A memory file of the node's, as one local rank sees it."""

    def __init__(self, fd: int, lock: tuple[int, int], local_rank: int) -> None:
        super().__init__(fd)
        self._lock_fd, self._byte = lock
        self._mark = _MARKS + local_rank

    @property
    def mark(self) -> int:
        """What this rank holds here."""
        return self.memory[self._mark]

    @mark.setter
    def mark(self, mark: int) -> None:
        self.memory[self._mark] = mark

    def snapshot(self) -> StateSnapshot | None:
        """What it holds, for whomever."""
        self._follow()
        return super().snapshot()

    def is_free(self) -> bool:
        """Whether it is nobody else's newest."""
        end = _MARKS + min(MOST_RANKS, int(os.environ.get("LOCAL_WORLD_SIZE", MOST_RANKS)))
        marks = enumerate(self.memory[_MARKS:end], _MARKS)
        return all(mark != _NEWEST or byte == self._mark for byte, mark in marks)

    def clear(self, size: int = 0) -> torch.Tensor:
        """Its body, for this rank, which has the lock, to write."""
        self._follow()
        return super().clear(size)

    @contextmanager
    def locked(self, patience: float = 0.0, how: int = fcntl.LOCK_EX) -> Iterator[bool]:
        """Whether it could be locked in so many seconds, and then until the end of this.

        With LOCK_SH nobody writes it; others may look at it, too.
        The lock is the process's: the kernel takes it from one that dies. It is of a byte of a file
        of its own, since to close any descriptor of a file ends it, as mmap does with its copy.
        """
        had = self._lock(time.monotonic() + patience, how)
        try:
            yield had
        finally:
            if had:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, self._byte)

    def _lock(self, deadline: float, how: int) -> bool:
        while True:
            try:
                fcntl.lockf(self._lock_fd, how | fcntl.LOCK_NB, 1, self._byte)
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    return False
                threading.Event().wait(_AGAIN)
            else:
                return True

    def _follow(self) -> None:
        """Another rank may have made it larger; nobody makes it smaller."""
        size = os.fstat(self.fd).st_size
        if size > HEADER + self.room:
            self._map_memory(size)


class NodeMemfds(MemfdPair):
    """A local rank's memory files: the node's two, which it shares, and two of its own.

    `lock` is a file of the node's, which is empty. All descriptors are its own from here on.
    """

    def __init__(self, fds: Sequence[int], shared: Sequence[int], lock: int, rank: int) -> None:
        super().__init__(fds)
        weakref.finalize(self, os.close, lock)
        numbered = enumerate(shared)
        self.shared = [SharedMemfd(fd, (lock, byte), rank) for byte, fd in numbered]
        self._differs = False  # from what other ranks commit, since the last sync

    def snapshots(self) -> list[StateSnapshot]:
        """What this rank holds."""
        there = [(memfd, memfd.snapshot()) for memfd in self.shared]
        # A mark that is seen after the header is of what that is of: both are cleared at once.
        held = [snapshot for memfd, snapshot in there if snapshot and memfd.mark]
        return super().snapshots() + held

    @property
    def node(self) -> int:
        """The node's group rank; -1 where there is none."""
        return int(os.environ.get("GROUP_RANK", "-1"))

    def write(self, draft: Draft) -> None:
        """Have it in the node's memory, or else in one's own."""
        draft.objects  # noqa: B018 - what can't be encoded is refused before anything is cleared
        if self._differs or not self._share(draft):
            super().write(draft)
            self._hold(None)

    @contextmanager
    def receiving(self, size: int) -> Iterator[Memfd]:
        """The node's memory, if it can be had."""
        target = self._target(None)
        with target.locked() as had:
            if had and target.is_free():
                self._clear(target, size)
                yield target
                if snapshot := target.snapshot():
                    self._hold(target)
                    self.prefer(snapshot)
                return
        with super().receiving(size) as memfd:
            yield memfd

    def take(self, header: Header) -> StateSnapshot | None:
        """Hold what another rank of this node has."""
        for memfd in self.shared:
            with memfd.locked(COPY_PATIENCE) as had:
                snapshot = memfd.snapshot()
                if not had or snapshot is None or snapshot.header != header:
                    continue
                memfd.mark = _NEWEST
            if snapshot.is_intact():
                self._hold(memfd)
                self.prefer(snapshot)
                return snapshot
            memfd.mark = _NOTHING
        return None

    def begin_anew(self) -> None:
        """All ranks have the same values now."""
        self._differs = False

    def prefer(self, snapshot: StateSnapshot) -> None:
        """Make this the newest."""
        super().prefer(snapshot)
        self._hold(snapshot.memfd)

    def newest_intact(self) -> StateSnapshot | None:
        """The newest whose body is what was written; nobody clears it then."""
        while (newest := super().newest_intact()) is not None and not self._keep(newest):
            self._let_go(newest.memfd)
        return newest

    def _keep(self, snapshot: StateSnapshot) -> bool:
        """Whether it is still there, now that nobody clears it; it may have been an older one."""
        memfd = snapshot.memfd
        if not isinstance(memfd, SharedMemfd) or memfd.mark == _NEWEST:
            return True
        with memfd.locked(COPY_PATIENCE) as had:
            there = memfd.snapshot()
            if not had or there is None or there.header != snapshot.header or not memfd.mark:
                return False
            memfd.mark = _NEWEST
        return True

    def _share(self, draft: Draft) -> bool:
        """Whether the node's memory has it."""
        target = self._target(draft.version)
        with target.locked() as had:
            if had and not _is_of(target, draft.version):
                return self._write_shared(target, draft)
        began = time.monotonic()
        header = draft.header(draft.digest())
        patience = max(COPY_PATIENCE, _TIMES * (time.monotonic() - began))
        with target.locked(patience, fcntl.LOCK_SH) as had:
            if had and _is_of(target, draft.version):
                return self._compare(target, header)
        with target.locked(patience * had) as had:
            if not had:
                log.warning(
                    "another worker of this node has not ended its commit after %.0f s: this one's "
                    "snapshot takes memory of its own",
                    patience,
                )
                return False
            if _is_of(target, draft.version):
                return self._compare(target, header)
            return self._write_shared(target, draft)  # who had the lock first could not

    def _compare(self, target: SharedMemfd, header: Header) -> bool:
        """Whether what another has written is the same; nobody writes meanwhile."""
        there = target.snapshot()
        self._differs = there is None or there.header != header
        if not self._differs:
            self._hold(target)
        return not self._differs

    def _write_shared(self, target: SharedMemfd, draft: Draft) -> bool:
        """Whether it could be written, under the lock."""
        if not target.is_free():
            return False
        self._check_room(target, draft.size)
        draft.write(target, target.clear)
        self._hold(target)
        return True

    def _clear(self, target: SharedMemfd, size: int) -> None:
        self._check_room(target, size)
        target.clear(size)

    def _check_room(self, target: SharedMemfd, size: int) -> None:
        if size > target.room:
            check_memory(size, sum(max(0, size - memfd.room) for memfd in self.shared))

    def _target(self, version: Version | None) -> SharedMemfd:
        """The node's that this rank may write: not its newest, best one that has this version."""
        newest = self.newest()
        others = [memfd for memfd in self.shared if not newest or memfd is not newest.memfd]
        free = [memfd for memfd in others if memfd.is_free()]
        found = [memfd for memfd in others if version and _is_of(memfd, version)]
        return (found + free + others)[0]

    def _hold(self, memfd: Memfd | None) -> None:
        """This is the newest; of its own memory a rank has what the two newest take."""
        for other in self.shared:
            if other is memfd:
                other.mark = _NEWEST
            elif other.mark == _NEWEST:  # any other mark may be another's to clear
                other.mark = _OLDER
        kept = sorted(self.snapshots(), key=lambda each: each.header.version.age())[-2:]
        for own in self.memfds:
            if memfd in self.shared and all(each.memfd is not own for each in kept):
                own.release()

    def _let_go(self, memfd: Memfd) -> None:
        if isinstance(memfd, SharedMemfd):
            memfd.mark = _NOTHING
        else:
            super()._let_go(memfd)


def _is_of(memfd: SharedMemfd, version: Version) -> bool:
    there = memfd.snapshot()
    return there is not None and there.header.version == version
