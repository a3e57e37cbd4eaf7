"""The place of this process among the ranks, and what all ranks exchange beside training.

`gather` is a collective of a few numbers; `exchange` sends pieces from rank to rank, and refuses
one that does not arrive with its sum; `ee.store` is torch's store of the generation.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.protocol import activity
from elastic_etcd.system.sockets import short_lookups
from elastic_etcd.train import sync_point
from elastic_etcd.train.accelerator import current_device
from elastic_etcd.train.state.snapshot_bytes import bytes_of, sum_of

_SUM = 8  # bytes


class World(NamedTuple):
    """A world that this process has trained in, and its place there."""

    generation: int
    rank: int
    world_size: int


def rank_and_size(*, launched: bool = True) -> tuple[int, int]:
    """Rank and world size of the default process group; (0, 1) without one.

    launched: before there is one, believe RANK and WORLD_SIZE.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if launched and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def world_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """These two, or `rank_and_size()` for neither. Raises ValueError for one of them alone."""
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    return rank_and_size() if rank is None or world_size is None else (rank, world_size)


def generation() -> int:
    """This process's; 0 without our launcher."""
    return int(os.environ.get("ELASTIC_ETCD_GENERATION", "0"))


def copies() -> int:
    """How many nodes are to have each part of what is sharded: --copies."""
    return int(os.environ.get("ELASTIC_ETCD_COPIES", "2"))


def gather(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every rank's numbers, in rank order; collective on `group`. All ranks give as many.

    Raises WorldBroken.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group)
    found: list[list[int]] = [row.tolist() for row in gathered]
    refuse_garbage()
    return found


def refuse_garbage() -> None:
    """After a collective, when its numbers are here: one of NCCL's that was aborted raises nothing.

    Raises WorldBroken. Collectives of torch's need it, `gather` and what uses it does not.
    """
    sync_point.current().raise_if_broken()


def gather_json(value: object) -> list[Any]:
    """Every rank's value, in rank order; collective."""
    data = zlib.compress(json.dumps(value).encode(), 1)
    sizes = [size for (size,) in gather([len(data)])]
    mine = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    there = mine.to(device_of())
    found = [torch.empty_like(there) for _ in sizes]
    dist.all_gather(found, there)
    rows = [row.cpu()[:size] for row, size in zip(found, sizes, strict=True)]
    refuse_garbage()
    return [json.loads(zlib.decompress(bytes_of(row))) for row in rows]


def broadcast(tensor: torch.Tensor, sender: int) -> torch.Tensor:
    """The sender's tensor, in host memory; all ranks give it one of this shape. Collective."""
    there = tensor.to(device_of())
    dist.broadcast(there, sender)
    arrived = there.cpu()
    refuse_garbage()
    return arrived


def exchange(
    sends: Mapping[int, Iterable[torch.Tensor]], places: Mapping[int, Iterable[torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send messages of bytes to other ranks, and give those that come, by their senders, in order.

    Collective, on the default group. places: the memory, of this machine, for the messages of each
    rank: each is given when it is filled. Raises MalformedState.
    """
    rank, size = rank_and_size(launched=False)
    device = device_of()
    for shift in range(1, size):
        to, sender = (rank + shift) % size, (rank - shift) % size
        for message, place in zip_longest(sends.get(to, ()), places.get(sender, ())):
            operations = []
            if message is not None:
                sent = (message.to(device), _sum_in(message).to(device))
                operations += [dist.P2POp(dist.isend, each, to) for each in sent]
            if place is not None:
                arriving = place.to(device)  # the place itself, where it can be
                its_sum = torch.empty(_SUM, dtype=torch.uint8, device=device)
                coming = (arriving, its_sum)
                operations += [dist.P2POp(dist.irecv, each, sender) for each in coming]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            activity.move()
            if place is not None:
                if arriving is not place:
                    place.copy_(arriving)
                if not torch.equal(_sum_in(place), its_sum.cpu()):
                    refuse_garbage()
                    raise MalformedState(f"what rank {sender} has sent did not arrive as it was")
                yield sender, place


def _sum_in(message: torch.Tensor) -> torch.Tensor:
    """The sum of a message, to be sent after it."""
    return torch.frombuffer(bytearray(sum_of(message)), dtype=torch.uint8)


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of the tensors that a process group takes; None: the default group.

    A group that takes both kinds ("cpu:gloo,cuda:nccl") is given host memory.
    """
    if "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return current_device()


def store() -> dist.Store:
    """Connect to the store that all ranks of this generation share, also before a process group.

        ee.store().set(f"address/{rank}", address)

    Keys are under a prefix of their own and go with the generation: a value that has to outlive it
    belongs into the state. Each call makes a connection; a wait on it keeps other threads from
    using it. Without a launcher the store is in this process. Raises torch's DistError when the
    store does not answer. The methods are those of torch.distributed.Store.
    """
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        return _store_of_this_process()
    with short_lookups(address):
        client = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store
    number = os.environ.get("ELASTIC_ETCD_GENERATION", restarts)
    return dist.PrefixStore(f"ee.store/{number}", client)


@cache
def _store_of_this_process() -> dist.Store:
    return dist.HashStore()
