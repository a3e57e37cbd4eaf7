"""A sampler of whole batches, of whatever sizes: each batch once in an epoch, over all worlds."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from operator import index
from typing import Any, cast

import torch

from elastic_etcd.train.data.permutation import Order
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.data.shards import Tail

Batches = Sequence[Sequence[int]]


class ElasticBatchSampler(ElasticSampler):
    """Yields this rank's batches, each a list of indices, for a DataLoader's batch_sampler.

    batches: is called with epoch and seed, and gives the epoch's batches in their order: lists of
    indices of any sizes, the same on all ranks, as many as there are in that epoch. They are handed
    out as ElasticSampler does indices, which says what `tail`, `rank` and `world_size` are, with
    batches for indices. All that is counted is batches: record(1) after each step.
    """

    def __init__(
        self,
        batches: Callable[[int, int], Batches],
        *,
        seed: int = 0,
        tail: Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        world: dict[str, Any] = {"rank": rank, "world_size": world_size}
        super().__init__(0, shuffle=cast("Any", batches), seed=seed, tail=tail, **world)

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]  # lists, not ints
        """Go on after what is recorded. A second iterator makes the first one void."""
        return cast("Iterator[list[int]]", super().__iter__())

    def record(self, batches: int = 1) -> None:  # type: ignore[override]  # batches, not samples
        """This rank has trained on this many of its next batches.

        Raises ValueError if the iterator has not handed out so many, TypeError for no number.
        """
        super().record(index(batches))

    def _make_order(self, seed: int, epoch: int) -> Order:
        return _BatchOrder(cast("Any", self.shuffle)(epoch, seed))

    def _blocks(self) -> Iterator[Iterator[list[int]]]:  # type: ignore[override]  # lists, not ints
        order = self._order_of_epoch()
        assert isinstance(order, _BatchOrder)
        for numbers in super()._blocks():
            yield map(order.batch, numbers)


class _BatchOrder:
    """The batches of an epoch; as an order, that of their numbers."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def batch(self, number: int) -> list[int]:
        batch = self._batches[number]
        return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)

    def digest(self) -> int:
        """56 bits that tell whether two ranks have the same batches."""
        data = blake2b(digest_size=7)
        for number in range(len(self)):
            data.update(repr(self.batch(number)).encode())
        return int.from_bytes(data.digest())
