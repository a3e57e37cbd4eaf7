"""Samplers of batches: whole ones of any size, and the micro-batches of a global batch.

`ElasticBatchSampler` gives each batch once in an epoch, over all worlds. `accumulation_steps` plans
the micro-batches that make up the same global batch in a world of any size.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from operator import index
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import world_of
from elastic_etcd.train.data.permutation import Order
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.data.shards import Tail, slots_of, split_evenly

Batches = Sequence[Sequence[int]]


class ElasticBatchSampler(ElasticSampler):
    """Yields this rank's batches, each a list of indices, for a DataLoader's batch_sampler.

        batches = ee.ElasticBatchSampler(lambda epoch, seed: by_length(epoch, seed))
        state = ee.ElasticState(model=model, batches=batches)
        loader = DataLoader(dataset, batch_sampler=batches)

    batches: a function of epoch and seed that gives the epoch's batches in their order: lists of
    indices of any sizes, the same on all ranks, as many as there are in that epoch.
    seed, tail, rank, world_size: as for ElasticSampler, with batches for indices.

    Everything is counted in batches: record(1) after each step. Raises ValueError as ElasticSampler
    does. docs/sampler.md says what is guaranteed.
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


@dataclass(frozen=True)
class Accumulation:
    """A rank's part of a step of the optimizer.

    For a global batch of 10, micro-batches of 2 and rank 0 of 3: batch_sizes (4, 3, 3),
    micro_batches (2, 2).
    """

    batch_sizes: tuple[int, ...]  # each rank's samples in a step; they differ by at most one
    micro_batches: tuple[int, ...]  # the sizes of this rank's; they differ by at most one
    rank: int
    world_size: int

    @property
    def batch_size(self) -> int:
        """Samples that this rank takes in a step."""
        return self.batch_sizes[self.rank]

    def __len__(self) -> int:
        """How many micro-batches this rank accumulates in a step; ranks may differ by one."""
        return len(self.micro_batches)

    def weight(self, size: int) -> float:
        """The factor for the mean loss of a micro-batch of `size` samples.

        With it, the gradients that DDP averages over ranks, summed over a step's micro-batches, are
        those of the mean loss over the global batch, whatever the world.
        """
        return size * self.world_size / sum(self.batch_sizes)

    def batches(self, sampler: Sampler[int]) -> "MicroBatches":
        """A DataLoader's batch_sampler, which gives this rank's micro-batches of whole steps.

        `sampler` has a length, as ElasticSampler has.
        """
        return MicroBatches(sampler, self.micro_batches, self.batch_sizes)


class MicroBatches:
    """Yields indices in lists of these sizes, over and over; an incomplete step is left out.

    of_ranks: what each rank takes in a step. Raises UsageError for an ElasticSampler that deals out
    its indices in another proportion: ranks would not have equally many steps.
    """

    def __init__(
        self, sampler: Sampler[int], sizes: tuple[int, ...], of_ranks: tuple[int, ...]
    ) -> None:
        self.sampler, self.sizes, self.of_ranks = sampler, sizes, of_ranks

    def __len__(self) -> int:
        return len(self.sampler) // sum(self.sizes) * len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        elastic = isinstance(self.sampler, ElasticSampler)
        with self.sampler._length_of("rest") if elastic else nullcontext():
            steps = len(self.sampler) // sum(self.sizes)
        if elastic and tuple(self.sampler._shards.slots) != slots_of(self.of_ranks):
            raise UsageError(
                f"accumulation_steps plans {list(self.of_ranks)} samples for the ranks, the sampler"
                " deals out in another proportion: some would wait for others for ever. Make the "
                "plan at the start of train, and call sampler.reshard(batch_sizes=plan.batch_sizes)"
            )
        indices = iter(self.sampler)
        for _ in range(steps):
            for size in self.sizes:
                yield list(islice(indices, size))
        deque(indices, maxlen=0)  # so that the sampler knows that its epoch has ended


def accumulation_steps(
    global_batch: int,
    micro_batch: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
) -> Accumulation:
    """Plan the micro-batches of at most `micro_batch` samples that make up `global_batch`.

        plan = ee.accumulation_steps(global_batch=1024, micro_batch=64)
        sampler.reshard(batch_sizes=plan.batch_sizes)
        loader = DataLoader(dataset, batch_sampler=plan.batches(sampler))

    global_batch, micro_batch: numbers of samples, of all ranks in a step and of one rank at once.
    rank, world_size: as for ElasticSampler, to whose reshard() the batch_sizes go where the world
    does not divide the global batch. Returns the plan: `batch_sizes`, `micro_batches`, `weight()`,
    `batches()`. Raises ValueError if a rank would get no sample, or for
    one of the two alone. See docs/sampler.md.
    """
    rank, world_size = world_of(rank, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    if micro_batch < 1:
        raise ValueError(f"a micro-batch has at least one sample, not {micro_batch}")
    if global_batch < world_size:
        raise ValueError(f"a global batch of {global_batch} leaves ranks of {world_size} idle")
    sizes = split_evenly(global_batch, world_size)
    own = sizes[rank]
    return Accumulation(sizes, split_evenly(own, -(-own // micro_batch)), rank, world_size)
