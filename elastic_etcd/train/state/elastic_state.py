"""ElasticState: what a training script keeps through a change of world.

It knows which values there are and when they are saved. How a value is saved is told in codecs, how
a snapshot lies in memory and in files in snapshot, and how ranks get one from each other in sync.
"""

import inspect
import logging
import os
import secrets
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from elastic_etcd.errors import EtcdUnreachable, StaleGeneration, UsageError
from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import Doing
from elastic_etcd.train import sync_point
from elastic_etcd.train.agent_channel import Channel, agent
from elastic_etcd.train.collectives import World, rank_and_size
from elastic_etcd.train.data.iterable import ElasticIterable
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.state import codecs, files
from elastic_etcd.train.state.node_memfds import MOST_RANKS, NodeMemfds
from elastic_etcd.train.state.snapshot import (
    HEADER,
    Draft,
    MemfdPair,
    Piece,
    StateSnapshot,
    Version,
)
from elastic_etcd.train.state.staging import Staging
from elastic_etcd.train.state.steps import Steps
from elastic_etcd.train.state.sync import Offer, compare_counts, even_out, gather_offers, spread

log = logging.getLogger(__name__)

_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class ElasticState:
    """Named values that training resumes from: modules, optimizers, samplers, plain values.

    Each keyword argument is an attribute from then on (`state.epoch += 1`). commit() takes a
    snapshot of all of them into shared memory. The agent keeps that memory when this process dies;
    without an agent it ends with the process. `allow_pickle` lets values that have no plain form be
    pickled; it also lets whoever writes a snapshot run code in this process.

    Raises UsageError for a name that is a method's or begins with an underscore, and for values of
    which each rank has another part (FSDP, DTensor, ZeroRedundancyOptimizer, DeviceMesh).
    """

    _opened = 0  # states of this process: each has a snapshot of its own

    def __init__(self, *, allow_pickle: bool = False, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"a state can't have a value named {name!r}")
            codecs.refuse_sharded(name, value)
        self._values = values
        self._allow_pickle = allow_pickle
        self._memfds: MemfdPair | None = None
        self._staging = Staging()
        self._callbacks: list[Callable[..., Any]] = []
        self._calls = 0
        self._committed_at = 0  # the step of this world that the last commit is of
        self._loaded: Version | None = None  # of the file that load() has read since the last sync
        self._saving: files.Saving | None = None
        self._at_commit = False  # the values are known to be the snapshot's
        self._loop: object = None  # the latest one of steps()
        self._counted: tuple[Version, int] | None = None  # what samplers had counted at a commit

    def steps(
        self,
        loader: Iterable[Any],
        *,
        commit_every: int | None = None,
        accumulate: int = 1,
        check: bool = True,
    ) -> Steps:
        """Loop over a DataLoader's batches: what was trained on is counted, committed, checked.

        loader: a DataLoader that draws its batches from an ElasticSampler of this state, or what
        wraps one; or the loader() of an ElasticIterable of this state. commit_every: commit() at
        each so many steps; None: not here. accumulate: how many batches make up a step of the
        optimizer; commits and checks are between steps only. check: False in all but one of several
        loops that run at the same time; it does not commit either.

        A batch counts as trained on when the loop asks for the next one, or with a commit() in its
        body. After a `break` the last one counts, too. See Steps for what can be asked of the loop.
        Raises UsageError for a loader whose samples can't be counted, and says what to do.
        """
        samplers = list(self._samplers().values())
        return Steps(self, loader, samplers, commit_every, accumulate, check=check)

    def commit(self, every: int = 1) -> None:
        """Take a snapshot of all values; with `every=n`, at each n-th call since the last one only.

        All ranks must call it alike; an ElasticIterable among the values asks the others what they
        have read. The snapshot counts once this returns; until then the one before does. Raises
        UsageError for a value that can't be encoded, OSError without memory.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): at least 1")
        self._calls += 1
        if self._calls >= every:
            for value in self._values.values():
                if isinstance(value, ElasticIterable):
                    value.agree()
            last = self._open_memfds().version() or Version(0, 0, secrets.randbits(62))
            with activity.during(Doing.COMMIT):
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

        Where ranks have committed unlike values at the same step the lowest rank's count, and it
        is logged which differed. Needs the process group; without one this process is the whole
        world. Raises MalformedState, UsageError on all ranks if files of two trainings were loaded
        and nothing else tells which counts, and torch's errors.
        """
        memfds, (rank, size) = self._open_memfds(), rank_and_size(launched=False)
        compare_counts(self._counted)
        mine = memfds.newest() if self._at_commit else memfds.newest_intact()
        offers = gather_offers(Offer(mine.header if mine else None, self._loaded, memfds.node))
        headers = [offer.newest for offer in offers]
        versions = [header.version if header else None for header in headers]
        newest = max(filter(None, versions), key=Version.age, default=None)
        _tell_of_files(newest, [offer.loaded for offer in offers], rank)
        if newest is None:
            holders, loaded = [0], rank == 0
            self._save_values()  # on all ranks: what can't be kept is refused by all of them
            if rank == 0:
                self._write_snapshot(Version(_generation(), 0, secrets.randbits(62)))
        else:
            holders = [r for r, version in enumerate(versions) if version == newest]
            differing = even_out(memfds, holders, headers)
            self._tell_of_differences(differing, rank, holders[0])
            loaded = self._at_commit and rank in holders and not differing
        snapshot = spread(memfds, holders, [offer.node for offer in offers])
        if loaded:
            self._drop_gradients()
        else:
            self._load_snapshot(snapshot)
        self._at_commit, self._calls, self._loaded = False, 0, None
        self._committed_at = sync_point.steps()
        self._reshard_samplers(rank, size)
        return newest is not None and newest.generation != _generation()

    def check(self) -> None:
        """Stop here if a planned change of world is under way; call it once a step on all ranks.

        All ranks then raise WorldChanged at the same call of it. ee.run catches that and commits,
        after the training's `finally` blocks. Otherwise it costs a microsecond.
        """
        self._at_commit = False
        activity.step()
        if sync_point.check():
            raise sync_point.WorldChanged

    def save(self, path: str | os.PathLike[str], *, wait: bool = True, keep: int = 1) -> None:
        """Write the last commit to a file, on rank 0; other ranks return at once.

        The file is replaced whole or not at all. keep: how many files there are to be; those before
        are called PATH.1, PATH.2 and so on, the older the higher. With `wait=False` this only
        copies the commit, in memory, and a thread writes it while training goes on. There is one
        such thread: the next save() waits for it, and raises its error, which is logged before; not
        if that was that the job had gone on without that world.

        Raises UsageError without a commit, OSError, StaleGeneration when the job has gone on
        without this worker, and EtcdUnreachable when that can't be told.
        """
        if rank_and_size(launched=False)[0] or int(os.environ.get("RANK", "0")):
            return
        if keep < 1:
            raise UsageError(f"save(keep={keep}): at least 1")
        with activity.during(Doing.SAVE):
            if (saving := self._saving) is not None:
                self._saving = None
                # One that another world has made out of date is logged; this takes its place.
                with suppress(StaleGeneration, EtcdUnreachable):
                    saving.result()
            newest = self._open_memfds().newest_intact()
            if newest is None:
                raise UsageError("nothing to save: commit() first")
            target = Path(path).absolute()
            allowed = _fence(target, newest.header.version)
            if wait:
                files.save(target, newest.header, newest.memory, allowed, keep=keep)
            else:
                self._saving = files.begin_save(target, newest, allowed, keep=keep)

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Set all values to those of a file that save() wrote.

        For sync() the file is older than any commit of this job, and newer than no snapshot at all;
        commit() makes its values the newest. If not `strict`, values that the file lacks stay as
        they are, and those that only it has are passed over; both are logged. Raises OSError,
        MalformedState, and, if `strict`, UsageError for a file of other names.
        """
        loaded = files.load(Path(path), self._open_memfds())
        try:
            others = self._load_snapshot(loaded, strict=strict)
        except BaseException:
            loaded.memfd.clear()
            raise
        self._loaded = loaded.header.version
        if others:
            log.warning("%s and this state are not of the same values: %s", path, others)
            loaded.memfd.clear()
            self._write_snapshot(self._loaded)

    def on_reset(self, callback: _Callback) -> _Callback:
        """Let ee.run call `callback` after each change of world, once the state is synchronised.

        One that takes arguments is given the old and the new world, each with its `generation`,
        and this process's `rank` and `world_size` in it; the old one is None in a process that
        was started for the new one. What it changes is part of the next commit. Usable as a
        decorator.
        """
        self._callbacks.append(callback)
        return callback

    @staticmethod
    def register(kind: type, codec: codecs.Codec) -> None:
        """Let `codec` save and load the values of `kind` and of its subclasses; see Codec."""
        codecs.register(kind, codec)

    def _reset(self, old: World | None, new: World) -> None:
        """The world has changed: ee.run calls this after sync()."""
        for callback in self._callbacks:
            if _takes_worlds(callback):
                callback(old, new)
            else:
                callback()

    def _leave(self) -> None:
        """commit(), by ee.run, for a planned change: no step is trained before the next sync()."""
        self.commit()
        self._at_commit = True

    def _rewind(self) -> None:
        """restore(), by ee.run: no step is trained before the next sync()."""
        self.restore()
        self._at_commit = True

    def _uncommitted(self) -> int:
        """How many whole steps of this world are in no commit, if each checks after it commits."""
        return max(0, sync_point.steps() - self._committed_at)

    def _position(self) -> str:
        """Where training goes on, in words: the last commit, and the numbers among the values."""
        version = self._open_memfds().version()
        numbers = [f"{name} {value}" for name, value in self._values.items() if type(value) is int]
        commit = f"commit {version.counter if version else 0}"
        return f"{commit} ({', '.join(numbers)})" if numbers else commit

    def _open_memfds(self) -> MemfdPair:
        if self._memfds is None:
            number, ElasticState._opened = ElasticState._opened, ElasticState._opened + 1
            names = [f"state{number}.{half}" for half in (0, 1)]
            _drop_closed()
            if len(_kept) + len(names) > _MOST_KEPT:
                most = _MOST_KEPT // len(names)
                raise UsageError(f"the agent keeps {most} ElasticStates of a process: join some")
            shared = [f"state{number}.{what}" for what in ("node0", "node1", "lock")]
            self._memfds = _open(names, shared)
            _kept.update(names)
            weakref.finalize(self, _closed.extend, [*names, *shared]).atexit = False
        return self._memfds

    def _write_snapshot(self, version: Version) -> None:
        parts, tensors = self._save_values()
        self._open_memfds().write(Draft(version, parts, tensors, self._staged))
        self._calls = 0
        self._committed_at = sync_point.steps() + 1
        counts = [parts[name] for name in self._samplers()]
        self._counted = version, zlib.crc32(repr(counts).encode())

    def _save_values(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self._memfds is None or self._memfds.version() is None:
            for name, value in self._values.items():  # it may have been sharded since it was given
                codecs.refuse_sharded(name, value)
        return codecs.save_values(self._values, allow_pickle=self._allow_pickle)

    def _tell_of_differences(self, names: list[str], rank: int, lowest: int) -> None:
        """Buffers differ wherever DDP trains, which gives all ranks rank 0's at each forward."""
        if names:
            expected = set(names) <= codecs.buffer_names(self._values)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said = "rank %d had committed another %s%s than rank %d, whose counts"
            level = logging.INFO if expected else logging.WARNING
            log.log(level, said, rank, ", ".join(names[:3]), more, lowest)

    def _staged(self, pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
        """Raises WorldBroken instead of the end: what comes out of an abort must not be kept."""
        yield from self._staging.through(pieces)
        sync_point.raise_if_broken()

    def _load_snapshot(self, snapshot: StateSnapshot, *, strict: bool = True) -> str:
        """Set the values; what the snapshot lacks or has beside them, if not `strict`."""
        parts, tensors = snapshot.load()
        allow_pickle = self._allow_pickle
        codecs.load_values(self._values, parts, tensors, allow_pickle=allow_pickle, strict=strict)
        self._drop_gradients()
        lacking = [f"{name} stays as it is" for name in self._values if name not in parts]
        beside = [f"{name} is passed over" for name in parts if name not in self._values]
        return ", ".join(lacking + beside)

    def _samplers(self) -> dict[str, ElasticSampler | ElasticIterable]:
        kinds = (ElasticSampler, ElasticIterable)
        return {name: value for name, value in self._values.items() if isinstance(value, kinds)}

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
            codecs.refuse_sharded(name, value)
            self._at_commit = False
            self._values[name] = value
        else:
            raise AttributeError(f"no value named {name!r}: give it to ElasticState({name}=...)")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})


def _takes_worlds(callback: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments, and not without."""
    try:
        inspect.signature(callback).bind()
    except TypeError:
        return True
    except ValueError:  # of a builtin nothing is known
        return False
    return False


_MOST_KEPT = 16  # names, of a process, as in agent/channel.py
_kept: set[str] = set()
_closed: list[str] = []  # of states that are gone; the agent keeps them still


def _drop_closed() -> None:
    """Let the agent drop the memory of states that are gone, since the script opens another one.

    Not when they go: it may be with the process, which ends for an error, and then the last commit
    is needed.
    """
    channel = agent() if _closed else None
    while _closed:
        name = _closed.pop()
        _kept.discard(name)
        if channel:
            channel.drop(name)


def _tell_of_files(newest: Version | None, loaded: list[Version | None], rank: int) -> None:
    """Say which files count and which don't; raise UsageError, on all ranks, where that is open."""
    files = {version.lineage: (version, r) for r, version in enumerate(loaded) if version}
    if newest is None or not files:
        return
    those = [f"rank {r} has loaded, at its commit {file.counter}" for file, r in files.values()]
    if newest not in loaded:
        for lineage, text in zip(files, those, strict=True):
            if lineage != newest.lineage:
                log.warning(
                    "the file that %s, does not count: it is of another training than this job's, "
                    "which goes on at its commit %d. To go on from the file, end the job and begin "
                    "it with a node that loads the file",
                    *(text, newest.counter),
                )
    elif len(files) > 1:
        raise UsageError(
            f"the file that {', and another that '.join(those)}, are of two trainings: which one "
            "counts? Let all nodes load the same, or remove those of another training"
        )
    elif rank == 0:
        log.info("all go on from the file that %s; %d ranks had none", those[0], loaded.count(None))


def _fence(path: Path, version: Version) -> Callable[[], None]:
    """What asks, just before a file takes its name, whether it may; see files.save."""
    channel = agent()
    if channel is None:
        return lambda: None
    begun = channel.generation

    def allowed() -> None:
        channel.current()
        found = files.version_of(path) if channel.generation != begun else None
        if found and found.lineage == version.lineage and found.age() > version.age():
            raise StaleGeneration(f"generation {channel.generation} has saved {path} meanwhile")

    return allowed


def _generation() -> int:
    return int(os.environ.get("ELASTIC_ETCD_GENERATION", "0"))


def _open(names: list[str], shared: list[str]) -> MemfdPair:
    """The memory files of these names; where there is an agent the node's, too, and its lock."""
    fds = [_open_memfd(name) for name in names]
    channel = agent()
    if channel is None or channel.local_rank >= MOST_RANKS:
        return MemfdPair(fds)
    *memfds, lock = [_share_memfd(channel, name) for name in shared]
    return NodeMemfds(fds, memfds, lock, channel.local_rank)


def _share_memfd(channel: Channel, name: str) -> int:
    fd = os.memfd_create(f"elastic_etcd-{name}")
    os.ftruncate(fd, HEADER)  # here: whoever opens it later may find it longer, and must not
    try:
        return channel.share(name, fd)
    finally:
        os.close(fd)


def _open_memfd(name: str) -> int:
    """The memory file of that name: the agent's, from before this process, or a new one."""
    channel = agent()
    fd = channel.recall(name) if channel else None
    if fd is None:
        fd = os.memfd_create(f"elastic_etcd-{name}")
        if channel:
            channel.keep(name, fd)
    return fd
