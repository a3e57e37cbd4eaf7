"""Which rank gets which position of an epoch's order, after any number of changes of the world.

An epoch's order has the positions 0...length-1. Those that nobody has used yet are a short tuple of
ranges, normally one: what remains. `Shards` splits it among the ranks, `Cursor` hands one rank's
shard out, and `Progress` counts what of it has been trained on, from which follows what remains.
A stream's files lie one after the other in an epoch's order, so that their samples have positions,
too: `Layout` says which rank and worker reads which. A file of unknown length takes more positions
than any file has samples. Without I/O and randomness.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from operator import length_hint
from typing import Any, Literal, get_args

import torch

from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.train.data.permutation import Order

Tail = Literal["drop", "pad", "uneven"]
TAILS: tuple[Tail, ...] = get_args(Tail)
_FIRST_BLOCK, _BLOCK = 256, 1 << 15  # indices: the first block at once, the others for throughput
_UNKNOWN = 1 << 40  # positions of a file of unknown length
MOST_FILES = 1 << 22  # of unknown length: positions are int64

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Shards:
    """The positions that remain of an epoch of `length`, split among the ranks; `rank` is ours.

    They are given out in turns. In each turn `slots[i]` is the rank that gets the i-th position, so
    the j-th of all that remain goes to rank `slots[j % len(slots)]`. The tail, which does not fill
    a turn, goes to nobody ("drop"), is filled up with positions from `length` on, which stand for
    repetitions ("pad"), or goes to the first slots ("uneven").

    Invariant: `remaining_after(counts)` holds each of the `remaining` positions exactly once, less
    those used.
    """

    length: int
    remaining: tuple[range, ...]
    slots: Sequence[int]
    rank: int
    tail: Tail

    @cached_property
    def total(self) -> int:
        """How many positions remain for all ranks together."""
        return sum(map(len, self.remaining))

    @cached_property
    def own_slots(self) -> tuple[int, ...]:
        """This rank's slots in a turn, in order."""
        if isinstance(self.slots, range):  # one each: don't look through thousands
            return (self.rank,)
        return tuple(slot for slot, rank in enumerate(self.slots) if rank == self.rank)

    @cached_property
    def size(self) -> int:
        """How many positions, repetitions included, this rank's shard has."""
        turns, rest = divmod(self.total, len(self.slots))
        if rest and self.tail == "pad":
            turns += 1
        extra = sum(slot < rest for slot in self.own_slots) if self.tail == "uneven" else 0
        return turns * len(self.own_slots) + extra

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """The start-th to stop-th position of this rank's shard, as int64 in 0...length-1."""
        turns = torch.arange(start, stop, device="cpu")
        if len(self.own_slots) == 1:
            offsets = turns * len(self.slots) + self.own_slots[0]
        else:
            offsets = turns // len(self.own_slots) * len(self.slots)
            offsets += torch.tensor(self.own_slots, device="cpu")[turns % len(self.own_slots)]
        positions = self._positions_at(offsets)
        in_last_turn = stop > self.size - len(self.own_slots)  # which alone is padded
        return positions % self.length if self.tail == "pad" and in_last_turn else positions

    def is_shared(self, start: int) -> bool:
        """Whether all ranks get something of what comes after the first `start` of this one's."""
        turns, rest = divmod(self.total, len(self.slots))
        in_tail = self.tail == "uneven" and start >= turns * len(self.own_slots)
        return not in_tail or rest >= len(set(self.slots))  # all are among the first slots

    def unsettled(self, count: int, step: int) -> str:
        """Why nobody knows the use of all ranks when this one has used `count`, or "".

        step: turns in a step, 0 if not known. It matters at this rank's end if it has no part in
        an uneven tail: the others use theirs in this step if its last batch is short, else in one
        more.
        """
        if count % len(self.own_slots) and count != self.size:
            parts = f"{count % len(self.own_slots)} of {len(self.own_slots)} parts"
            return f"in the middle of a step ({parts}): commit at its end, or agree()"
        if self._is_without_tail(count) and not step:
            return 'tail="uneven" with at most a batch for a rank: reshard(batch_sizes=...) before'
        return ""

    def remaining_after_own(self, count: int, step: int) -> tuple[range, ...]:
        """The positions that remain when this rank has used `count` and all are at the same step.

        Raises RuntimeError where that is unsettled.
        """
        if reason := self.unsettled(count, step):
            raise RuntimeError(reason)
        turns = -(-count // len(self.own_slots))
        if self._is_without_tail(count):
            turns = -(-turns // step) * step
        return slice_ranges(self.remaining, turns * len(self.slots), self.total)

    def remaining_after(self, counts: Sequence[int]) -> tuple[range, ...]:
        """The positions that remain when rank r has used the first counts[r] of its shard."""
        turns = self._turns_used(counts)
        most = max(turns) * len(self.slots)
        behind: list[range] = []
        if min(turns) < max(turns):
            stop = min(most, self.total)
            for slot, used in enumerate(turns):
                first = used * len(self.slots) + slot
                behind += slice_ranges(self.remaining, first, stop, len(self.slots))
        return merge_ranges(behind) + slice_ranges(self.remaining, most, self.total)

    def _positions_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """The positions at these offsets in the remaining ones and the pad; reuses `offsets`."""
        first = self.remaining[0].start if self.remaining else 0
        if self.remaining == (range(first, self.length),):
            return offsets.add_(first)
        ranges = [*self.remaining, range(self.length, self.length + len(self.slots))]
        starts = torch.tensor([0, *accumulate(map(len, self.remaining))], device="cpu")
        which = torch.searchsorted(starts, offsets, right=True) - 1
        offsets -= starts[which]
        offsets *= torch.tensor([part.step for part in ranges], device="cpu")[which]
        offsets += torch.tensor([part.start for part in ranges], device="cpu")[which]
        return offsets

    def _turns_used(self, counts: Sequence[int]) -> list[int]:
        """How many turns each slot has used."""
        shares = Counter(self.slots)
        before: Counter[int] = Counter()
        turns = []
        for rank in self.slots:
            turns.append(max(0, -(-(counts[rank] - before[rank]) // shares[rank])))
            before[rank] += 1
        return turns

    def _is_without_tail(self, count: int) -> bool:
        rest = self.total % len(self.slots)
        at_end = 0 < count == self.size
        return at_end and self.tail == "uneven" and 0 < rest <= min(self.own_slots)


class Stage(Enum):
    """How far a cursor has come: NEW ──> OPEN ──> OUT ──> VOID, which each of them may become."""

    NEW = auto()
    OPEN = auto()  # hands out
    OUT = auto()  # all are handed out, and it was asked for more
    VOID = auto()  # another one has begun, or an epoch, a world


class Counting(Enum):
    """The way in which a cursor's indices are counted as trained on."""

    BY_HAND = auto()  # the script's calls of record()
    IN_LOOP = auto()  # a loop of state.steps, which runs or was left before its end
    LOOP_ENDED = auto()


class Cursor:
    """Hands out one rank's shard, from its `start`-th position on, as indices of the data set.

    They are made in blocks by torch and handed out at the speed of a list: no Python runs per
    index.
    """

    def __init__(self, shards: Shards, start: int) -> None:
        self.start = start
        self.stage, self.counting = Stage.NEW, Counting.BY_HAND
        self._shards, self._made = shards, start
        self._block: Iterator[int] = iter(())  # what remains of the block made last

    @property
    def handed(self) -> int:
        """How many positions of the shard are handed out, those before `start` included."""
        return self._made - length_hint(self._block)

    def blocks(self, order: Order) -> Iterator[Iterator[int]]:
        """The indices, in blocks. Raises RuntimeError once it is VOID."""
        self.stage = Stage.OPEN
        size = _FIRST_BLOCK
        while self._made < self._shards.size and self.stage is not Stage.VOID:
            stop = min(self._made + size, self._shards.size)
            self._block = iter(order(self._shards.positions(self._made, stop)).tolist())
            self._made = stop
            yield self._block
            size = _BLOCK
        if self.stage is Stage.VOID:
            raise RuntimeError("this iterator is void: the sampler has begun anew since")
        self.stage = Stage.OUT


class Progress:
    """How many positions of its shard this rank has trained on: `count`.

    step: turns that a step of all ranks takes, 0 if not known; `known`, or else by the records.
    """

    def __init__(self, shards: Shards, step: int, known: int = 0) -> None:
        self.count = 0
        self.step = known or step
        self._known = known
        self._shards = shards
        self._agreed: tuple[int, Sequence[int]] | None = None  # own count, everybody's
        self._committed: tuple[int, int] | None = None  # handed out, recorded
        self._finished = False

    def add(self, count: int, handed: int) -> None:
        """Count so many more of the `handed` ones; ValueError if they are not so many."""
        if not 0 <= count <= handed - self.count:
            open_ = handed - self.count
            raise ValueError(f"recorded {count} samples, but {open_} handed out ones are open")
        self.count += count
        turns = count // len(self._shards.own_slots)
        if turns and self.count < self._shards.size and not self._known:  # a last one may be short
            self.step = turns

    def agree(self, counts: Sequence[int]) -> None:
        """Everybody's count, in rank order, as they are now."""
        self._agreed = self.count, counts
        self.step = self._known  # no rank's batches speak for the others'

    def finish(self) -> None:
        """All ranks are at their end, or will be before anybody asks."""
        self._finished = True

    def remaining(self) -> tuple[range, ...]:
        """The positions that remain of the epoch.

        Raises RuntimeError in the middle of a step, UsageError where agree() is missing.
        """
        if self._finished:
            return ()
        if self._agreed is None:
            return self._shards.remaining_after_own(self.count, self.step)
        if self._agreed[0] != self.count:
            raise UsageError("recorded more since agree(): agree again before a commit")
        return self._shards.remaining_after(self._agreed[1])

    def missed_between_commits(self, handed: int) -> str:
        """At a commit, with so many handed out: what was forgotten since the last one, or ""."""
        last, self._committed = self._committed, (handed, self.count)
        if last is not None and handed > last[0] and self.count == last[1]:
            return "a commit found nothing recorded since the one before"
        return ""

    def missed_in_epoch(self, start: int, handed: int) -> str:
        """When those from `start` to `handed` are out and no more: what was forgotten, or "".

        Up to a batch may be missing: a loader with drop_last delivers no short one.
        """
        done, missing = self.count - start, handed - self.count
        if missing and (not done or missing > self.step * len(self._shards.own_slots)):
            return f"of {handed - start} indices handed out in an epoch, {done} were recorded"
        return ""


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


def slots_of(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the order in which a turn serves them, each as often as its share.

    A rank's share is its batch size over what all sizes have in common: sizes 64, 64, 32 are served
    (0, 1, 2, 0, 1). Shares of one give the round robin of torch's DistributedSampler.
    """
    if any(size < 1 for size in batch_sizes):
        raise ValueError(f"each rank takes at least one sample, not {list(batch_sizes)}")
    common = gcd(*batch_sizes)
    shares = [size // common for size in batch_sizes]
    passes = range(max(shares))
    return tuple(rank for n in passes for rank, share in enumerate(shares) if share > n)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split into so many parts that differ by at most one, larger ones first."""
    size, rest = divmod(total, parts)
    return (size + 1,) * rest + (size,) * (parts - rest)


def slice_ranges(
    ranges: Sequence[range], start: int, stop: int, step: int = 1
) -> tuple[range, ...]:
    """Slice [start:stop:step] of the concatenation of `ranges`; no argument may be negative."""
    found = []
    offset = 0
    for part in ranges:
        first = max(start - offset, (start - offset) % step)
        cut = part[first : max(stop - offset, 0) : step]
        if cut:
            found.append(cut)
        offset += len(part)
    return tuple(found)


def merge_ranges(ranges: Sequence[range]) -> tuple[range, ...]:
    """The positions of `ranges` in as few ranges, by their start; single ones have step 1."""
    single = [range(r.start, r.start + 1) if len(r) == 1 else r for r in ranges]
    merged: list[range] = []
    for part in sorted(single, key=lambda r: (r.start, r.stop)):
        last = merged[-1] if merged else None
        if last is not None and last.step == part.step == 1 and last.stop == part.start:
            merged[-1] = range(last.start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)


def from_position(ranges: Ranges, position: int) -> Ranges:
    """The part of these ranges, which ascend, that lies at the position or after it."""
    rest = (range(max(part.start, position), part.stop) for part in ranges)
    return tuple(part for part in rest if part)


def pack_ranges(remaining: Sequence[range], length: int) -> tuple[int, list[list[int]]]:
    """How many positions are consumed, and [start, stop, step] of those that were passed over.

    Normally all from one position on remain, and nothing was passed over.
    """
    whole = bool(remaining) and remaining[-1] == range(remaining[-1].start, length)
    skipped = remaining[:-1] if whole else remaining
    consumed = length - sum(map(len, remaining))
    return consumed, [[part.start, part.stop, part.step] for part in skipped]


def unpack_ranges(
    consumed: int, skipped: Sequence[Sequence[int]], length: int
) -> tuple[range, ...]:
    """The positions that remain, in the order in which they are given out; undoes `pack_ranges`."""
    ranges = tuple(range(*part) for part in skipped)
    start = consumed + sum(map(len, ranges))
    return (*ranges, range(start, length)) if start < length else ranges


def refuse_other_data(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise WrongHere if the state that is loaded tells of other data than there are here.

    Another node may have the right ones: this one is left out at last, and the job goes on.
    """
    for name, value in here.items():
        if state.get(name, value) != value:
            raise WrongHere(
                f"the state's {name} is {state[name]!r}, here {value!r}: an epoch goes on with the "
                "data that it began with, in that order (sort what glob.glob() gives). To begin one"
                " anew, with the weights that were saved, give these data another name in the "
                "state, and load(path, strict=False)"
            )
