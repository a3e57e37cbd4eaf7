"""The sharded half of an `ElasticState`: built for each world, committed piece by piece.

At a commit each rank writes its pieces into its own memory, and gives copies to ranks on other
nodes. Only when all have theirs is the replicated half written: a commit that is there is whole. In
another world each rank takes the parts of its new pieces from the nearest rank that has them.
"""

import logging
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elastic_etcd.errors import MalformedState, PiecesLost, WrongHere
from elastic_etcd.system.kernel import populate
from elastic_etcd.train.agent_channel import agent
from elastic_etcd.train.collectives import (
    copies,
    exchange,
    gather,
    gather_json,
    generation,
    rank_and_size,
)
from elastic_etcd.train.sharded.dtensors import (
    local_of,
    memory_for,
    models_of,
    piece_of,
    sharded_like,
    targets_of,
)
from elastic_etcd.train.sharded.pieces import (
    Holder,
    Piece,
    Place,
    Transfer,
    partners,
    transfers,
)
from elastic_etcd.train.state.encoding import DTYPES
from elastic_etcd.train.state.snapshot_bytes import TensorSlice
from elastic_etcd.train.state.snapshot_format import Draft, Header, Version
from elastic_etcd.train.state.snapshot_memfds import Memfd, StateSnapshot
from elastic_etcd.train.state.snapshot_store import Snapshots, keep_memfd, shortage_of
from elastic_etcd.train.state.sync import BUCKET
from elastic_etcd.train.sync_point import lose

_MESSAGE = 8 << 20  # bytes of parts that go together: what is packed is still in the cache
Batched = Callable[[Iterator[TensorSlice]], Iterable[Sequence[TensorSlice]]]

log = logging.getLogger(__name__)


class PieceStore:
    """The pieces of one state that this rank has in memory: its own, and copies of others'."""

    def __init__(self, number: int) -> None:
        self._copies = copies()
        self._number = number
        self._last: Version | None = None  # the commit that counts
        self._places: tuple[int, list[list[int]]] | None = None  # of the plan, and its generation
        self._plan: list[list[int]] = []  # the ranks that keep copies of each rank's pieces
        self._sizes: dict[int, int] = {}  # of the copies that this rank keeps, by their ranks
        self._names: list[str] = []  # that the agent keeps
        weakref.finalize(self, Snapshots.let_go, self._names).atexit = False
        self._own = self._pair("own")
        self._kept: list[list[Memfd]] = []  # of other ranks

    def write(
        self,
        version: Version,
        tensors: Mapping[str, DTensor],
        batched: Batched,
        *,
        last: Version | None,
        leaves: bool,
    ) -> None:
        """Commit this rank's pieces, and keep copies of others'. Collective.

        last: the commit that counts until this one does. leaves: this node is about to leave. When
        it returns each rank has what it is to have. Raises UsageError, OSError, MalformedState and
        torch's errors; WorldBroken, or WrongHere without ee.run, where another rank has no memory.
        """
        rank, _ = rank_and_size(launched=False)
        table = {name: piece_of(name, tensor) for name, tensor in tensors.items()}
        parts = {"offsets": {name: list(piece.offset) for name, piece in table.items()}}
        local = {name: local_of(tensor) for name, tensor in tensors.items()}
        draft = Draft(version, parts, local, batched)
        self._last = last
        checksum = zlib.crc32(repr(sorted(table.values())).encode())
        taken = None
        if self._places and self._places[0] == generation():
            with suppress(OSError):  # all are told, and it is tried again
                taken = self._take_memory(draft.size)
        rows = gather([draft.size, _node(), _label(), checksum, leaves, taken is not None])
        places = generation(), [row[:-1] for row in rows]
        if taken is None or places != self._places or not all(row[-1] for row in rows):
            self._make_plan(places[1])
            self._places = places
            taken = self._take_memory_together(draft.size)
        memfd, targets = taken
        snapshot = memfd.set(draft.write(memfd.body(draft.size)))
        self._keep_copies(snapshot, self._plan[rank], targets)
        gather([1])

    def load(
        self,
        version: Version,
        names: Mapping[str, tuple[str, list[int]]],
        values: Mapping[str, Any],
    ) -> dict[str, DTensor]:
        """The sharded tensors of a commit, in this world's pieces. Collective.

        names: of all that were sharded, with dtype and shape. Raises PiecesLost on all ranks alike,
        and UsageError.
        """
        rank, _ = rank_and_size(launched=False)
        models = targets_of(values, names)
        mine = self._pieces_of(version)
        needs = [piece_of(name, model) for name, model in models.items()]
        rows = gather_json([_node(), list(mine), needs])
        holders = [Holder(node, [*map(_piece, have)]) for node, have, _ in rows]
        wanted = [[*map(_piece, pieces)] for _, _, pieces in rows]
        sizes = {name: prod(shape) for name, (_, shape) in names.items()}
        try:
            plan = transfers(holders, wanted, sizes, rank)
        except KeyError as error:
            raise PiecesLost(
                f"a part of {error.args[0]} was on nodes that are gone, more of them at once than "
                f"there were other copies (--copies {self._copies})"
            ) from None
        dtypes = {name: DTYPES[dtype] for name, (dtype, _) in names.items()}
        there = {
            piece: memory_for(piece.name, models[piece.name], dtypes[piece.name]) for piece in needs
        }

        def taken(group: Iterable[Transfer]) -> list[torch.Tensor]:
            return [mine[each.source][each.part.within(each.source)] for each in group]

        def targets(group: Iterable[Transfer]) -> list[torch.Tensor]:
            return [there[each.target][each.part.within(each.target)] for each in group]

        own = [each for each in plan if each.sender == each.receiver == rank]
        for part, target in zip(taken(own), targets(own), strict=True):
            target.copy_(part)
        messages = _in_messages(plan, dtypes)
        sending, arriving = _Buffer(), _Buffer()
        sends = {
            to: (sending.packed(taken(group)) for group in groups)
            for (sender, to), groups in messages.items()
            if sender == rank
        }
        places = {
            sender: (arriving.message(targets(group)) for group in groups)
            for (sender, to), groups in messages.items()
            if to == rank
        }
        turns = {sender: iter(messages[sender, rank]) for sender in places}
        for sender, message in exchange(sends, places):
            for target, part in _split(message, targets(next(turns[sender]))):
                target.copy_(part)  # which is nothing if it is there already
        return {piece.name: sharded_like(models[piece.name], there[piece]) for piece in needs}

    def own(
        self,
        version: Version,
        names: Mapping[str, tuple[str, list[int]]],
        values: Mapping[str, Any],
    ) -> dict[str, DTensor]:
        """As `load`, of a commit of this world, by this rank alone.

        Raises UsageError; WorldBroken, or MalformedState without ee.run, if it has not all of them.
        """
        models, mine = models_of(values, names), self._pieces_of(version)
        pieces = {name: piece_of(name, model) for name, model in models.items()}
        if not mine.keys() >= {*pieces.values()}:
            why = "they are of another world, or damaged"
            lose("restore(): this rank has not all its pieces", MalformedState(why))
        found = {}
        for name, model in models.items():
            piece = mine[pieces[name]]
            found[name] = sharded_like(model, memory_for(name, model, piece.dtype).copy_(piece))
        return found

    def last(self, version: Version) -> StateSnapshot:
        """This rank's own pieces of a commit of this world."""
        held = (memfd.snapshot() for memfd in self._own)
        return next(each for each in held if each and each.header.version == version)

    def drop(self) -> None:
        """Nothing is committed any more."""
        for memfd in chain(self._own, *self._kept):
            memfd.clear()

    def _make_plan(self, rows: Sequence[Sequence[int]]) -> None:
        """Say who keeps whose copies, and ask for the memory: each node for all of its ranks.

        rows: each rank's size of its pieces, node, label, checksum of its table, and whether it
        leaves. Collective. Raises WrongHere, or WorldBroken where another node lacks memory.
        """
        rank, _ = rank_and_size(launched=False)
        places = [Place(node, label, table, bool(leaves)) for _, node, label, table, leaves in rows]
        self._plan = partners(places, self._copies)
        self._sizes = {each: rows[each][0] for each, to in enumerate(self._plan) if rank in to}
        while len(self._kept) < len(self._sizes):
            self._kept.append(self._pair(f"copy{len(self._kept)}"))
        bodies = [rows[rank][0], *self._sizes.values()]
        pairs = zip([self._own, *self._kept], bodies, strict=False)
        lacking = sum(max(0, size - memfd.capacity) for pair, size in pairs for memfd in pair)
        asked = gather([lacking])
        here = [n for n, place in enumerate(places) if place.node == places[rank].node]
        shortage = shortage_of(sum(asked[n][0] for n in here))
        _raise_together(
            WrongHere(
                f"two commits of the pieces of {len(here)} ranks on this node and their copies of "
                f"others' (--copies {self._copies}): {shortage}. Less is needed on each of more "
                "nodes, or with fewer copies"
            )
            if shortage
            else None
        )

    def _take_memory(self, own: int) -> tuple[Memfd, dict[int, Memfd]]:
        """Memory for this rank's pieces and, by the plan, for those of others. Raises OSError."""
        for unused in chain(*self._kept[len(self._sizes) :]):  # since another world
            if (held := unused.snapshot()) is None or held.header.version != self._last:
                unused.release()
        pairs = zip(self._sizes.items(), self._kept, strict=False)
        return self._free(self._own, own), {
            sender: self._free(pair, size) for (sender, size), pair in pairs
        }

    def _take_memory_together(self, own: int) -> tuple[Memfd, dict[int, Memfd]]:
        """The same, or an error on all ranks. Collective."""
        try:
            taken = self._take_memory(own)
        except OSError as error:
            _raise_together(error)
            raise
        _raise_together(None)
        return taken

    def _keep_copies(
        self,
        own: StateSnapshot,
        to: Sequence[int],
        targets: Mapping[int, Memfd],
    ) -> None:
        """Give this rank's snapshot to those ranks, and keep those of others."""
        header = torch.frombuffer(bytearray(own.header.pack()), dtype=torch.uint8)
        sends = {rank: [header, *own.body.split(BUCKET)] for rank in to}
        headers = {sender: torch.empty_like(header) for sender in targets}
        places = {
            sender: [headers[sender], *target.body(self._sizes[sender]).split(BUCKET)]
            for sender, target in targets.items()
        }
        for _ in exchange(sends, places):
            pass
        for sender, target in targets.items():
            arrived = Header.unpack(bytes(headers[sender].tolist()))
            if arrived is None:
                raise MalformedState(f"the pieces from rank {sender} did not arrive as they were")
            target.set(arrived)

    def _pieces_of(self, version: Version) -> dict[Piece, torch.Tensor]:
        """Each piece of that commit that is here, and intact."""
        found: dict[Piece, torch.Tensor] = {}
        for memfd in chain(self._own, *self._kept_before()):
            snapshot = memfd.snapshot()
            if snapshot is None or snapshot.header.version != version:
                continue
            if not snapshot.is_intact():
                log.error("pieces of commit %d are damaged: a copy counts", version.counter)
                continue
            parts, tensors = snapshot.load()
            for name, (tensor, _) in tensors.items():
                found[Piece(name, tuple(parts["offsets"][name]), tuple(tensor.shape))] = tensor
        return found

    def _kept_before(self) -> list[list[Memfd]]:
        """The copies, also those that the agent keeps from before this process."""
        channel = agent()
        while (
            channel and (fd := channel.recall(self._name(f"copy{len(self._kept)}", 0))) is not None
        ):
            os.close(fd)
            self._kept.append(self._pair(f"copy{len(self._kept)}"))
        return self._kept

    def _free(self, pair: Sequence[Memfd], size: int) -> Memfd:
        """The one of two that has nothing of the commit that counts, for a body of this size.

        The other one may have a newer commit, which was broken off before it counted.
        """
        there = [(memfd, memfd.snapshot()) for memfd in pair]
        free = next(m for m, held in there if held is None or held.header.version != self._last)
        if free.capacity > 2 * size:  # this world's pieces are smaller
            free.release()
        free.clear(size)
        return free

    def _pair(self, what: str) -> list[Memfd]:
        names = [self._name(what, half) for half in (0, 1)]
        self._names += names
        return [Memfd(keep_memfd(agent(), name)) for name in names]

    def _name(self, what: str, half: int) -> str:
        return f"shards{self._number}.{what}.{half}"


def _node() -> int:
    return int(os.environ.get("GROUP_RANK", "0"))


def _label() -> int:
    return zlib.crc32(os.environ.get("ELASTIC_ETCD_TOPOLOGY_LABEL", "").encode())


def _raise_together(lacking: Exception | None) -> None:
    """Raise it, and on all other ranks that somebody lacks memory. Collective."""
    rows = gather([lacking is not None])
    if lacking:
        raise lacking
    if [1] in rows:
        lose("nothing is committed", WrongHere(f"rank {rows.index([1])} has no memory for it"))


def shards_in(parts: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """The sharded tensors of a snapshot's parts: the dtype and the shape of each, by name."""
    found: dict[str, tuple[str, list[int]]] = {}

    def look(tree: Any) -> None:
        if isinstance(tree, list):
            for each in tree:
                look(each)
        elif isinstance(tree, dict):
            if "$shard" in tree:
                name, dtype, shape = tree["$shard"]
                found[name] = dtype, shape
            else:
                for each in tree.values():
                    look(each)

    look(dict(parts))
    return found


def _in_messages(
    plan: Sequence[Transfer], dtypes: Mapping[str, torch.dtype]
) -> dict[tuple[int, int], list[list[Transfer]]]:
    """The transfers between two ranks, so many in each message as fit into it."""
    found: dict[tuple[int, int], list[list[Transfer]]] = {}
    left: dict[tuple[int, int], int] = {}
    # The larger numbers first, so that each begins where it can be read.
    for each in sorted(plan, key=lambda each: -dtypes[each.part.name].itemsize):
        pair = each.sender, each.receiver
        if each.sender == each.receiver:
            continue
        size = _nbytes(each, dtypes)
        if left.get(pair, 0) < size:
            found.setdefault(pair, []).append([])
            left[pair] = max(_MESSAGE, size)
        left[pair] -= size
        found[pair][-1].append(each)
    return found


def _nbytes(each: Transfer, dtypes: Mapping[str, torch.dtype]) -> int:
    return each.part.size * int(dtypes[each.part.name].itemsize)


class _Buffer:
    """Memory through which messages go, one after the other; a large part alone needs none."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def packed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The message with these parts."""
        message = self.message(parts)
        for part, its in _split(message, parts):
            its.copy_(part)
        return message

    def message(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The memory of a message with such parts."""
        if len(parts) == 1 and parts[0].is_contiguous():
            return parts[0].view(-1).view(torch.uint8)
        size = sum(part.nbytes for part in parts)
        if self._memory.nbytes < size:
            self._memory = torch.empty(max(size, _MESSAGE), dtype=torch.uint8, device="cpu")
            populate(self._memory.data_ptr(), self._memory.nbytes)
        return self._memory[:size]


def _split(
    message: torch.Tensor, parts: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part, and its memory in a message."""
    start = 0
    for part in parts:
        end = start + part.nbytes
        yield part, message[start:end].view(part.dtype).view(part.shape)
        start = end


def _piece(row: Any) -> Piece:
    name, offset, shape = row
    return Piece(name, tuple(offset), tuple(shape))
