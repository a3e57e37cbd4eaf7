"""A sampler whose epoch goes on after any change of world: each index once, state of O(1).

An epoch is one order of all indices. What has been trained on is recorded; what is left of the
order is dealt out anew to each new world. docs/sampler.md says what is guaranteed.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate, chain
from operator import length_hint
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from elastic_etcd.train.dealing import TAILS, Deal, Tail, cut, lanes_of
from elastic_etcd.train.permutation import Exact, Straight, Stream
from elastic_etcd.train.place import gather, place

_FIRST_BLOCK, _BLOCK = 256, 1 << 15  # indices made at a time: soon the first, then for throughput


class ElasticSampler(Sampler[int]):
    """Indices of this rank, for a DataLoader; record what has been trained on.

    dataset: what is sampled, or its length. shuffle: "exact" (or True) is the order of torch's
    DistributedSampler for the same seed and epoch, 4 bytes per index; "stream" is a keyed
    permutation without memory; False is the data set's order. tail: what becomes of the indices
    that don't fill a round of all ranks: "drop", "pad" (repetitions from the order's start) or
    "uneven". rank, world_size: from torch.distributed, else from RANK and WORLD_SIZE, else alone.

    All ranks make it with the same arguments but rank. The state is {"epoch", "seed", "consumed",
    ...}: global, equal on all ranks that stand at the same step, of constant size.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool | Literal["exact", "stream"] = True,
        seed: int = 0,
        tail: Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if shuffle not in (True, False, "exact", "stream"):
            raise ValueError(f'shuffle is "exact", "stream", True or False, not {shuffle!r}')
        if tail not in TAILS:
            raise ValueError(f"tail is one of {', '.join(TAILS)}, not {tail!r}")
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither")
        self.shuffle = "exact" if shuffle is True else shuffle
        self.tail = tail
        self._seed = seed
        self._epoch = 0
        self._order: tuple[object, Any] = (None, None)  # (what it is keyed by, the order)
        self._step = 0  # rounds that a step takes: those of the last whole batch
        self._warned = False
        self._follows = rank is None
        self.rank, self.world_size = -1, 0
        here = place() if rank is None or world_size is None else (rank, world_size)
        self._deal_out((range(self.length),), *here, None)

    @property
    def epoch(self) -> int:
        """The current epoch; see set_epoch."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many of the epoch's indices all ranks together have trained on and recorded."""
        return self.length - sum(map(len, self._left_after(self._recorded)))

    def __len__(self) -> int:
        """How many indices this rank has yet to get in this epoch, as things stand."""
        self._follow()
        return self._size - self._recorded

    def __iter__(self) -> Iterator[int]:
        """Go on after what is recorded. A second iterator makes the first one void."""
        self._follow()
        if self._ended and self._recorded == self._size > 0:
            used_up = f"epoch {self._epoch} has been used up"
            raise RuntimeError(f"{used_up}: call set_epoch({self._epoch + 1}) before the next")
        if self._ended:
            self._say_if_forgotten()
        self._ended = False
        self._started = self._made = self._recorded
        self._block = iter(())
        indices = _Indices.from_iterable(self._blocks())
        indices.sampler = self
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; nothing changes if it is the current one, which may be half used."""
        if epoch == self._epoch:
            return
        if self._ended:
            self._say_if_forgotten()
        self._epoch = epoch
        self._deal_out((range(self.length),), self.rank, self.world_size, self._lanes)

    def record(self, batch: int | torch.Tensor | Sequence[int]) -> None:
        """This rank has trained on this many of its next indices.

        batch: a number, a tensor whose first dimension counts samples, or the list of indices.
        Raises ValueError if the iterator has not handed out so many.
        """
        count = batch if isinstance(batch, int) else len(batch)
        if count < 0 or self._recorded + count > self._handed():
            handed = self._handed() - self._recorded
            raise ValueError(f"recorded {count} samples, but only {handed} are handed out")
        self._recorded += count
        rounds = count // len(self._own)
        # The last batch of an epoch may be short: it does not tell what a step takes.
        last = self._recorded == self._size
        self._step = max(self._step, rounds) if last else rounds or self._step

    def agree(self, group: dist.ProcessGroup | None = None) -> None:
        """Tell each other what each rank has recorded: all ranks, at the same step.

        Needed before a commit only where ranks record numbers that are not in proportion to their
        batch sizes. One all_gather of one number.
        """
        self._agreed = self._recorded, gather(self._recorded, group)
        if len(self._agreed[1]) != self.world_size:
            raise ValueError(f"the group has {len(self._agreed[1])} ranks, not {self.world_size}")

    def reshard(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        batch_sizes: int | Sequence[int] | None = None,
    ) -> None:
        """Deal out what is left of the epoch anew: all ranks, at the same step.

        rank, world_size: the new world; None: as they are. batch_sizes: how many samples each rank
        takes in a step, when not all take the same; a number is this rank's own, and the others'
        are gathered. Iterators made before are void.
        """
        self._follow()
        self._follows &= rank is None
        rank = self.rank if rank is None else rank
        world_size = self.world_size if world_size is None else world_size
        if isinstance(batch_sizes, int):
            batch_sizes = gather(batch_sizes, None) if world_size > 1 else [batch_sizes]
        if batch_sizes is not None and len(batch_sizes) != world_size:
            raise ValueError(f"{len(batch_sizes)} batch sizes for {world_size} ranks")
        lanes = None if batch_sizes is None else lanes_of(batch_sizes)
        self._deal_out(self._left_after(self._recorded), rank, world_size, lanes)
        if batch_sizes is not None:
            self._step = batch_sizes[rank] // len(self._own)

    def state_dict(self) -> dict[str, Any]:
        """The state after what is recorded: integers, a string or False, and a list of integers.

        "skipped" holds [start, stop, step] for positions before the others' progress; it is empty
        unless ranks recorded different numbers. Raises RuntimeError in the middle of a step.
        """
        self._say_if_commits_stand_still()
        return self._state(self._left_after(self._recorded))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of whatever world and rank. Iterators made before are void.

        Raises ValueError if it is of a data set of another length, or of another shuffle.
        """
        for name, mine in (("length", self.length), ("shuffle", self.shuffle)):
            if state[name] != mine:
                raise ValueError(f"the state's {name} is {state[name]!r}, the sampler's {mine!r}")
        skipped = tuple(range(*part) for part in state["skipped"])
        start = state["consumed"] + sum(map(len, skipped))
        left = (*skipped, *cut((range(self.length),), start, self.length))
        self._epoch, self._seed, self._step = state["epoch"], state["seed"], state["step"]
        self._deal_out(left, self.rank, self.world_size, self._lanes)

    def _deal_out(
        self, left: tuple[range, ...], rank: int, world_size: int, lanes: Sequence[int] | None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank, self.world_size, self._lanes = rank, world_size, lanes
        self._deal = Deal(left, range(world_size) if lanes is None else lanes, self.tail)
        self._own = self._deal.own(rank)
        self._size = self._deal.size(self._own)
        self._recorded = self._made = self._started = 0
        self._block: Iterator[int] = iter(())  # what is left of the block of indices made last
        self._agreed: tuple[int, list[int]] | None = None
        self._committed: tuple[int, int] | None = None  # handed out, recorded
        self._ended = False

    def _follow(self) -> None:
        """Take the place that torch.distributed has given since, unless one was given here."""
        if self._follows and (here := place()) != (self.rank, self.world_size):
            self._deal_out(self._left_after(self._recorded), *here, None)

    def _handed_state(self) -> dict[str, Any] | None:
        """The state as if all that is handed out were recorded; None in the middle of a step."""
        self._warned = True  # who asks for it counts for itself
        handed = self._handed()
        if handed % len(self._own) and not (self.tail == "uneven" and handed == self._size):
            return None
        return self._state(self._deal.after_rounds(self._rounds(handed)))

    def _handed(self) -> int:
        return self._made - length_hint(self._block)

    def _blocks(self) -> Iterator[Iterator[int]]:
        """This rank's indices that are not recorded, in blocks."""
        deal, start, order = self._deal, self._recorded, self._current_order()
        size = _FIRST_BLOCK
        while start < self._size and deal is self._deal:
            stop = min(start + size, self._size)
            self._block = iter(order(_positions(deal, self._own, start, stop)).tolist())
            start = self._made = stop
            yield self._block
            size = _BLOCK
        if deal is not self._deal:
            raise RuntimeError("this iterator is void: the epoch was dealt out anew")
        self._ended = True

    def _current_order(self) -> Any:
        key = (self._seed, self._epoch)
        if self._order[0] != key:
            self._order = (None, None)  # let go of the old one first
            if self.shuffle is False or not self.length:
                order: Any = Straight(max(1, self.length))
            else:
                make = Exact if self.shuffle == "exact" else Stream
                order = make(self.length, *key)
            self._order = key, order
        return self._order[1]

    def _left_after(self, count: int) -> tuple[range, ...]:
        """The positions that nobody has used, when this rank has used `count`."""
        if self._agreed is not None:
            if self._agreed[0] != count:
                raise RuntimeError("recorded more since agree(): agree again before a commit")
            return self._deal.after(self._agreed[1])
        return self._deal.after_rounds(self._rounds(count))

    def _rounds(self, count: int) -> int:
        """How many rounds are used up when each rank has used as much as this one's `count`."""
        rounds, within = divmod(count, len(self._own))
        if self.tail == "uneven" and count == self._size:
            # The last batch may be short here while others' are whole: count in steps.
            step = max(1, self._step)
            return -(-count // (step * len(self._own))) * step
        if within:
            parts = f"{within} of {len(self._own)} parts"
            raise RuntimeError(f"in the middle of a step ({parts}): commit at its end, or agree()")
        return rounds

    def _state(self, left: tuple[range, ...]) -> dict[str, Any]:
        # What is left ends with all positions from one on, unless all of those are used.
        whole = bool(left) and left[-1].stop == self.length and left[-1].step == 1
        skipped = left[:-1] if whole else left
        return {
            "epoch": self._epoch,
            "seed": self._seed,
            "consumed": self.length - sum(map(len, left)),
            "skipped": [[part.start, part.stop, part.step] for part in skipped],
            "length": self.length,
            "shuffle": self.shuffle,
            "step": self._step,
        }

    def _say_if_commits_stand_still(self) -> None:
        now = self._handed(), self._recorded
        if self._committed and now[0] > self._committed[0] and now[1] == self._committed[1]:
            self._say("a commit found nothing recorded since the one before")
        self._committed = now

    def _say_if_forgotten(self) -> None:
        missing = self._handed() - self._recorded
        done = self._recorded - self._started
        if missing and (not done or missing > self._step * len(self._own)):
            handed = self._handed() - self._started
            self._say(f"epoch {self._epoch}: {handed} indices handed out, {done} recorded")

    def _say(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"{what}; call sampler.record(batch) after each step, or they are used again"
            warnings.warn(f"ElasticSampler: {text} after a change of world", stacklevel=4)


class _Indices(chain[int]):
    """An ElasticSampler's iterator; its state lets torchdata's StatefulDataLoader go on from it."""

    sampler: ElasticSampler

    def state_dict(self) -> dict[str, Any]:
        """The state after what has been handed out: the loader knows what of it was delivered."""
        return {"sampler": self.sampler._handed_state()}  # noqa: SLF001 - one class in two parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; possible before the first index is taken."""
        if state["sampler"] is None:
            raise ValueError("this state of a loader was taken in the middle of a step")
        self.sampler.load_state_dict(state["sampler"])


def _positions(deal: Deal, own: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """The start-th to stop-th position that is dealt to these places, as int64."""
    if len(own) == 1:
        dealt = torch.arange(start, stop) * deal.width + own[0]
    else:
        turns = torch.arange(start, stop)
        dealt = turns // len(own) * deal.width + torch.tensor(own)[turns % len(own)]
    if len(deal.left) == 1 and deal.left[0].step == 1:
        return dealt + deal.left[0].start
    # Repetitions follow the last range: they begin with the order's first position.
    ranges = [*deal.left, range(deal.width)]
    offsets = torch.tensor([0, *accumulate(map(len, deal.left))])
    part = torch.searchsorted(offsets, dealt, right=True) - 1
    starts = torch.tensor([piece.start for piece in ranges])
    steps = torch.tensor([piece.step for piece in ranges])
    return starts[part] + (dealt - offsets[part]) * steps[part]
