"""Gradient accumulation that makes up the same global batch in a world of any size."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import Sampler

from elastic_etcd.train.collectives import rank_and_size


@dataclass(frozen=True)
class Accumulation:
    """One rank's part of a step of the optimizer.

    batch_sizes: how many samples each rank takes in a step, in rank order. They differ by at most
    one, and their sum is the global batch. micro_batches: the sizes of this rank's micro-batches,
    which differ by at most one. rank, world_size: the world that it is for. For a global batch of
    10, micro-batches of 2 and rank 0 of 3: batch_sizes (4, 3, 3), micro_batches (2, 2).
    """

    batch_sizes: tuple[int, ...]
    micro_batches: tuple[int, ...]
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
        return MicroBatches(sampler, self.micro_batches)


class MicroBatches:
    """Yields indices in lists of these sizes, over and over; an incomplete step is left out."""

    def __init__(self, sampler: Sampler[int], sizes: tuple[int, ...]) -> None:
        self.sampler, self.sizes = sampler, sizes

    def __len__(self) -> int:
        return len(self.sampler) // sum(self.sizes) * len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        steps = len(self.sampler) // sum(self.sizes)
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

    rank, world_size: as for ElasticSampler, to whose reshard() the batch_sizes go where the world
    does not divide the global batch. Raises ValueError if a rank would get no sample.
    """
    if rank is None or world_size is None:
        rank, world_size = rank_and_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    if micro_batch < 1:
        raise ValueError(f"a micro-batch has at least one sample, not {micro_batch}")
    if global_batch < world_size:
        raise ValueError(f"a global batch of {global_batch} leaves ranks of {world_size} idle")
    sizes = _split_evenly(global_batch, world_size)
    own = sizes[rank]
    return Accumulation(sizes, _split_evenly(own, -(-own // micro_batch)), rank, world_size)


def _split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split into so many parts that differ by at most one, larger ones first."""
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)
