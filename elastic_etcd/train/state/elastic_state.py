"""ElasticState: the values that a training script keeps through a change of world.

It knows which values there are and when they are saved. codecs.py saves a value,
snapshot_store.py has the snapshots, in memory and in files, and sync.py brings the newest to all
ranks.
"""

import inspect
import logging
import os
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic_etcd.errors import PiecesLost, UsageError
from elastic_etcd.protocol import activity
from elastic_etcd.train import sync_point
from elastic_etcd.train.collectives import World, generation, rank_and_size
from elastic_etcd.train.data.iterable import ElasticIterable
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.state import codecs
from elastic_etcd.train.state.encoding import without_modes
from elastic_etcd.train.state.replicas import Replicas, Saved
from elastic_etcd.train.state.snapshot_bytes import Staging, TensorSlice
from elastic_etcd.train.state.snapshot_format import Draft, Version
from elastic_etcd.train.state.snapshot_memfds import StateSnapshot
from elastic_etcd.train.state.snapshot_store import Snapshots
from elastic_etcd.train.state.steps import CommitEvery, Loops, Steps, agree, count_anew, steps_of
from elastic_etcd.train.state.structure import Structure, refuse_changed, structures_of
from elastic_etcd.train.state.sync import (
    compare_counts,
    even_out,
    gather_inventories,
    holders_of,
    spread,
)

if TYPE_CHECKING:
    from elastic_etcd.train.sharded.built import BuildWorld, Built

log = logging.getLogger(__name__)

# Handled on all ranks at the same step.
_ON_ALL_RANKS = (sync_point.WorldChanged, StopIteration, GeneratorExit)

_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class ElasticState:
    """Named values that training resumes from: modules, optimizers, samplers, plain values.

        state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    values: each is an attribute from then on (`state.epoch += 1`). commit() takes a snapshot of all
    of them into shared memory. The agent keeps that memory when this process dies; without an agent
    it ends with the process. allow_pickle: let values that have no plain form be pickled; it also
    lets whoever writes a snapshot run code in this process.

    build: makes the values that are sharded (FSDP2, HSDP) for each world anew, and others that hold
    on to them, such as a scheduler: `build(world)` returns them by name. With it there may be
    `first`: `first(state)` is called on all ranks when there is nothing to go on from, and may load
    a checkpoint. `--copies` says how many nodes have each piece of what is sharded.

    Raises UsageError for a name that is a method's or begins with an underscore, and for values of
    which each rank has another part (FSDP, DTensor, ZeroRedundancyOptimizer, DeviceMesh) and that
    `build` does not make, and for a parameter that is in no module. See docs/state.md.
    """

    def __init__(
        self,
        *,
        build: Callable[["BuildWorld"], dict[str, Any]] | None = None,
        allow_pickle: bool = False,
        **values: Any,
    ) -> None:
        self._first: Callable[[ElasticState], object] | None = None
        self._built: Built | None = None
        if build is not None:  # else they are values like others
            from elastic_etcd.train.sharded import built  # noqa: PLC0415 - it takes a second

            self._first = values.pop("first", None)
            self._built = built.Built(build)
        for name, value in values.items():
            self._refuse_name(name)
            codecs.refuse_sharded(name, value)
            if codecs.is_plain(codecs.codec_of(value)):
                codecs.refuse_trained(name, value)
        self._values = values
        self._allow_pickle = allow_pickle
        self._staging = Staging()
        self._callbacks: list[Callable[..., Any]] = []
        self._calls = 0
        self._leaves = False  # this node, after the next commit
        self._committed_at = 0  # the step of this world that the last commit is of
        self._commits = 0  # the number of that commit, over all worlds
        self._at_commit = False  # the values are known to be the snapshot's
        self._loops = Loops()
        self._replicas = Replicas()
        self._structures: dict[str, Structure] = {}  # before the first sync of this process
        self._handled = 0  # the id of the exception that was handled when the step began
        self._ranks: dict[int, int] = {}  # this process's, in each generation that it was in
        self._old: World | None = None  # the world of the commit that all have loaded
        self._file = ""  # from which all go on, in words
        # The last commit, and a digest of its samplers' counts.
        self._counted: tuple[Version, int] | None = None
        self._directory: Path | None = None  # of the checkpoints that load() has named
        self._strict = True  # it was to be
        self._loaded: Version | None = None  # a checkpoint's, in this world
        self._saved_at: dict[str, float] = {}  # by the file

    def _refuse_name(self, name: str) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise UsageError(f"a state can't have a value named {name!r}")

    @cached_property
    def _snapshots(self) -> Snapshots:
        return Snapshots.open()

    def steps(
        self,
        loader: Iterable[Any],
        *,
        commit_every: CommitEvery = "auto",
        accumulate: int = 1,
        check: bool = True,
    ) -> Steps:
        """Loop over a DataLoader's batches, which are counted, committed and checked.

            for inputs, targets in state.steps(loader, commit_every=10):

        loader: a DataLoader that draws its batches from an ElasticSampler of this state, or a
        wrapper of one; or the loader() of an ElasticIterable of this state. commit_every: commit()
        at each so many steps; "auto": so often that it takes at most 1 % of the time as measured,
        or each 30 s; None: not here. accumulate: how many batches make up a step of the
        optimizer; commits and checks are between steps only. check: False in all but one of several
        loops that run at the same time; it does not commit either.

        A batch counts as trained on when the loop asks for the next one, or with a commit() in its
        body. After a `break` the last one counts, too. The loop has a len() and `ends_step`.
        Raises UsageError for a loader whose samples can't be counted, and says what to do.
        """
        samplers = list(self._samplers().values())
        return Steps(self, self._loops, loader, samplers, commit_every, accumulate, check=check)

    def commit(self, every: int = 1) -> None:
        """Take a snapshot of all values; with `every=n`, at each n-th call since the last one only.

            state.commit()  # after the step of the optimizer, on all ranks

        All ranks must call it alike: at some commits they compare what they have, and an
        ElasticIterable among the values gathers what the others have read, as does a sampler whose
        batches are of any size. The snapshot counts once this returns; until then the one before
        does. Nothing is committed where the world is broken: it raises WorldBroken for ee.run, also
        if the script has caught a collective's error. Nor is it in a `finally` or `except` for an
        exception that other ranks may not have met: the log says so. Raises UsageError for a value
        that can't be encoded and within a step of several batches, OSError without memory.
        """
        if every < 1:
            raise UsageError(f"commit(every={every}): at least 1")
        self._loops.raise_within_step("commit()")
        self._calls += 1
        if self._calls >= every and self._agree():
            began = time.monotonic()
            for value in self._samplers().values():
                # Alike on all ranks, which loop over the same kinds of loaders.
                if isinstance(value, ElasticIterable) or (
                    value._varies and value.world_size == rank_and_size(launched=False)[1]
                ):
                    value.agree()
            last = self._snapshots.version() or _version(0, secrets.randbits(62))
            version = _version(last.counter + 1, last.lineage)
            with activity.during(activity.Doing.COMMIT):
                shards: dict[str, Any] = {}
                saved = self._save_values(shards)
                with without_modes():
                    now = time.monotonic()
                    self._replicas.compare_if_due(
                        self._values, self._snapshots, saved, version.counter
                    )
                    began += time.monotonic() - now  # that has a share of the time of its own
                    self._write_shards(version, shards)
                    self._write_snapshot(version, saved)
            self._loops.interval.committed(time.monotonic() - began)

    def restore(self) -> None:
        """Set all values to those of the last commit or sync, and drop gradients.

        Raises UsageError when there is none. Sharded values come from this rank's memory: where
        they are damaged there, or of another world, WorldBroken has ee.run bring all ranks back.
        """
        newest = self._snapshots.newest_intact()
        if newest is None:
            raise UsageError("nothing to restore: neither commit() nor sync() has been called")
        there = self._built and self._built.there
        shards = self._built.own(newest, self._values) if self._built and there else {}
        self._load_snapshot(newest, shards=shards)

    def sync(self) -> bool:
        """Give all ranks the newest snapshot that any of them has. Collective.

        Returns, alike on all ranks, whether that comes from an earlier world. Afterwards the values
        and the snapshots of all ranks are the same, and samplers have sharded what remains among
        the ranks that there are now. Values that were not committed are lost; if no rank has a
        snapshot, all begin with rank 0's values.

        If ranks have committed unlike values at the same step those of most ranks count, or else
        the lowest rank's, and the log names them. Needs the process group; without one this process
        is the whole world. Raises MalformedState, UsageError on all ranks if files of two trainings
        were loaded and nothing else decides which counts, and torch's errors.
        """
        snapshots, (rank, size) = self._snapshots, rank_and_size(launched=False)
        self._begin_built()
        self._structures = self._structures or structures_of(self._kept_values())
        compare_counts(self._counted)
        inventories = gather_inventories(snapshots.inventory(trusted=self._at_commit))
        versions = [each.newest.version if each.newest else None for each in inventories]
        newest = max(filter(None, versions), key=Version.age, default=None)
        shards: dict[str, Any] = {}
        if newest is None:
            newest = self._begin_job()
            holders, loaded = [0], rank == 0
            saved = self._save_values(shards)  # on all ranks: all refuse what can't be kept
            if rank == 0:
                self._write_snapshot(newest or _version(0, secrets.randbits(62)), saved)
            inventories = gather_inventories(snapshots.inventory(trusted=True))
        else:
            self._file = _file_that_counts(newest, [each.loaded for each in inventories])
            if rank == next((r for r, each in enumerate(inventories) if each.loaded == newest), -1):
                self._report_undone()
            holders = holders_of(newest, inventories)
            differing = even_out(snapshots, holders, inventories)
            self._report_differences(differing, rank, holders[0])
            loaded = self._at_commit and rank in holders and not differing and not self._built
        snapshot = spread(snapshots, holders, inventories)
        try:
            shards = self._take_shards(snapshot, shards)
        except PiecesLost as error:
            if self._directory is None:
                raise
            if rank == 0:
                log.warning("%s: all go on from %s", error, self._directory)
            return self.sync()
        if loaded:
            self._drop_gradients()
        else:
            self._load_snapshot(snapshot, shards=shards)
        self._at_commit, self._calls = False, 0
        self._begin_step()
        self._loops.interval.begin()
        count_anew()
        self._committed_at = sync_point.current().steps
        version = snapshot.header.version
        self._commits = version.counter
        self._tell_place()
        old_rank = self._ranks.get(version.generation, -1)
        self._old = World(version.generation, old_rank, version.world_size)
        self._ranks[generation()] = rank
        self._loops.ranks_before = version.world_size if newest is not None else 0
        self._reshard(rank, size)
        self._replicas.begin()
        return newest is not None and newest.generation != generation()

    def check(self) -> None:
        """Stop here if a planned change of world is under way; call it once a step on all ranks.

        All ranks then raise WorldChanged at the same call of it. ee.run catches that and commits,
        after the training's `finally` blocks. Otherwise it costs a microsecond. Raises WorldBroken
        for ee.run when a peer is gone.
        """
        self._loops.raise_within_step("check()")
        self._at_commit = False
        self._begin_step()
        activity.step()
        stops = sync_point.current().check()
        self._tell_place()
        if stops:
            raise sync_point.WorldChanged

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        wait: bool = True,
        keep: int = 1,
        every: float = 0.0,
    ) -> None:
        """Write the last commit to a file, on rank 0; other ranks return at once.

            state.save("model.safetensors", wait=False, keep=3)

        The file is replaced whole or not at all. keep: how many files there are to be; those before
        are called PATH.1, PATH.2 and so on, the older the higher. With `wait=False` this only
        copies the commit, in memory, and a thread writes it while training goes on. There is one
        such thread: the next save() waits for it, and raises its error, which is logged before; but
        not the error that the job had gone on without that world. every: write at most
        once in so many seconds.

        A state with `build` is saved by all ranks, each its part: call it on all of them. `path` is
        a directory, and each save one in it, commit-N, in the format of
        torch.distributed.checkpoint. With `wait=False` one that comes while the one before is still
        being written is left out, and an error is only logged.

        Raises UsageError without a commit, OSError, StaleGeneration when the job has gone on
        without this worker, and EtcdUnreachable when nobody knows that. The format of files is
        safetensors'; "Files" in docs/state.md has it.
        """
        if keep < 1:
            raise UsageError(f"save(keep={keep}): at least 1")
        if self._built:
            with activity.during(activity.Doing.SAVE):
                self._built.save(
                    *(Path(path).absolute(), self._snapshots, self._values),
                    allow_pickle=self._allow_pickle,
                    wait=wait,
                    keep=keep,
                    every=every,
                )
            return
        if rank_and_size(launched=False)[0] or int(os.environ.get("RANK", "0")):
            return
        name, now = os.fspath(path), time.monotonic()
        if now - self._saved_at.get(name, float("-inf")) >= every:
            with activity.during(activity.Doing.SAVE):
                self._snapshots.save(path, wait=wait, keep=keep)
            self._saved_at[name] = now

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Set all values to those of a file that save() wrote.

            state.load("model.safetensors")  # before the training

        For sync() the file is older than any commit of this job, and newer than no snapshot at all;
        commit() makes its values the newest. Modules keep their modes until sync(): an evaluation
        may have chosen its own. If not `strict`, values that the file lacks stay as
        they are, and those that only it has are passed over; both are logged.

        With `build`, `path` is the directory that save() was given. Before the training this only
        names it: when there is no commit in memory to go on from, sync() reads the newest
        checkpoint there that is whole, and `first` is called if there is none at all. In the
        training, and in `first`, it is read at once, on all ranks.

        Raises OSError, MalformedState, and, if `strict`, UsageError for a file of other names.
        """
        if self._built:
            root = Path(path).absolute()
            if not self._built.there:
                self._directory, self._strict = root, strict
            elif not self._read_newest(root, strict=strict):
                raise FileNotFoundError(f"there is no checkpoint in {root}")
            return
        with self._snapshots.loading(path) as loaded:
            others = self._load_snapshot(loaded, strict=strict, modes=False)
        if others:
            log.warning("%s and this state are not of the same values: %s", path, others)
            loaded.memfd.clear()
            self._write_snapshot(loaded.header.version, self._save_values())

    def on_reset(self, callback: _Callback) -> _Callback:
        """Let ee.run call `callback` after each change of world, once the state is synchronised.

            state.on_reset(lambda old, new: set_learning_rate(new.world_size))

        A callback that takes arguments is given the old and the new world, each with its
        `generation`, its `world_size` and this process's `rank` in it. The old world is that of the
        commit from which all go on, the same on all ranks; `rank` is -1 in a process that was not
        in it. A callback's changes are part of the next commit. It can be a decorator.
        """
        self._callbacks.append(callback)
        return callback

    @staticmethod
    def register(kind: type, codec: codecs.Codec) -> None:
        """Let `codec` save and load the values of `kind` and of its subclasses.

            ee.ElasticState.register(Words, Vocabulary())

        codec: see Codec.
        """
        codecs.register(kind, codec)

    # For ee.run. Each begins with an underscore, since no value can have the name of a method.

    def _reset(self, new: World) -> None:
        """The world has changed: ee.run calls this after sync()."""
        for callback in self._callbacks:
            if _takes_worlds(callback):
                callback(self._old, new)
            else:
                callback()

    def _leave(self, *, leaves: bool = False) -> None:
        """commit(), by ee.run, for a planned change: no step is trained before the next sync().

        leaves: this node leaves the job.
        """
        self._replicas.rest()
        self._leaves = leaves
        self.commit()
        self._at_commit = True

    def _finish(self) -> None:
        """Wait for the save that is under way, by ee.run at the end of training. Raises OSError."""
        if self._built:
            self._built.finish()

    def _end_world(self) -> None:
        """Let go of what is bound to this world, by ee.run."""
        if self._built:
            self._values.update(dict.fromkeys(self._built.names))
            self._built.there = False

    def _reshard(self, rank: int, size: int) -> None:
        for sampler in self._samplers().values():
            if isinstance(sampler, ElasticSampler):
                sampler._varies = False  # a newcomer has not begun its loop yet
        for value in self._values.values():
            if isinstance(value, torch.nn.Module):  # FSDP's has another method of this name
                continue
            if callable(reshard := getattr(value, "reshard", None)):
                reshard(rank, size)

    def _begin_built(self) -> None:
        if self._built:
            values = self._built.begin(self._snapshots, self._kept_values())
            for name in values:
                self._refuse_name(name)
            self._values.update(values)

    def _begin_job(self) -> Version | None:
        """The values with which to begin: a checkpoint's, whose commit is returned, or the first.

        They are a file's, for what follows: older than any commit.
        """
        self._loaded, self._file = None, ""
        if self._directory:
            found = self._read_newest(self._directory, strict=self._strict)
            if not found and rank_and_size(launched=False)[0] == 0:
                log.info("there is no checkpoint in %s: training begins anew", self._directory)
        if self._first and self._loaded is None:
            self._first(self)
        return self._loaded

    def _read_newest(self, root: Path, *, strict: bool) -> bool:
        """Set the values to those of the newest checkpoint there, if there is one. Collective."""
        assert self._built
        found = self._built.read_newest(root, self._values, allow_pickle=self._allow_pickle)
        if found is None:
            return False
        folder, (snapshot, shards) = found
        others = self._load_snapshot(snapshot, strict=strict, shards=shards)
        self._loaded, self._file = snapshot.header.version, f" of {folder},"
        if others:
            log.warning("%s and this state are not of the same values: %s", folder, others)
        if rank_and_size(launched=False)[0] == 0:
            log.info("all go on from %s", folder)
        return True

    def _take_shards(self, snapshot: StateSnapshot, first: dict[str, Any]) -> dict[str, Any]:
        """The sharded tensors of the snapshot; `first` are those of values that are new."""
        built = self._built
        if built is None:
            return {}
        if first:
            self._write_shards(snapshot.header.version, first)
            return first
        try:
            return built.load(snapshot, self._values)
        except PiecesLost:
            built.drop()
            while newest := self._snapshots.newest():
                newest.memfd.drop()
            raise

    def _rewind(self) -> None:
        """restore(), by ee.run: no step is trained before the next sync()."""
        self.restore()
        self._at_commit = True

    def _uncommitted(self) -> int:
        """How many whole steps of this world are in no commit, if each checks after it commits."""
        return max(0, sync_point.current().steps - self._committed_at)

    def _tell_place(self) -> None:
        """Tell how far training has come, by commits: steps of other worlds may be lost.

        Before the first one a script may go on from a file of its own, which nobody knows.
        """
        if self._commits and (page := activity.own_page()):
            page.reach(self._uncommitted(), self._commits)

    def _position(self) -> str:
        """The place where training goes on: the last commit, and the numbers among the values."""
        version = self._snapshots.version()
        numbers = [f"{name} {value}" for name, value in self._values.items() if type(value) is int]
        commit = f"commit {version.counter if version else 0}"
        return (f"{commit} ({', '.join(numbers)})" if numbers else commit) + self._file

    def _begin_step(self) -> None:
        """All that trains may be in an `except`; what it keeps alive must not be kept here."""
        self._handled = id(sys.exception())

    def _agree(self) -> bool:
        """Whether all ranks are at this commit, in a world that is whole. Raises WorldBroken."""
        sync_point.current().raise_if_broken()
        error = sys.exception()
        alike = error is None or id(error) == self._handled or isinstance(error, _ON_ALL_RANKS)
        if not alike:
            log.warning(
                "commit() while %s is handled commits nothing: other ranks may not have met it, and"
                " the step was not trained to its end. Call it after the `except` or `finally`",
                type(error).__name__,
            )
            return False
        version, samplers = self._snapshots.version(), self._samplers().values()
        uneven = any(sampler.tail == "uneven" for sampler in samplers)  # some ranks step once more
        began = time.monotonic()
        times = agree(
            version.counter if version else 0,
            0 if uneven else steps_of(self._values.values()),
            self._loops.interval.times(self._calls),
        )
        self._loops.interval.take(times, time.monotonic() - began)
        return True

    def _write_shards(self, version: Version, shards: dict[str, Any]) -> None:
        """First of all: a snapshot that is there has all its pieces."""
        if self._built:
            last = self._snapshots.version()
            self._built.write(
                *(version, shards, self._values, self._staged), last=last, leaves=self._leaves
            )

    def _write_snapshot(self, version: Version, saved: Saved) -> None:
        parts, tensors = saved
        self._snapshots.write(Draft(version, parts, tensors, self._staged))
        self._calls = 0
        self._committed_at = sync_point.current().steps + 1
        self._commits = version.counter
        self._tell_place()
        counts = [parts[name] for name in self._samplers()]
        self._counted = version, zlib.crc32(repr(counts).encode())

    def _save_values(self, shards: dict[str, Any] | None = None) -> Saved:
        kept = self._kept_values()
        for name, value in kept.items():  # it may have been sharded since it was given
            codecs.refuse_sharded(name, value)
        if self._structures:
            refuse_changed(self._structures, kept)
        there = shards if self._built else None
        return codecs.save_values(self._values, allow_pickle=self._allow_pickle, shards=there)

    def _report_differences(self, names: list[str], rank: int, first: int) -> None:
        """Buffers differ wherever DDP trains, which gives all ranks rank 0's at each forward."""
        if names:
            expected = set(names) <= codecs.buffer_names(self._values)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = "rank %d had committed another %s%s than rank %d, whose counts"
            level = logging.INFO if expected else logging.WARNING
            log.log(level, text, rank, ", ".join(names[:3]), more, first)

    def _report_undone(self) -> None:
        """The file that this rank has loaded is loaded once more: all ranks get the same."""
        if newest := self._snapshots.newest():
            parts, _ = newest.load()
            kept = self._kept_values()
            if names := codecs.set_since(kept, parts, allow_pickle=self._allow_pickle):
                log.warning(
                    "%s set after load() are the file's again: a file is the last commit of a "
                    "training, which goes on from it. To begin another one with its weights, load "
                    "these into the model, by safetensors.torch.load_file",
                    ", ".join(names),
                )

    def _staged(self, slices: Iterator[TensorSlice]) -> Iterator[list[TensorSlice]]:
        """Raises WorldBroken instead of the end: the results of an abort must not be kept."""
        for batch in self._staging.through(slices):
            activity.move()
            yield batch
        sync_point.current().raise_if_broken()

    def _load_snapshot(
        self,
        snapshot: StateSnapshot,
        *,
        strict: bool = True,
        modes: bool = True,
        shards: dict[str, Any] | None = None,
    ) -> str:
        """Set the values; if not `strict`, the names that one of the two sides lacks, in words."""
        parts, tensors = snapshot.load()
        values = self._values
        if self._built and not self._built.there:  # they are made anew with the next world
            values = self._kept_values()
            parts = {name: part for name, part in parts.items() if name not in self._built.names}
        codecs.load_values(
            *(values, parts, tensors),
            allow_pickle=self._allow_pickle,
            strict=strict,
            modes=modes,
            shards=shards,
        )
        self._values.update(values)
        self._drop_gradients()
        lacking = [f"{name} stays as it is" for name in self._values if name not in parts]
        beside = [f"{name} is passed over" for name in parts if name not in self._values]
        return ", ".join(lacking + beside)

    def _kept_values(self) -> dict[str, Any]:
        """All but those that are made for each world."""
        built = self._built.names if self._built else ()
        return {name: value for name, value in self._values.items() if name not in built}

    def _samplers(self) -> dict[str, ElasticSampler | ElasticIterable]:
        kinds = (ElasticSampler, ElasticIterable)
        return {name: value for name, value in self._values.items() if isinstance(value, kinds)}

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


def _version(counter: int, lineage: int) -> Version:
    """That of a commit in this world."""
    return Version(generation(), counter, lineage, rank_and_size()[1])


def _takes_worlds(callback: Callable[..., Any]) -> bool:
    """Whether it can be called with two arguments, and not without."""
    try:
        inspect.signature(callback).bind()
    except TypeError:
        return True
    except ValueError:  # of a builtin nothing is known
        return False
    return False


def _file_that_counts(newest: Version, loaded: list[Version | None]) -> str:
    """The file that is the newest, in words; "" if none is. Those that don't count are logged.

    Raises UsageError, on all ranks, where it is open which counts.
    """
    files = {version.lineage: (version, r) for r, version in enumerate(loaded) if version}
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
        return ""
    if len(files) > 1:
        raise UsageError(
            f"the file that {', and another that '.join(those)}, are of two trainings: which one "
            "counts? Let all nodes load the same, or remove those of another training"
        )
    return f" of the file that rank {loaded.index(newest)} has loaded,"
