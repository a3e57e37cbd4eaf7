"""Pieces go from rank to rank, through the default process group: copies, and parts of them.

All is collective. A message that does not arrive with its sum is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist

from elastic_etcd.errors import MalformedState
from elastic_etcd.protocol import activity
from elastic_etcd.train.collectives import device_of, rank_and_size, refuse_garbage
from elastic_etcd.train.state.snapshot_bytes import sum_of

_SUM = 8  # bytes


def exchange(
    sends: Mapping[int, Iterable[torch.Tensor]], places: Mapping[int, Iterable[torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Send messages of bytes to other ranks, and give those that come, by their senders, in order.

    places: the memory, of this machine, for the messages of each rank: each is given when it is
    filled. Raises MalformedState.
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
