"""The store of a state's snapshots: which there are, in memory and in files, and the newest.

A rank has two memory files of its own, for the last commit and the next. The agent, if there is
one, keeps them when this process dies, and has two more for the node, in which equal values of its
local ranks lie once: the first rank that commits takes a file's lock, copies its values and writes
the header last; the others sum theirs and, if the whole header is the same, hold that file. A rank
that differs, or would wait for long, writes to its own.
"""

import gc
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from elastic_etcd.core.words import shown
from elastic_etcd.errors import EtcdUnreachable, StaleGeneration, UsageError, WrongHere
from elastic_etcd.system.kernel import new_memfd
from elastic_etcd.system.limits import free_memory
from elastic_etcd.times import COPY_PATIENCE
from elastic_etcd.train.agent_channel import Channel, agent
from elastic_etcd.train.state import files
from elastic_etcd.train.state.snapshot_format import Draft, Header, Version
from elastic_etcd.train.state.snapshot_memfds import (
    HEADER,
    MOST_RANKS,
    Memfd,
    NodeLock,
    SharedMemfd,
    StateSnapshot,
)

MOST_NAMES = 16  # of a process's states; the agent keeps more, of which copies need most
_TIMES = 10  # this rank's own time for its sums, if that is longer than COPY_PATIENCE

log = logging.getLogger(__name__)


class Inventory(NamedTuple):
    """The snapshots of a rank, as it tells the others at a sync."""

    newest: Header | None
    loaded: Version | None  # of the file that it has loaded since the last sync, if any
    node: int  # the group rank of the node whose ranks share snapshots; -1: none


class Snapshots:
    """All snapshots of a state that this rank can get at, and the memory for another one.

    own: descriptors of its two memory files. node: those of the node's two, and of an empty file
    for their locks; none without an agent. All descriptors are this object's from here on.
    """

    _opened: ClassVar[int] = 0  # by this process: each state has snapshots of its own
    _kept: ClassVar[set[str]] = set()  # names, by the agent
    _closed: ClassVar[list[str]] = []  # of states that are gone; the agent keeps them still

    def __init__(self, own: Sequence[int], node: Sequence[int] = (), local_rank: int = 0) -> None:
        self.number = 0  # of the state, in this process
        self.own = [Memfd(fd) for fd in own]
        self.shared: list[SharedMemfd] = []
        self._growth: NodeLock | None = None  # one rank at a time asks for memory, and takes it
        if node:
            *fds, lock = node
            weakref.finalize(self, os.close, lock)
            locks = [NodeLock(lock, n) for n, _ in enumerate(node)]
            self.shared = [SharedMemfd(fd, locks[n], local_rank) for n, fd in enumerate(fds)]
            self._growth = locks[-1]
        self.is_nodes_first = local_rank == 0
        self._differs = False  # from the commits of other ranks, since the last sync
        self._loaded: Version | None = None  # of a file, since the last sync
        self._saving: files.Saving | None = None

    @classmethod
    def open(cls) -> "Snapshots":
        """Those of the next state that this process makes, also from before this process.

        Raises UsageError for more states than the agent keeps, AgentGone.
        """
        number = cls._opened
        cls._opened += 1
        own = [f"state{number}.{half}" for half in (0, 1)]
        node = [f"state{number}.{what}" for what in ("node0", "node1", "lock")]
        channel = agent()
        if channel:
            cls._drop_closed(channel)
            if len(cls._kept) + len(own) > MOST_NAMES:
                gc.collect()  # a trainer that knows its state, which knows it, is garbage for long
                cls._drop_closed(channel)
            if len(cls._kept) + len(own) > MOST_NAMES:
                most = MOST_NAMES // len(own)
                raise UsageError(f"the agent keeps {most} ElasticStates of a process: join some")
        fds = [keep_memfd(channel, name) for name in own]
        if channel is None or channel.local_rank >= MOST_RANKS:
            opened = cls(fds)
        else:
            shared = [_shared_memfd(channel, name) for name in node]
            opened = cls(fds, shared, channel.local_rank)
        opened.number = number
        if channel:
            cls._kept.update(own)
            weakref.finalize(opened, cls._closed.extend, [*own, *node]).atexit = False
        return opened

    @classmethod
    def _drop_closed(cls, channel: Channel) -> None:
        # Not when a state goes: it may be with the process, which ends for an error, and then its
        # last commit is needed. But here the script goes on to another one.
        while cls._closed:
            name = cls._closed.pop()
            cls._kept.discard(name)
            channel.drop(name)

    @classmethod
    def let_go(cls, names: Sequence[str]) -> None:
        """The agent need not keep these for a state that is gone; it hears so with the next one."""
        cls._closed.extend(names)

    # --- which there are --------------------------------------------------------------------

    def newest(self) -> StateSnapshot | None:
        """The newest that was written to its end, if any."""
        held = (snapshot for memfd in (*self.own, *self.shared) if (snapshot := memfd.held()))
        return max(held, key=_age, default=None)

    def newest_intact(self) -> StateSnapshot | None:
        """The newest whose body has the header's digest; nobody clears it from here on.

        A damaged one is dropped, and logged.
        """
        while newest := self.newest():
            if not newest.is_intact():
                log.error("the snapshot %s is damaged: going back one", newest.header)
            elif newest.memfd.protect(newest.header):
                return newest
            newest.memfd.drop()
        return None

    def version(self) -> Version | None:
        """The newest's."""
        newest = self.newest()
        return newest.header.version if newest else None

    def inventory(self, *, trusted: bool) -> Inventory:
        """This rank's; if not `trusted`, the newest is compared with its digest."""
        newest = self.newest() if trusted else self.newest_intact()
        node = int(os.environ.get("GROUP_RANK", "-1")) if self.shared else -1
        return Inventory(newest.header if newest else None, self._loaded, node)

    def prefer(self, snapshot: StateSnapshot) -> None:
        """Make this the newest: another that is as new, of another lineage, is dropped."""
        if isinstance(snapshot.memfd, SharedMemfd):
            snapshot.memfd.hold()
        while (newest := self.newest()) and newest.memfd is not snapshot.memfd:
            newest.memfd.drop()
        self._hold(snapshot.memfd)

    def begin_anew(self) -> None:
        """All ranks have the same values now."""
        self._differs, self._loaded = False, None

    # --- another one ------------------------------------------------------------------------

    def write(self, draft: Draft) -> None:
        """Write a snapshot, or find it in the node's memory; the newest stays until it is whole."""
        size = draft.size  # it refuses objects that can't be encoded before anything is cleared
        if not self.shared or self._differs or not self._share(draft):
            memfd = self.clear_older(size)
            memfd.set(draft.write(memfd.body(size)))
            self._hold(memfd)

    @contextmanager
    def receiving(self, size: int) -> Iterator[Memfd]:
        """A memory file for a body of `size` bytes; the newest, once a snapshot is set in it."""
        with ExitStack() as lock:
            target = self._target(None) if self.shared else None
            if target and lock.enter_context(target.locked()) and target.is_free():
                memfd = self._clear(target, size, self.shared)
            else:
                lock.close()  # the node's is not ours to write: others may look at it
                memfd = self.clear_older(size)
            yield memfd
            if snapshot := memfd.snapshot():
                self.prefer(snapshot)

    def take(self, header: Header) -> StateSnapshot | None:
        """The snapshot of this header, if another rank of this node has it; now ours, too."""
        for memfd in self.shared:
            if snapshot := memfd.take(header):
                self.prefer(snapshot)
                return snapshot
        return None

    def clear_older(self, size: int) -> Memfd:
        """A memory file of this rank's own, cleared, for a body of `size` bytes.

        It never has the newest. Raises OSError, and UsageError when the machine has no memory for
        two snapshots of this size.
        """
        newest = self.newest()
        older = next(memfd for memfd in self.own if not newest or memfd is not newest.memfd)
        return self._clear(older, size, self.own)

    def _clear(self, memfd: Memfd, size: int, pair: Sequence[Memfd]) -> Memfd:
        if size <= memfd.capacity:
            memfd.clear(size)
            return memfd
        with self.growing():
            _check_memory(size, sum(max(0, size - each.capacity) for each in pair))
            memfd.clear(size)
        return memfd

    def growing(self) -> AbstractContextManager[object]:
        """While this is open no other local rank finds the memory free that this one takes.

        A rank that is stopped meanwhile holds up the others for a moment, and no longer.
        """
        return self._growth.locked(COPY_PATIENCE) if self._growth else nullcontext()

    # --- in the node's memory ---------------------------------------------------------------

    def _share(self, draft: Draft) -> bool:
        """Whether the node's memory has it now."""
        target = self._target(draft.version)
        with target.locked() as locked:
            if locked and not target.is_of(draft.version):
                return self._write_shared(target, draft)
        began = time.monotonic()
        header = draft.header()
        patience = max(COPY_PATIENCE, _TIMES * (time.monotonic() - began))
        with target.locked(patience) as locked:
            if not locked:
                log.warning(
                    "another worker of this node has not ended its commit after %.0f s: this one's "
                    "snapshot takes memory of its own",
                    patience,
                )
                return False
            there = target.snapshot()
            if there is None or there.header.version != draft.version:
                # The rank that had the lock first could not.
                return self._write_shared(target, draft)
            self._differs = there.header != header
            if self._differs:
                return False
            target.hold()
        self._hold(target)  # memory of its own may go now, which takes time
        return True

    def _write_shared(self, target: SharedMemfd, draft: Draft) -> bool:
        """Whether it could be written, under the lock."""
        if not target.is_free():
            return False
        self._clear(target, draft.size, self.shared)
        target.set(draft.write(target.body(draft.size)))
        self._hold(target)
        return True

    def _target(self, version: Version | None) -> SharedMemfd:
        """The node's that this rank may write: not its newest, best one that has this version."""
        newest = self.newest()
        others = [memfd for memfd in self.shared if not newest or memfd is not newest.memfd]
        free = [memfd for memfd in others if memfd.is_free()]
        found = [memfd for memfd in others if version and memfd.is_of(version)]
        return (found + free + others)[0]

    def _hold(self, memfd: Memfd) -> None:
        """This has the newest; of its own memory a rank keeps the two newest snapshots' only."""
        for other in self.shared:
            if other is memfd:
                other.hold()
            else:
                other.hold_as_older()
        if memfd in self.shared:
            held = [snapshot for each in (*self.own, *self.shared) if (snapshot := each.held())]
            kept = [snapshot.memfd for snapshot in sorted(held, key=_age)[-2:]]
            for own in self.own:
                if own not in kept:
                    own.release()

    # --- in files ---------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, wait: bool, keep: int) -> None:
        """Write the newest to a file, at once or in a thread, which the next call waits for."""
        if (saving := self._saving) is not None:
            self._saving = None
            # One that another world has made out of date is logged; this takes its place.
            with suppress(StaleGeneration, EtcdUnreachable):
                saving.result()
        newest = self.newest_intact()
        if newest is None:
            raise UsageError("nothing to save: commit() first")
        target = Path(path).absolute()
        allowed = _fence(target, newest.header.version)
        if not wait:
            begin = partial(files.begin_save, target, newest.header, newest.body, allowed)
            with self.growing():
                shortage = shortage_of(newest.header.size)
                self._saving = None if shortage else begin(keep=keep)
            if not shortage:
                return
            log.warning("save(wait=False) waits, with no room for a copy: %s", shortage)
        files.save(target, newest.header, newest.memory, allowed, keep=keep)

    @contextmanager
    def loading(self, path: str | os.PathLike[str]) -> Iterator[StateSnapshot]:
        """Read a file that `save` wrote, as a commit that is older than any here.

        It is dropped again if this ends with an error. Raises OSError, and MalformedState for a
        file that `save` did not write to its end.
        """
        loaded = files.load(Path(path), self.clear_older)
        try:
            yield loaded
        except BaseException:
            loaded.memfd.clear()
            raise
        self._loaded = loaded.header.version


def _age(snapshot: StateSnapshot) -> tuple[bool, int, int]:
    return snapshot.header.version.age()


def _fence(path: Path, version: Version) -> Callable[[], None]:
    """A function that raises if the file may not take its name any more; see files.save."""
    channel = agent()
    if channel is None:
        return lambda: None
    begun = channel.generation

    def allowed() -> None:
        channel.raise_if_stale()
        found = files.version_of(path) if channel.generation != begun else None
        if found and found.lineage == version.lineage and found.age() > version.age():
            raise StaleGeneration(f"generation {channel.generation} has saved {path} meanwhile")

    return allowed


def keep_memfd(channel: Channel | None, name: str) -> int:
    """The memory file of that name: the agent's, from before this process, or a new one."""
    fd = channel.recall(name) if channel else None
    if fd is None:
        fd = new_memfd(f"elastic_etcd-{name}")
        if channel:
            channel.keep(name, fd)
    return fd


def _shared_memfd(channel: Channel, name: str) -> int:
    """The node's memory file of that name; the first rank that asks makes it."""
    # As long as a header: a rank that opens it later may find it longer, and must not shorten it.
    fd = new_memfd(f"elastic_etcd-{name}", HEADER)
    try:
        return channel.share(name, fd)
    finally:
        os.close(fd)


def _check_memory(size: int, lacking: int) -> None:
    """Raise UsageError, with the figures, when `lacking` more bytes for two snapshots are not free.

    size: of one snapshot, in bytes.
    """
    if shortage := shortage_of(lacking):
        two = f"a snapshot of this state takes {shown(size)}, and there are two of them"
        raise WrongHere(f"{two}: {shortage}. Give this node more, or keep less in the state")


def shortage_of(size: int) -> str:
    """The figures, if so many bytes are not free; "" if they are."""
    free = free_memory()
    if size <= free.size:
        return ""
    needed = f"{shown(size)} more of host memory are needed"
    return f"{needed}, {shown(free.size)} of {free.of} are free"
