"""The values of a state that are made for one world, since what is sharded is bound to its mesh."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from elastic_etcd.errors import UsageError
from elastic_etcd.train.accelerator import current_device, uses_devices
from elastic_etcd.train.collectives import generation, rank_and_size
from elastic_etcd.train.sharded.checkpoint_directory import (
    REPLICATED,
    StoredPiece,
    is_written_here,
    keyed,
    read_newest,
    read_tensors,
)
from elastic_etcd.train.sharded.dtensors import (
    local_of,
    models_of,
    place_of,
    refuse_homeless,
    sharded_like,
    targets_of,
)
from elastic_etcd.train.sharded.durable_saves import DurableSaves, Part
from elastic_etcd.train.sharded.piece_store import Batched, PieceStore, shards_in
from elastic_etcd.train.state import files
from elastic_etcd.train.state.encoding import DTYPES
from elastic_etcd.train.state.snapshot_format import Version
from elastic_etcd.train.state.snapshot_memfds import StateSnapshot, scratch_memfd
from elastic_etcd.train.state.snapshot_store import Snapshots, shortage_of


class BuildWorld(NamedTuple):
    """The world for which `build` makes its values, and this process's place there.

        def build(world: ee.BuildWorld):
            model = fully_shard(Transformer(), mesh=world.mesh())
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    device: this worker's GPU where the process group has NCCL or the like, else the CPU.
    """

    generation: int
    rank: int
    world_size: int
    device: torch.device

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh of all ranks, of one dimension by default.

            world.mesh(2, -1, names=("replicate", "shard"))

        A length of -1 stands for what is left. Raises UsageError where the world has another number
        of ranks than such a mesh.
        """
        lengths = list(shape or (self.world_size,))
        if -1 in lengths:
            known = prod(length for length in lengths if length != -1)
            lengths[lengths.index(-1)] = self.world_size // known
        if prod(lengths) != self.world_size:
            raise UsageError(
                f"mesh{shape} needs another number of ranks than {self.world_size}: let the world "
                "grow and shrink by whole nodes only (--nodes-multiple-of)"
            )
        return init_device_mesh(self.device.type, tuple(lengths), mesh_dim_names=names)


class Built:
    """The values that `build` has made for this world, and their pieces in memory."""

    def __init__(self, build: Callable[[BuildWorld], dict[str, Any]]) -> None:
        if not callable(build):
            raise UsageError(
                "build is a function that makes a state's sharded values: see its docs"
            )
        self._build = build
        self.names: frozenset[str] = frozenset()
        self.there = False  # in this world
        self._fit: frozenset[str] = frozenset()  # sharded tensors that another world can hold
        self._shards: PieceStore | None = None
        self._saves: dict[Path, DurableSaves] = {}

    def begin(self, snapshots: Snapshots, others: Collection[str]) -> dict[str, Any]:
        """Make the values for this world; the state has `others` beside them, in `snapshots`."""
        _forget_meshes()
        rank, size = rank_and_size(launched=False)
        values = self._build(BuildWorld(generation(), rank, size, _device()))
        if not isinstance(values, dict):
            raise UsageError("build(world) returns the values that it makes by name, in a dict")
        if self.names and values.keys() != self.names:
            made, before = ", ".join(values), ", ".join(sorted(self.names))
            raise UsageError(f"build(world) has made {made}, and {before} for the world before")
        for name in values:
            if name in others:
                raise UsageError(f"build(world) makes {name!r}, which the state has already")
        self.names, self.there, self._fit = frozenset(values), True, frozenset()
        self._shards = self._shards or PieceStore(snapshots.number)
        return values

    def write(
        self,
        version: Version,
        tensors: Mapping[str, DTensor],
        values: Mapping[str, Any],
        batched: Batched,
        *,
        last: Version | None,
        leaves: bool,
    ) -> None:
        """Commit the pieces; see PieceStore.write. Raises UsageError for what no world can hold."""
        if self._shards is None or not self.there:
            raise UsageError("commit(): the values of `build` are made where training begins")
        if tensors.keys() != self._fit:  # moments come with the first step
            refuse_homeless(values, tensors)
            self._fit = frozenset(tensors)
        self._shards.write(version, tensors, batched, last=last, leaves=leaves)

    def own(self, snapshot: StateSnapshot, values: Mapping[str, Any]) -> dict[str, DTensor]:
        """The sharded tensors of a commit of this world, from this rank's memory."""
        assert self._shards
        parts, _ = snapshot.load()
        return self._shards.own(snapshot.header.version, shards_in(parts), values)

    def load(self, snapshot: StateSnapshot, values: Mapping[str, Any]) -> dict[str, DTensor]:
        """The sharded tensors of that commit for this world; see PieceStore.load."""
        assert self._shards
        parts, _ = snapshot.load()
        return self._shards.load(snapshot.header.version, shards_in(parts), values)

    def save(
        self,
        root: Path,
        snapshots: Snapshots,
        values: Mapping[str, Any],
        *,
        allow_pickle: bool,
        wait: bool,
        keep: int,
        every: float,
    ) -> None:
        """Write the last commit of this world, if there is one, into a directory in `root`."""
        held = snapshots.newest()
        if held is None or not self.there:
            raise UsageError("nothing to save: commit() first")
        version = held.header.version
        if version.generation == generation():  # each rank has its pieces
            part_of = partial(self._part, held, snapshots, values, allow_pickle=allow_pickle)
            saves = self._saves.setdefault(root, DurableSaves(root))
            saves.begin(version, part_of, wait=wait, keep=keep, every=every)
            if wait:
                saves.finish()

    def finish(self) -> None:
        """Wait for the saves that this world has begun. Collective. Raises OSError."""
        for root in sorted(self._saves):
            self._saves[root].finish()

    def _part(
        self,
        held: StateSnapshot,
        snapshots: Snapshots,
        values: Mapping[str, Any],
        *,
        allow_pickle: bool,
    ) -> Part:
        """This rank's part of that commit, as a copy if there is room."""
        assert self._shards
        replicated = held if rank_and_size(launched=False)[0] == 0 else None
        pieces = self._shards.last(held.header.version)
        with snapshots.growing():
            size = pieces.header.size + (held.header.size if replicated else 0)
            if not (shortage := shortage_of(size)):
                held, pieces = held.copy() if replicated else held, pieces.copy()
        parts, tensors = held.load()
        offsets, local = pieces.load()
        stored = {
            name: StoredPiece(
                torch.Size(offsets["offsets"][name]),
                local[name][0],
                model.shape,
                here=is_written_here(name, model),
            )
            for name, model in models_of(values, shards_in(parts)).items()
        }
        tree = keyed(parts, _views(tensors), stored, allow_pickle=allow_pickle)
        return Part(held if replicated else None, pieces, tree, shortage)

    def read_newest(
        self, root: Path, values: Mapping[str, Any], *, allow_pickle: bool
    ) -> tuple[Path, tuple[StateSnapshot, dict[str, DTensor]]] | None:
        """The newest checkpoint there: the replicated half, and this world's sharded tensors."""
        return read_newest(
            root, partial(self._read_checkpoint, values=values, allow_pickle=allow_pickle)
        )

    def _read_checkpoint(
        self, folder: Path, *, values: Mapping[str, Any], allow_pickle: bool
    ) -> tuple[StateSnapshot, dict[str, DTensor]]:
        snapshot = files.load(folder / REPLICATED, scratch_memfd)
        parts, tensors = snapshot.load()
        parts = {name: part for name, part in parts.items() if name in values}
        names = shards_in(parts)
        shards = {
            name: sharded_like(
                model, torch.empty_like(local_of(model), dtype=DTYPES[names[name][0]])
            )
            for name, model in targets_of(values, names).items()
        }
        read_tensors(folder, keyed(parts, _views(tensors), shards, allow_pickle=allow_pickle))
        return snapshot, shards

    def drop(self) -> None:
        """Forget all pieces."""
        if self._shards:
            self._shards.drop()


def _views(tensors: Mapping[str, tuple[torch.Tensor, bool]]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, (tensor, _) in tensors.items()}


def _forget_meshes() -> None:
    """A mesh of an earlier world is equal to one of the same shape, but its groups are gone.

    torch keeps it with the shardings that operations had (torch 2.13): a new moment would be on it.
    These are the caches of its debug._clear_sharding_prop_cache, a module that needs numpy.
    """
    known = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding  # noqa: SLF001
    fast = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # noqa: SLF001
    for clear in filter(None, (getattr(known, "cache_clear", None), fast, place_of.cache_clear)):
        clear()


def _device() -> torch.device:
    backends = str(dist.get_backend_config())
    return current_device() if uses_devices(backends) else torch.device("cpu")
