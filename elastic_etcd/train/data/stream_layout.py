"""Which rank and worker reads which samples of which of a stream's files.

The files of an epoch lie one after the other in its order, and so their samples have positions. A
file of unknown length takes more positions than any file has samples. The samples that remain of an
epoch are a short tuple of ranges of positions. Without I/O and randomness.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from elastic_etcd.train.data.shards import Tail, merge_ranges, slice_ranges, split_evenly

_UNKNOWN = 1 << 40  # positions of a file of unknown length
MOST_FILES = 1 << 22  # of unknown length: positions are int64

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class FileRange:
    """Samples start...stop-1 of a file."""

    position: int  # of the first one, in the epoch
    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The files of an epoch and the positions of their samples."""

    order: Sequence[int]  # the files, as numbers
    lengths: Sequence[int] | None  # by file; None: unknown

    @cached_property
    def starts(self) -> list[int]:
        """The first position of each file in the order, and after the last one the end."""
        lengths = self.lengths
        sizes = (_UNKNOWN if lengths is None else lengths[file] for file in self.order)
        return list(accumulate(sizes, initial=0))

    @property
    def end(self) -> int:
        """Positions from here on are repetitions from the beginning."""
        return self.starts[-1]

    def file_ranges(self, ranges: Sequence[range]) -> Iterator[FileRange]:
        """These positions, file by file."""
        for part in ranges:
            position = part.start
            while position < part.stop:
                inside = position % self.end
                place = bisect_right(self.starts, inside) - 1
                size = min(part.stop - position, self.starts[place + 1] - inside)
                start = inside - self.starts[place]
                yield FileRange(position, self.order[place], start, start + size)
                position += size

    def split(self, ranges: Ranges, parts: int, tail: Tail) -> tuple[list[Ranges], Ranges]:
        """So many parts of these ranges, and the positions that `tail` gives to nobody.

        Known lengths make parts of one size, but for the tail: see ElasticSampler. Else each has
        ranges of as many files as any other, or one less.
        """
        if self.lengths is None:
            found = self.file_ranges(ranges)
            units = [range(f.position, f.position + f.stop - f.start) for f in found]
            bounds = accumulate(split_evenly(len(units), parts), initial=0)
            return [merge_ranges(units[start:stop]) for start, stop in pairwise(bounds)], ()
        total = sum(map(len, ranges))
        if tail == "pad":
            added = -total % parts
            ranges, total = (*ranges, range(self.end, self.end + added)), total + added
        used = total - total % parts if tail == "drop" else total
        bounds = accumulate(split_evenly(used, parts), initial=0)
        parted = [slice_ranges(ranges, *pair) for pair in pairwise(bounds)]
        return parted, slice_ranges(ranges, used, total)

    def join(self, ranges: Sequence[range]) -> Ranges:
        """The positions of `ranges` in order, without those that were added from the beginning."""
        clipped = (range(part.start, min(part.stop, self.end)) for part in ranges)
        return merge_ranges([part for part in clipped if part])


def from_position(ranges: Ranges, position: int) -> Ranges:
    """The part of these ranges, which ascend, that lies at the position or after it."""
    rest = (range(max(part.start, position), part.stop) for part in ranges)
    return tuple(part for part in rest if part)
