"""The values of a state that are made for one world, since what is sharded is bound to its mesh."""

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, debug

from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import device_of, generation, rank_and_size
from elastic_etcd.train.sharded.dtensors import refuse_homeless
from elastic_etcd.train.sharded.piece_store import Batched, PieceStore, shards_in
from elastic_etcd.train.state.snapshot_format import Version
from elastic_etcd.train.state.snapshot_memfds import StateSnapshot


class BuildWorld(NamedTuple):
    """The world for which `build` makes its values, and this process's place there.

        def build(world: ee.BuildWorld):
            model = fully_shard(Transformer(), mesh=world.mesh())
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    device: that of the process group's tensors.
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

    def __init__(self, build: Callable[[BuildWorld], dict[str, Any]], copies: int) -> None:
        if not callable(build):
            raise UsageError(
                "build is a function that makes a state's sharded values: see its docs"
            )
        self._build, self._copies = build, copies
        self.names: frozenset[str] = frozenset()
        self.there = False  # in this world
        self._fit: frozenset[str] = frozenset()  # sharded tensors that another world can hold
        self._shards: PieceStore | None = None

    def begin(self, number: int, others: Collection[str]) -> dict[str, Any]:
        """Make the values for this world; the state has `others` beside them."""
        _forget_meshes()
        rank, size = rank_and_size(launched=False)
        values = self._build(BuildWorld(generation(), rank, size, device_of()))
        if not isinstance(values, dict):
            raise UsageError("build(world) returns the values that it makes by name, in a dict")
        if self.names and values.keys() != self.names:
            made, before = ", ".join(values), ", ".join(sorted(self.names))
            raise UsageError(f"build(world) has made {made}, and {before} for the world before")
        for name in values:
            if name in others:
                raise UsageError(f"build(world) makes {name!r}, which the state has already")
        self.names, self.there, self._fit = frozenset(values), True, frozenset()
        self._shards = self._shards or PieceStore(number, self._copies)
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

    def drop(self) -> None:
        """Forget all pieces."""
        if self._shards:
            self._shards.drop()


def _forget_meshes() -> None:
    """A mesh of an earlier world is equal to one of the same shape, but its groups are gone.

    torch keeps it with the shardings that operations had (torch 2.13): a new moment would be on it.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear:
        clear()
