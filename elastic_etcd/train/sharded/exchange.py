"""Pieces go from rank to rank, through the default process group: copies, and parts of them.

All is collective. Each message carries its sum, and one that arrives otherwise is refused.
"""

import ctypes
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.train.collectives import device_of, gather, rank_and_size
from elastic_etcd.train.state.snapshot_bytes import sum_of

_SUM = 8  # bytes


def gather_json(value: object) -> list[object]:
    """Every rank's value, in rank order."""
    data = zlib.compress(json.dumps(value).encode(), 1)
    sizes = [size for (size,) in gather([len(data)])]
    mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    there = mine.to(device_of())
    found = [torch.empty_like(there) for _ in sizes]
    dist.all_gather(found, there)
    rows = zip(found, sizes, strict=True)
    return [json.loads(zlib.decompress(_bytes(row.cpu()[:size]))) for row, size in rows]


def exchange(
    sends: Mapping[int, Iterable[torch.Tensor]], sizes: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send messages of bytes to other ranks, and give those that come, by their senders, in order.

    sizes: the lengths of the messages from each rank. Raises MalformedState.
    """
    rank, size = rank_and_size(launched=False)
    for shift in range(1, size):
        to, sender = (rank + shift) % size, (rank - shift) % size
        for message, length in zip_longest(sends.get(to, ()), sizes.get(sender, ())):
            operations = []
            if message is not None:
                own_sum = torch.frombuffer(bytearray(sum_of(message)), dtype=torch.uint8)
                signed = torch.cat([message, own_sum])
                operations.append(dist.P2POp(dist.isend, signed.to(device_of()), to))
            if length is not None:
                arrived = torch.empty(length + _SUM, dtype=torch.uint8, device=device_of())
                operations.append(dist.P2POp(dist.irecv, arrived, sender))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if length is not None:
                found = arrived.cpu()
                if sum_of(found[:length]) != _bytes(found[length:]):
                    raise MalformedState(f"what rank {sender} has sent did not arrive as it was")
                yield sender, found[:length]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Those of a contiguous tensor in host memory."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
