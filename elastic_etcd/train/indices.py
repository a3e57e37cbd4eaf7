"""The stream of a rank's indices: from places in a deal, over positions, to the data set's indices.

Made in blocks by torch and handed out at the speed of a list: no Python runs per index.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from operator import length_hint
from typing import Any, Protocol, Self, cast

import torch

from elastic_etcd.train.dealing import Deal
from elastic_etcd.train.permutation import Order

_FIRST_BLOCK, _BLOCK = 256, 1 << 15  # the first one at once, the others for throughput


class SizedIndices(Protocol):
    """A sampler of known length."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class Resumable(Protocol):
    """What a StatefulDataLoader's state of an iterator is made of; ElasticSampler has it."""

    def handed_state(self) -> dict[str, Any]: ...
    def load_handed_state(self, state: Mapping[str, Any]) -> None: ...


class Indices(chain[int]):
    """An iterator over indices with the state that torchdata's StatefulDataLoader asks for."""

    sampler: Resumable

    @classmethod
    def of(cls, sampler: Resumable, blocks: Iterator[Iterator[int]]) -> Self:
        """Iterate over these blocks, which `sampler` makes."""
        indices = cast("Self", cls.from_iterable(blocks))
        indices.sampler = sampler
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The state after what is handed out: the loader knows what of it was delivered."""
        return self.sampler.handed_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; possible before the first index is taken."""
        self.sampler.load_handed_state(state)


class Hand:
    """What one rank gets in a deal from its `start`-th position on, and how far that has gone."""

    def __init__(self, deal: Deal, order: Order, start: int) -> None:
        self.start = start
        self.ended = False  # all are handed out, and it was asked for more
        self.void = False
        self._deal, self._order, self._made = deal, order, start
        self._block: Iterator[int] = iter(())  # what remains of the block made last

    @property
    def handed(self) -> int:
        """How many positions of the deal are handed out, those before `start` included."""
        return self._made - length_hint(self._block)

    def blocks(self) -> Iterator[Iterator[int]]:
        """The indices, in blocks. Raises RuntimeError once `void` is set."""
        size = _FIRST_BLOCK
        while self._made < self._deal.size and not self.void:
            stop = min(self._made + size, self._deal.size)
            self._block = iter(self._order(positions(self._deal, self._made, stop)).tolist())
            self._made = stop
            yield self._block
            size = _BLOCK
        if self.void:
            raise RuntimeError("this iterator is void: the sampler has begun anew since")
        self.ended = True


def positions(deal: Deal, start: int, stop: int) -> torch.Tensor:
    """The start-th to stop-th position that the deal's rank gets, as int64 in 0...length-1."""
    turns = torch.arange(start, stop)
    if len(deal.own) == 1:
        dealt = turns * deal.width + deal.own[0]
    else:
        dealt = turns // len(deal.own) * deal.width
        dealt += torch.tensor(deal.own)[turns % len(deal.own)]
    ranges = [*deal.left, range(deal.length, deal.length + deal.width)]  # the pad comes last
    if len(deal.left) == 1 and deal.left[0] == range(deal.left[0].start, deal.length):
        dealt += deal.left[0].start
    else:
        offsets = torch.tensor([0, *accumulate(map(len, deal.left))])
        part = torch.searchsorted(offsets, dealt, right=True) - 1
        dealt -= offsets[part]
        dealt *= torch.tensor([piece.step for piece in ranges])[part]
        dealt += torch.tensor([piece.start for piece in ranges])[part]
    return dealt % deal.length if deal.tail == "pad" and stop == deal.size else dealt
