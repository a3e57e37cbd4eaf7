"""ElasticState: what a training script keeps through a change of world.

It knows which values there are and when they are saved. How a value is saved is told in codecs, how
a snapshot lies in memory and in files in snapshot, and how ranks get one from each other in sync.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from elastic_etcd.errors import UsageError
from elastic_etcd.train import codecs, sync_point
from elastic_etcd.train.channel import agent
from elastic_etcd.train.collectives import rank_and_size
from elastic_etcd.train.snapshot import MemfdPair, Piece, StateSnapshot, Version, load, save
from elastic_etcd.train.staging import Staging
from elastic_etcd.train.sync import gather_versions, spread

_Callback = TypeVar("_Callback", bound=Callable[[], Any])


class ElasticState:
    """Named values that training resumes from: modules, optimizers, samplers, plain values.

    Each keyword argument is an attribute from then on (`state.epoch += 1`). commit() takes a
    snapshot of all of them into shared memory. The agent keeps that memory when this process dies;
    without an agent it ends with the process. `allow_pickle` lets values that have no plain form be
    pickled; it also lets whoever writes a snapshot run code in this process.

    Raises UsageError for a name that is a method's or begins with an underscore.
    """

    _opened = 0  # states of this process: each has a snapshot of its own

    def __init__(self, *, allow_pickle: bool = False, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a state can't have a value named {name!r}")
        self._values = values
        self._allow_pickle = allow_pickle
        self._memfds: MemfdPair | None = None
        self._staging = Staging()
        self._callbacks: list[Callable[[], Any]] = []
        self._calls = 0
        self._at_commit = False  # the values are known to be the snapshot's

    def commit(self, every: int = 1) -> None:
        """Take a snapshot of all values; with `every=n`, at each n-th call since the last one only.

        All ranks must call it alike. The snapshot counts once this returns; until then the one
        before does. Raises UsageError for a value that can't be encoded, OSError without memory.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): at least 1")
        self._calls += 1
        if self._calls >= every:
            last = self._open_memfds().version() or Version(0, 0, secrets.randbits(62))
            self._write_snapshot(Version(_generation(), last.counter + 1, last.lineage))

    def restore(self) -> None:
        """Set all values to those of the last commit or sync, and drop gradients.

        Raises UsageError when there is none.
        """
        newest = self._open_memfds().newest_intact()
        if newest is None:
            raise UsageError("nothing to restore: neither commit() nor sync() has been called")
        self._load_snapshot(newest)

    def sync(self) -> bool:
        """Give all ranks the newest snapshot that any of them has. Collective.

        Returns, alike on all ranks, whether that comes from an earlier world. Afterwards the values
        and the snapshots of all ranks are the same, and samplers have sharded what remains among
        the ranks that there are now. Values that were not committed are lost; if no rank has a
        snapshot, all begin with rank 0's values.

        Needs the process group; without one this process is the whole world. Raises
        MalformedState, and torch's errors.
        """
        memfds, (rank, size) = self._open_memfds(), rank_and_size(launched=False)
        mine = memfds.version() if self._at_commit or memfds.newest_intact() else None
        versions = gather_versions(mine)
        newest = max(filter(None, versions), key=Version.age, default=None)
        if newest is None:
            holders, loaded = [0], rank == 0
            if rank == 0:
                self._write_snapshot(Version(_generation(), 0, secrets.randbits(62)))
        else:
            holders = [r for r, version in enumerate(versions) if version == newest]
            loaded = self._at_commit and mine == newest
        snapshot = spread(memfds, holders)
        if loaded:
            self._drop_gradients()
        else:
            self._load_snapshot(snapshot)
        self._at_commit, self._calls = False, 0
        self._reshard_samplers(rank, size)
        return newest is not None and newest.generation != _generation()

    def check(self) -> None:
        """Stop here if a planned change of world is under way; call it once a step on all ranks.

        All ranks then commit at the same call of it and raise WorldChanged, which ee.run catches.
        Otherwise it costs a microsecond.
        """
        self._at_commit = False
        if sync_point.check():
            self.commit()
            self._at_commit = True
            raise sync_point.WorldChanged

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last commit to a file, on rank 0; other ranks return at once.

        The file is replaced whole or not at all. Raises UsageError without a commit, OSError,
        StaleGeneration when the job has gone on without this worker, and EtcdUnreachable when
        that can't be told.
        """
        if rank_and_size(launched=False)[0] or int(os.environ.get("RANK", "0")):
            return
        newest = self._open_memfds().newest_intact()
        if newest is None:
            raise UsageError("nothing to save: commit() first")
        channel = agent()
        save(Path(path), newest, channel.current if channel else lambda: None)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Set all values to those of a file that save() wrote.

        For sync() the file is older than any commit of this job, and newer than no snapshot at all;
        commit() makes its values the newest. Raises OSError, MalformedState, and UsageError for a
        file of other names.
        """
        loaded = load(Path(path), self._open_memfds())
        try:
            self._load_snapshot(loaded)
        except BaseException:
            loaded.memfd.clear()
            raise

    def on_reset(self, callback: _Callback) -> _Callback:
        """Let ee.run call `callback` after each change of world, once the state is synchronised.

        What the callback changes is part of the next commit. Usable as a decorator.
        """
        self._callbacks.append(callback)
        return callback

    @staticmethod
    def register(kind: type, codec: codecs.Codec) -> None:
        """Let `codec` save and load the values of `kind` and of its subclasses; see Codec."""
        codecs.register(kind, codec)

    def _reset(self) -> None:
        """The world has changed: ee.run calls this after sync()."""
        for callback in self._callbacks:
            callback()

    def _rewind(self) -> None:
        """restore(), by ee.run: no step is trained before the next sync()."""
        self.restore()
        self._at_commit = True

    def _open_memfds(self) -> MemfdPair:
        if self._memfds is None:
            number, ElasticState._opened = ElasticState._opened, ElasticState._opened + 1
            self._memfds = MemfdPair([_open_memfd(f"state{number}.{half}") for half in (0, 1)])
        return self._memfds

    def _write_snapshot(self, version: Version) -> None:
        parts, tensors = codecs.save_values(self._values, allow_pickle=self._allow_pickle)
        self._open_memfds().write(version, parts, tensors, self._staged)
        self._calls = 0

    def _staged(self, pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
        """Raises WorldBroken instead of the end: what comes out of an abort must not be kept."""
        yield from self._staging.through(pieces)
        sync_point.raise_if_broken()

    def _load_snapshot(self, snapshot: StateSnapshot) -> None:
        codecs.load_values(self._values, *snapshot.load(), allow_pickle=self._allow_pickle)
        self._drop_gradients()

    def _reshard_samplers(self, rank: int, world_size: int) -> None:
        for value in self._values.values():
            if callable(reshard := getattr(value, "reshard", None)):
                reshard(rank, world_size)

    def _drop_gradients(self) -> None:
        """Those of a step that was not finished, and is not in any snapshot."""
        for value in self._values.values():
            if callable(zero_grad := getattr(value, "zero_grad", None)):
                zero_grad()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"this state has no value named {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif name in self._values:
            self._at_commit = False
            self._values[name] = value
        else:
            raise AttributeError(f"no value named {name!r}: give it to ElasticState({name}=...)")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})


def _generation() -> int:
    return int(os.environ.get("ELASTIC_ETCD_GENERATION", "0"))


def _open_memfd(name: str) -> int:
    """The memory file of that name: the agent's, from before this process, or a new one."""
    channel = agent()
    fd = channel.recall(name) if channel else None
    if fd is None:
        fd = os.memfd_create(f"elastic_etcd-{name}")
        if channel:
            channel.keep(name, fd)
    return fd
