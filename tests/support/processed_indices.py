"""The sampler that Horovod Elastic describes, for comparison; written anew from its documents.

Each rank keeps the set of indices that it has processed. After a change of the world the survivors'
sets are united, a list of all other indices is made and shuffled, and repeated from its start until
it divides; each rank takes every world-th. horovod.readthedocs.io, "Elastic Horovod".
"""

import math
import random
from collections.abc import Iterator


class ProcessedIndices:
    """One rank's sampler: reset() after each change of the world or of `processed`."""

    def __init__(self, length: int, rank: int, world_size: int, *, seed: int = 0) -> None:
        self.length, self.seed, self.epoch = length, seed, 0
        self.processed: set[int] = set()
        self.reset(rank, world_size)

    def reset(self, rank: int, world_size: int) -> None:
        """List what is left."""
        self.rank, self.world_size = rank, world_size
        self.remaining = [i for i in range(self.length) if i not in self.processed]
        self.size = math.ceil(len(self.remaining) / world_size)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = self.remaining[:]
        random.Random(self.seed + self.epoch).shuffle(order)
        while 0 < len(order) < self.size * self.world_size:
            order += order[: self.size * self.world_size - len(order)]
        self.indices = order[self.rank :: self.world_size]
        return iter(self.indices)

    def record_batch(self, number: int, size: int) -> None:
        """Count this batch of the current iteration as processed."""
        self.processed.update(self.indices[number * size : (number + 1) * size])


def united(samplers: list[ProcessedIndices]) -> list[ProcessedIndices]:
    """What the ranks of a new world do: unite what they know, and reset."""
    every = set().union(*(sampler.processed for sampler in samplers))
    for rank, sampler in enumerate(samplers):
        sampler.processed = set(every)
        sampler.reset(rank, len(samplers))
    return samplers
