"""All ranks agree on the newest snapshot, and those who lack it get it from those who hold it.

Collectives and point-to-point transfers of the default process group, gloo or NCCL; what travels is
the snapshot's bytes, and none go to a rank that has them.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.image import Header, Version
from elastic_etcd.train.snapshot import Snapshot

BUCKET = 64 << 20  # bytes of one transfer; on a GPU it takes as much memory
_HEADER = 128  # bytes; a packed header and room


def world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def agree(mine: Version | None) -> list[Version | None]:
    """Each rank's version, in rank order. Collective."""
    _, size = world()
    if size == 1:
        return [mine]
    fields = [-1, -1, -1] if mine is None else [mine.generation, mine.counter, mine.lineage]
    device = _device()
    found = [torch.empty(3, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(found, torch.tensor(fields, device=device))
    versions = [Version(*row.tolist()) for row in found]
    return [None if version.generation < 0 else version for version in versions]


def spread(snapshot: Snapshot, holders: Sequence[int]) -> None:
    """Copy the newest snapshot of the ranks in `holders` to all others. Collective.

    A transfer that breaks off leaves the receiver's older snapshot as it was. Raises
    MalformedState for one that does not arrive as it was sent.
    """
    rank, size = world()
    for sender, receiver in rounds(holders, size):
        if rank == sender:
            _send(snapshot, receiver)
        elif rank == receiver:
            _receive(snapshot, sender)


def rounds(holders: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom, in an order in which each holder sends at the same time as the others.

    Who has received sends on: with h holders all have it after log2(size / h) rounds.
    """
    having = list(holders)
    lacking = [rank for rank in range(size) if rank not in having]
    while lacking:
        pairs = list(zip(having, lacking, strict=False))
        yield from pairs
        having += [receiver for _, receiver in pairs]
        del lacking[: len(pairs)]


def _send(snapshot: Snapshot, receiver: int) -> None:
    slot = snapshot.newest()
    header = slot.header() if slot else None
    assert slot is not None and header is not None
    device = _device()
    packed = header.pack().ljust(_HEADER, b"\0")
    dist.send(torch.tensor(list(packed), dtype=torch.uint8, device=device), receiver)
    for bucket in slot.body(header.size).split(BUCKET):
        dist.send(bucket.to(device), receiver)


def _receive(snapshot: Snapshot, sender: int) -> None:
    device = _device()
    packed = torch.empty(_HEADER, dtype=torch.uint8, device=device)
    dist.recv(packed, sender)
    header = Header.unpack(bytes(packed.tolist()))
    if header is None:
        raise MalformedState(f"rank {sender} sent no header of a snapshot")
    slot = snapshot.other()
    for bucket in slot.clear(header.size).split(BUCKET):
        if device.type == "cpu":
            dist.recv(bucket, sender)
        else:
            arrived = torch.empty_like(bucket, device=device)
            dist.recv(arrived, sender)
            bucket.copy_(arrived)
    slot.set(header)
    if not slot.whole():
        slot.clear(0)
        raise MalformedState(f"the snapshot from rank {sender} did not arrive as it was sent")
    snapshot.prefer(slot)


def _device() -> torch.device:
    """Where the default process group takes tensors."""
    if "cpu" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
