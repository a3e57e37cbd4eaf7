"""All ranks agree on the newest snapshot, and those who lack it get it from those who hold it.

They do so by collectives and point-to-point transfers of the default process group, gloo or NCCL.
The snapshot's bytes travel, and none go to a rank that has them. If the newest snapshots of ranks
are one version, but not the same bytes, those of most ranks count, or else the lowest rank's.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train.collectives import (
    broadcast,
    device_of,
    gather,
    rank_and_size,
    refuse_garbage,
)
from elastic_etcd.train.state.snapshot_bytes import sums_of
from elastic_etcd.train.state.snapshot_format import Header, Version
from elastic_etcd.train.state.snapshot_memfds import Memfd, StateSnapshot
from elastic_etcd.train.state.snapshot_store import Inventory, Snapshots

BUCKET = 64 << 20  # bytes of one transfer; on a GPU it takes as much memory
BLOCK = 64 << 10  # bytes; two snapshots are compared by so many
_HEADER = struct.Struct("<10q")  # a packed header, as numbers
_NO_VERSION = Version(-1, -1, -1)


def gather_inventories(mine: Inventory) -> list[Inventory]:
    """Each rank's, in rank order. Collective."""
    if rank_and_size(launched=False)[1] == 1:
        return [mine]
    header = mine.newest.pack() if mine.newest else b""
    words = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    rows = gather([*words, *astuple(mine.loaded or _NO_VERSION), mine.node])
    return [_read_inventory(*row) for row in rows]


def _read_inventory(*numbers: int) -> Inventory:
    *words, generation, counter, lineage, world_size, node = numbers
    loaded = Version(generation, counter, lineage, world_size)
    newest = Header.unpack(_HEADER.pack(*words))
    return Inventory(newest, None if loaded == _NO_VERSION else loaded, node)


def holders_of(version: Version, inventories: Sequence[Inventory]) -> list[int]:
    """The ranks that have it; first the lowest of those whose bytes most of them have."""
    found = {r: one.newest for r, one in enumerate(inventories) if one.newest}
    held = {rank: header.digest for rank, header in found.items() if header.version == version}
    counts = Counter(held.values())
    return sorted(held, key=lambda rank: -counts[held[rank]])


def even_out(
    snapshots: Snapshots, holders: Sequence[int], inventories: Sequence[Inventory]
) -> list[str]:
    """Give the first one's bytes to those of `holders` that have others. Collective.

    Only blocks that differ travel. It returns the names of the values that differed on this rank.
    A transfer that breaks off leaves all as it was. Raises MalformedState.
    """
    wanted = inventories[holders[0]].newest
    assert wanted is not None
    if all(inventories[rank].newest == wanted for rank in holders):
        return []
    rank, _ = rank_and_size(launched=False)
    mine = snapshots.newest() if rank in holders else None
    same, other = (mine, None) if mine and mine.header == wanted else (None, mine)
    source = same.body if same else None
    sums = torch.zeros(-(-wanted.size // BLOCK), dtype=torch.int64, device="cpu")
    sums = broadcast(sums if source is None else block_sums(source), holders[0])
    lacking = torch.zeros(len(sums), dtype=torch.uint8, device="cpu")
    if other:
        ours = block_sums(other.body)[: len(sums)]
        lacking.fill_(1)[: len(ours)] = ours != sums[: len(ours)]
        if other.header.size != wanted.size:
            lacking[-1] = 1
    dirty = _any_rank(lacking).nonzero().flatten().tolist()
    copy, target = None, None
    if other:
        copy = snapshots.clear_older(wanted.size)
        target = copy.body(wanted.size)
        both = min(wanted.size, other.header.size)
        target[:both].copy_(other.body[:both])
    most = BUCKET // BLOCK or 1
    for first in range(0, len(dirty), most):
        _pass_on(dirty[first : first + most], wanted.size, holders[0], source, target)
    if other is None or copy is None:
        return []
    snapshot = _set_received(copy, wanted, holders[0])
    names = differences(other, snapshot)
    snapshots.prefer(snapshot)
    return names


def block_sums(body: torch.Tensor) -> torch.Tensor:
    """The sum of each block, as the digest has it of a chunk."""
    return torch.frombuffer(bytearray(b"".join(sums_of(body.split(BLOCK)))), dtype=torch.int64)


def _pass_on(
    blocks: Sequence[int],
    size: int,
    sender: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
) -> None:
    """Broadcast these blocks of `source`, which the sender has, into `target`, if there is one."""
    ranges = [(block * BLOCK, min((block + 1) * BLOCK, size)) for block in blocks]
    if source is not None:
        packed = torch.cat([source[start:end] for start, end in ranges])
    else:
        packed = torch.empty(
            sum(end - start for start, end in ranges), dtype=torch.uint8, device="cpu"
        )
    arrived = broadcast(packed, sender)
    if target is not None:
        parts = arrived.split([end - start for start, end in ranges])
        for (start, end), part in zip(ranges, parts, strict=True):
            target[start:end] = part


def differences(one: StateSnapshot, other: StateSnapshot) -> list[str]:
    """The names of values and tensors that are not the same in both snapshots."""
    (parts, tensors), (others, other_tensors) = one.load(), other.load()
    names = [name for name, part in others.items() if parts.get(name) != part]
    for name, (tensor, _) in other_tensors.items():
        found, _ = tensors.get(name, (None, False))
        if found is None or not _is_same(found, tensor):
            names.append(name)
    return names


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other))))


def _any_rank(flags: torch.Tensor) -> torch.Tensor:
    there = flags.to(device_of())
    dist.all_reduce(there, dist.ReduceOp.MAX)
    found = there.cpu()
    refuse_garbage()
    return found


def compare_counts(counted: tuple[Version, int] | None) -> None:
    """Compare the counts of the ranks' samplers at the same commit. Collective.

    counted: this rank's latest commit and a digest of its counts; None if it does not know. Raises
    UsageError, on all ranks alike, if two differ: samples would be lost or used twice.
    """
    if rank_and_size(launched=False)[1] == 1:
        return
    version, digest = counted or (_NO_VERSION, -1)
    seen: dict[Version, tuple[int, int]] = {}
    for rank, row in enumerate(gather([*astuple(version), digest])):
        first, known = seen.setdefault(Version(*row[:4]), (rank, row[4]))
        if row[4] != known:
            where = f"ranks {first} and {rank} have committed samplers that differ"
            cure = "count batches with state.steps(loader), or call sampler.agree() before a commit"
            raise UsageError(f"{where}, since they have recorded different numbers: {cure}")


def spread(
    snapshots: Snapshots, holders: Sequence[int], inventories: Sequence[Inventory]
) -> StateSnapshot:
    """Copy the newest snapshot of the ranks in `holders` to all others; it is returned. Collective.

    The first rank of a node gets it from another node, and the others take it from that one's
    memory. A transfer that breaks off leaves the receiver's older one as it was. Raises
    MalformedState for one that does not arrive as it was sent.
    """
    rank, size = rank_and_size(launched=False)
    wanted = inventories[holders[0]].newest
    assert wanted is not None
    newest = snapshots.newest() if rank in holders else None
    having = [*holders, *first_of_nodes(holders, [each.node for each in inventories])]
    newest = _transfer(snapshots, newest, wanted, transfers(holders, having))
    if len(having) < size:
        gather([newest is not None])  # the others wait until the first ranks of their nodes have it
        newest = newest or snapshots.take(wanted)
        found = gather([newest is not None])
        having = [other for other, (has,) in enumerate(found) if has]
        newest = _transfer(snapshots, newest, wanted, transfers(having, range(size)))
    snapshots.begin_anew()
    assert newest is not None
    return newest


def first_of_nodes(holders: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """The ranks that get a snapshot over the network, since no other of their node has it."""
    reached = {nodes[rank] for rank in holders}
    first = []
    for rank, node in enumerate(nodes):
        if rank not in holders and (node < 0 or node not in reached):
            first.append(rank)
            reached.add(node)
    return first


def transfers(holders: Sequence[int], ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Senders and receivers of `ranks`, in an order in which all holders send at the same time.

    A receiver sends on: with h holders all have it after log2(ranks / h) in sequence.
    """
    having = list(holders)
    lacking = [rank for rank in ranks if rank not in having]
    while lacking:
        pairs = list(zip(having, lacking, strict=False))
        yield from pairs
        having += [receiver for _, receiver in pairs]
        del lacking[: len(pairs)]


def _transfer(
    snapshots: Snapshots,
    newest: StateSnapshot | None,
    wanted: Header,
    pairs: Iterable[tuple[int, int]],
) -> StateSnapshot | None:
    """The wanted snapshot, if this rank has it after its part of these."""
    rank, _ = rank_and_size(launched=False)
    for sender, receiver in pairs:
        if rank == receiver:
            with snapshots.receiving(wanted.size) as memfd:
                for bucket in memfd.body(wanted.size).split(BUCKET):
                    _receive_bucket(bucket, sender)
                newest = _set_received(memfd, wanted, sender)
        elif rank == sender:
            assert newest is not None
            for bucket in newest.body.split(BUCKET):
                dist.send(bucket.to(device_of()), receiver)
    return newest


def _set_received(memfd: Memfd, header: Header, sender: int) -> StateSnapshot:
    """The snapshot in the memory file. Raises MalformedState if it is not as it was sent."""
    snapshot = memfd.set(header)
    if not snapshot.is_intact():
        memfd.clear()
        raise MalformedState(f"the snapshot from rank {sender} did not arrive as it was sent")
    return snapshot


def _receive_bucket(bucket: torch.Tensor, sender: int) -> None:
    device = device_of()
    arrived = bucket if device.type == "cpu" else torch.empty_like(bucket, device=device)
    dist.recv(arrived, sender)
    if arrived is not bucket:
        bucket.copy_(arrived)
