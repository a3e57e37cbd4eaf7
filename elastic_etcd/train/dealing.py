"""Who takes which position of an epoch's order, after any number of changes of the world.

Pure: standard library only, no I/O, no randomness. An epoch's order has the positions 0...length-1;
those not used yet are a short tuple of ranges, normally one, which `Deal` deals out in rounds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Literal, get_args

Tail = Literal["drop", "pad", "uneven"]
TAILS: tuple[Tail, ...] = get_args(Tail)


def lanes_of(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the order in which they are served in one round, each as often as its share.

    A rank's share is its batch size over what all sizes have in common: sizes 64, 64, 32 are served
    (0, 1, 2, 0, 1). Shares of one give the round robin of torch's DistributedSampler.
    """
    if any(size < 1 for size in batch_sizes):
        raise ValueError(f"each rank takes at least one sample, not {list(batch_sizes)}")
    common = gcd(*batch_sizes)
    shares = [size // common for size in batch_sizes]
    turns = range(max(shares))
    return tuple(rank for turn in turns for rank, share in enumerate(shares) if share > turn)


def cut(ranges: Sequence[range], start: int, stop: int, step: int = 1) -> tuple[range, ...]:
    """Slice [start:stop:step] of the concatenation of `ranges`; no argument may be negative."""
    pieces = []
    offset = 0
    for part in ranges:
        first = max(start - offset, (start - offset) % step)
        piece = part[first : max(stop - offset, 0) : step]
        if piece:
            pieces.append(piece)
        offset += len(part)
    return tuple(pieces)


@dataclass(frozen=True)
class Deal:
    """The positions `left` of an epoch of `length`, dealt out in rounds, as `rank` sees it.

    In each round `lanes[i]` takes the i-th position: the j-th of all that are left goes to rank
    `lanes[j % len(lanes)]`. The tail, which does not fill a round, goes to nobody ("drop"), is
    filled up with positions from `length` on, which stand for repetitions ("pad"), or goes to those
    whose turn it is ("uneven").

    Invariant: `after(counts)` holds each position of `left` exactly once, less those used.
    """

    length: int
    left: tuple[range, ...]
    lanes: Sequence[int]
    rank: int
    tail: Tail

    @cached_property
    def total(self) -> int:
        """How many positions are left."""
        return sum(map(len, self.left))

    @property
    def width(self) -> int:
        """Positions in a round."""
        return len(self.lanes)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """This rank's places in a round, in order."""
        if isinstance(self.lanes, range):  # one each: don't look through thousands
            return (self.rank,)
        return tuple(place for place, rank in enumerate(self.lanes) if rank == self.rank)

    @cached_property
    def size(self) -> int:
        """How many positions, repetitions included, this rank is dealt in all."""
        rounds, rest = divmod(self.total, self.width)
        if rest and self.tail == "pad":
            rounds += 1
        served = sum(place < rest for place in self.own) if self.tail == "uneven" else 0
        return rounds * len(self.own) + served

    def unsettled(self, count: int, step: int) -> str:
        """Why it can't be told what all ranks have used when this one has used `count`, or "".

        step: rounds in a step, 0 if not known. It matters where this rank is at its end and has no
        part in an uneven tail: the others use theirs in this step if its last batch is short, else
        in one more.
        """
        if count % len(self.own) and count != self.size:
            parts = f"{count % len(self.own)} of {len(self.own)} parts"
            return f"in the middle of a step ({parts}): commit at its end, or agree()"
        if self._shut_out(count) and not step:
            return 'tail="uneven" with at most a batch for a rank: reshard(batch_sizes=...) before'
        return ""

    def after_own(self, count: int, step: int) -> tuple[range, ...]:
        """What is left when this rank has used `count` and everybody is at the same step.

        Raises RuntimeError where that is unsettled.
        """
        if reason := self.unsettled(count, step):
            raise RuntimeError(reason)
        rounds = -(-count // len(self.own))
        if self._shut_out(count):
            rounds = -(-rounds // step) * step
        return cut(self.left, rounds * self.width, self.total)

    def _shut_out(self, count: int) -> bool:
        rest = self.total % self.width
        at_end = 0 < count == self.size
        return at_end and self.tail == "uneven" and 0 < rest <= min(self.own)

    def after(self, counts: Sequence[int]) -> tuple[range, ...]:
        """What is left when rank r has used the first counts[r] positions that it was dealt."""
        shares = Counter(self.lanes)
        served: Counter[int] = Counter()
        used = []  # rounds that each place has used
        for rank in self.lanes:
            used.append(max(0, -(-(counts[rank] - served[rank]) // shares[rank])))
            served[rank] += 1
        most = max(used) * self.width
        behind: list[range] = []
        if min(used) < max(used):
            for place, rounds in enumerate(used):
                first = rounds * self.width + place
                behind += cut(self.left, first, min(most, self.total), self.width)
        return joined(behind) + cut(self.left, most, self.total)


def joined(ranges: Sequence[range]) -> tuple[range, ...]:
    """The same positions in ascending order of start, single ones with step 1."""
    single = [range(r.start, r.start + 1) if len(r) == 1 else r for r in ranges]
    merged: list[range] = []
    for part in sorted(single, key=lambda r: (r.start, r.stop)):
        last = merged[-1] if merged else None
        if last is not None and last.step == part.step == 1 and last.stop == part.start:
            merged[-1] = range(last.start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)


def packed(left: Sequence[range], length: int) -> tuple[int, list[list[int]]]:
    """How many positions are consumed, and [start, stop, step] of those that were passed over.

    What is left normally is all from one position on, and nothing was passed over.
    """
    whole = bool(left) and left[-1] == range(left[-1].start, length)
    skipped = left[:-1] if whole else left
    consumed = length - sum(map(len, left))
    return consumed, [[part.start, part.stop, part.step] for part in skipped]


def unpacked(consumed: int, skipped: Sequence[Sequence[int]], length: int) -> tuple[range, ...]:
    """The positions that are left, in the order of dealing; the inverse of `packed`."""
    ranges = tuple(range(*part) for part in skipped)
    start = consumed + sum(map(len, ranges))
    return (*ranges, range(start, length)) if start < length else ranges
