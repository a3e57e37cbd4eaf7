"""What a training script keeps through a change of world: committed, restored, synchronised."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from elastic_etcd.errors import UsageError
from elastic_etcd.train import boundary, files
from elastic_etcd.train.channel import agent
from elastic_etcd.train.encoding import decode, encode
from elastic_etcd.train.image import Piece, Version, pack, pieces_of, unpack
from elastic_etcd.train.parts import Clones, Codec, codec_of, register
from elastic_etcd.train.snapshot import Slot, Snapshot
from elastic_etcd.train.staging import Staging
from elastic_etcd.train.sync import agree, spread, world

_Callback = TypeVar("_Callback", bound=Callable[[], Any])


class ElasticState:
    """Named values that training resumes from: modules, optimizers, samplers, plain values.

    Each keyword argument is an attribute from then on (`state.epoch += 1`). commit() takes a
    snapshot of all of them into shared memory, which the agent keeps when this process dies;
    without an agent it lives and dies with the process. `allow_pickle` lets values that have no
    plain form be pickled, and with it lets whoever writes a snapshot run code in this process.

    Raises UsageError for a name that is a method's or begins with an underscore.
    """

    _opened = 0  # states of this process: each has a snapshot of its own

    def __init__(self, *, allow_pickle: bool = False, **values: Any) -> None:
        for name in values:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a state can't have a value named {name!r}")
        self._values = values
        self._allow_pickle = allow_pickle
        self._snapshot: Snapshot | None = None
        self._staging = Staging()
        self._callbacks: list[Callable[[], Any]] = []
        self._calls = 0
        self._at_commit = False  # the values are known to be the snapshot's

    def commit(self, every: int = 1) -> None:
        """Take a snapshot of all values; with `every`, at each such call since the last only.

        All ranks must call it alike. It is complete when this returns: until then the one before
        counts. Raises UsageError for a value that can't be encoded, OSError without memory.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): at least 1")
        self._calls += 1
        if self._calls >= every:
            last = self._open().version() or Version(0, 0, secrets.randbits(62))
            self._write(Version(_generation(), last.counter + 1, last.lineage))

    def restore(self) -> None:
        """Go back to the last commit or sync, without any gradients.

        Raises UsageError when there is none.
        """
        slot = self._open().check()
        if slot is None:
            raise UsageError("nothing to restore: neither commit() nor sync() has been called")
        self._load(slot)

    def sync(self) -> bool:
        """Give all ranks the newest snapshot that any of them has. Collective.

        Returns, alike on all ranks, whether that comes from an earlier world.

        Values that are not committed are lost, except that rank 0's are what all begin with when
        no rank has a snapshot. After it the values and the snapshots of all ranks are the same,
        and samplers share out what is left among the ranks that there are now. Needs the process
        group, or is alone in the world. Raises MalformedState, and torch's errors.
        """
        snapshot, (rank, size) = self._open(), world()
        mine = snapshot.version() if self._at_commit or snapshot.check() else None
        versions = agree(mine)
        newest = max(filter(None, versions), key=Version.age, default=None)
        holders = [r for r, version in enumerate(versions) if version == newest]
        loaded = self._at_commit and mine == newest
        if newest is None:
            holders, loaded = [0], rank == 0
            if rank == 0:
                self._write(Version(_generation(), 0, secrets.randbits(62)))
        spread(snapshot, holders)
        slot = snapshot.newest()
        assert slot is not None
        if loaded:
            self._drop_gradients()
        else:
            self._load(slot)
        self._at_commit, self._calls = False, 0
        for value in self._values.values():
            if callable(reshard := getattr(value, "reshard", None)):
                reshard(rank, size)
        return newest is not None and newest.generation != _generation()

    def check(self) -> None:
        """At each step's end, on all ranks: make room for a planned change of world.

        If one is under way all ranks commit at the same call of this and raise WorldChanged, which
        ee.run catches. Otherwise it costs a microsecond.
        """
        self._at_commit = False
        if boundary.check():
            self.commit()
            self._at_commit = True
            raise boundary.WorldChanged

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last commit to a file, on rank 0; other ranks return at once.

        The file is replaced whole or not at all. Raises UsageError without a commit, OSError,
        StaleGeneration when the job has gone on without this worker, and EtcdUnreachable when
        that can't be told.
        """
        if world()[0] or int(os.environ.get("RANK", "0")):
            return
        slot = self._open().check()
        if slot is None:
            raise UsageError("nothing to save: commit() first")
        channel = agent()
        files.save(Path(path), slot, channel.current if channel else lambda: None)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take all values from a file that save() wrote.

        For sync() it is older than any commit of this job, and newer than none at all; commit()
        makes it the newest. Raises OSError, MalformedState, UsageError for other names.
        """
        slot = files.load(Path(path), self._open())
        try:
            self._load(slot)
        except BaseException:
            slot.clear(0)
            raise

    def on_reset(self, callback: _Callback) -> _Callback:
        """Have ee.run call it after each change of world, once the state is synchronised.

        Also a decorator. What it changes is part of the next commit.
        """
        self._callbacks.append(callback)
        return callback

    @staticmethod
    def register(kind: type, codec: Codec) -> None:
        """Let `codec` save and load the values of `kind` and of its subclasses; see Codec."""
        register(kind, codec)

    def _reset(self) -> None:
        """The world has changed: ee.run calls this after sync()."""
        for callback in self._callbacks:
            callback()

    def _rewind(self) -> None:
        """restore(), by ee.run: no step is trained before the next sync()."""
        self.restore()
        self._at_commit = True

    def _open(self) -> Snapshot:
        if self._snapshot is None:
            number, ElasticState._opened = ElasticState._opened, ElasticState._opened + 1
            self._snapshot = Snapshot([_memory(f"state{number}.{slot}") for slot in (0, 1)])
        return self._snapshot

    def _write(self, version: Version) -> None:
        tensors: list[Any] = []
        parts = {
            name: encode(
                codec_of(value).save(value), tensors, name=name, allow_pickle=self._allow_pickle
            )
            for name, value in self._values.items()
        }
        objects, size = pack(parts, tensors)
        batches = self._staging.through(pieces_of(objects, tensors))
        self._open().write(version, len(objects), size, _while_intact(batches))
        self._calls = 0

    def _load(self, slot: Slot) -> None:
        header = slot.header()
        assert header is not None
        parts, tensors = unpack(slot.read(header.objects), slot.body(header.size))
        if parts.keys() != self._values.keys():
            theirs, ours = ", ".join(parts), ", ".join(self._values)
            raise UsageError(f"the snapshot is of {theirs}; this state is of {ours}")
        views, clones = [tensor for tensor, _ in tensors], Clones(tensors)
        loads = []
        for name, value in self._values.items():
            codec = codec_of(value)
            given = views if getattr(codec, "borrows", False) else clones
            saved = decode(parts[name], given, allow_pickle=self._allow_pickle)
            loads.append((name, value, codec, saved))
        for name, value, codec, saved in loads:  # none before all could be read
            self._values[name] = codec.load(value, saved)
        self._drop_gradients()

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


def _while_intact(batches: Iterable[list[Piece]]) -> Iterator[list[Piece]]:
    """Raises WorldBroken instead of the end: what comes out of an abort must not be kept."""
    yield from batches
    boundary.intact()


def _generation() -> int:
    return int(os.environ.get("ELASTIC_ETCD_GENERATION", "0"))


def _memory(name: str) -> int:
    """The memory file of that name: the agent's, from before this process, or a new one."""
    channel = agent()
    fd = channel.recall(name) if channel else None
    if fd is None:
        fd = os.memfd_create(f"elastic_etcd-{name}")
        if channel:
            channel.keep(name, fd)
    return fd
