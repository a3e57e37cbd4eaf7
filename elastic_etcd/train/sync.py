"""All ranks agree on the newest snapshot, and those who lack it get it from those who hold it.

They do so by collectives and point-to-point transfers of the default process group, gloo or NCCL.
What travels is the snapshot's bytes, and none go to a rank that has them.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.collectives import device_of, gather, rank_and_size
from elastic_etcd.train.snapshot import Header, MemfdPair, StateSnapshot, Version

BUCKET = 64 << 20  # bytes of one transfer; on a GPU it takes as much memory
_HEADER = 128  # bytes; a packed header and room


def gather_versions(mine: Version | None) -> list[Version | None]:
    """Each rank's version, in rank order. Collective."""
    _, size = rank_and_size(launched=False)
    if size == 1:
        return [mine]
    fields = [-1, -1, -1] if mine is None else [mine.generation, mine.counter, mine.lineage]
    versions = [Version(*row) for row in gather(fields)]
    return [None if version.generation < 0 else version for version in versions]


def spread(memfds: MemfdPair, holders: Sequence[int]) -> StateSnapshot:
    """Copy the newest snapshot of the ranks in `holders` to all others. Collective.

    It returns the snapshot. A transfer that breaks off leaves the receiver's older one as it was.
    Raises MalformedState for one that does not arrive as it was sent.
    """
    rank, size = rank_and_size(launched=False)
    newest = memfds.newest() if rank in holders else None
    for sender, receiver in transfers(holders, size):
        if rank == receiver:
            newest = _receive_snapshot(memfds, sender)
        elif rank == sender:
            assert newest is not None
            _send_snapshot(newest, receiver)
    assert newest is not None
    return newest


def transfers(holders: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom, in an order in which each holder sends at the same time as the others.

    Who has received sends on: with h holders all have it after log2(size / h) in sequence.
    """
    having = list(holders)
    lacking = [rank for rank in range(size) if rank not in having]
    while lacking:
        pairs = list(zip(having, lacking, strict=False))
        yield from pairs
        having += [receiver for _, receiver in pairs]
        del lacking[: len(pairs)]


def _send_snapshot(snapshot: StateSnapshot, receiver: int) -> None:
    device = device_of()
    header = snapshot.header.pack().ljust(_HEADER, b"\0")
    dist.send(torch.tensor(list(header), dtype=torch.uint8, device=device), receiver)
    for bucket in snapshot.body.split(BUCKET):
        dist.send(bucket.to(device), receiver)


def _receive_snapshot(memfds: MemfdPair, sender: int) -> StateSnapshot:
    header = _receive_header(sender)
    memfd = memfds.older()
    for bucket in memfd.clear(header.size).split(BUCKET):
        _receive_bucket(bucket, sender)
    snapshot = memfd.set(header)
    if not snapshot.is_intact():
        memfd.clear()
        raise MalformedState(f"the snapshot from rank {sender} did not arrive as it was sent")
    memfds.prefer(snapshot)
    return snapshot


def _receive_header(sender: int) -> Header:
    packed = torch.empty(_HEADER, dtype=torch.uint8, device=device_of())
    dist.recv(packed, sender)
    header = Header.unpack(bytes(packed.tolist()))
    if header is None:
        raise MalformedState(f"rank {sender} sent no header of a snapshot")
    return header


def _receive_bucket(bucket: torch.Tensor, sender: int) -> None:
    device = device_of()
    if device.type == "cpu":
        dist.recv(bucket, sender)
    else:
        arrived = torch.empty_like(bucket, device=device)
        dist.recv(arrived, sender)
        bucket.copy_(arrived)
