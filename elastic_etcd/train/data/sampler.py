"""A sampler whose epoch goes on after any change of world: each index once, state of O(1).

An epoch is one order of all indices. Samples that were trained on are recorded; the remaining part
of the order is sharded anew for each new world. docs/sampler.md says what is guaranteed.

An iteration is a cursor of shards.py; a world or an epoch begins with one that is NEW. The next
iteration goes on after what is recorded and makes the last one VOID, unless the epoch is used up:

    the last iteration is      and its indices are counted      the next one
    NEW or OPEN                in any way                       goes on
    OUT, all handed out        BY_HAND                          goes on, with a warning, if some are
                                                                not recorded; else it is refused
    OUT                        IN_LOOP (it was left)            goes on
    OUT                        LOOP_ENDED                       is refused
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from numbers import Integral
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import gather, rank_and_size, world_of
from elastic_etcd.train.data import shards
from elastic_etcd.train.data.permutation import Listed, Order, OrderFunction, Shuffle, order_of

Length = Literal["iteration", "epoch", "rest"]


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # torch is not read by mypy
    """Yields this rank's indices, for a DataLoader; state.steps counts the samples trained on.

        sampler = ee.ElasticSampler(dataset, seed=7)
        state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    dataset: the data set, or its length.
    shuffle: "exact" (or True) is the order of torch's DistributedSampler for the same seed and
    epoch, 4 bytes per index; "stream" is a keyed permutation without memory; False is the data
    set's order. A function is called with epoch and seed, and gives the epoch's indices, the same
    on all ranks; they may be more or fewer than the data set has, and repeat (weighted sampling).
    tail: the fate of the indices that don't fill a turn of all ranks: "drop", "pad" (repetitions
    from the order's start) or "uneven".
    rank, world_size: None: those of torch.distributed, else RANK and WORLD_SIZE, else (0, 1).

    All ranks make it with the same arguments but rank. The state is {"epoch", "seed", "consumed",
    ...}: global, equal on all ranks that stand at the same step, of constant size. Raises
    ValueError for an argument out of its bounds. docs/sampler.md says what is guaranteed.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool | Literal["exact", "stream"] | OrderFunction = True,
        seed: int = 0,
        tail: shards.Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if shuffle in (True, False):  # also 0 and 1, as of a flag, and numpy's
            shuffle = "exact" if shuffle else False
        if not callable(shuffle) and shuffle not in (False, "exact", "stream"):
            known = '"exact", "stream", True, False or a function of epoch and seed'
            raise ValueError(f"shuffle is {known}, not {shuffle!r}")
        if tail not in shards.TAILS:
            raise ValueError(f"tail is one of {', '.join(shards.TAILS)}, not {tail!r}")
        self.shuffle: Shuffle | OrderFunction = shuffle
        self.tail = tail
        self._seed = seed
        self._epoch = 0
        self._asked_epoch: int | None = None
        self._order: tuple[tuple[int, int], Order] | None = None  # for (seed, epoch)
        self._dataset_length, self._digest = self.length, 0
        self._warned = False
        self._varies = False  # ranks take different numbers in a step: commit() has them agree
        self._in_step = 0, 0  # samples of all ranks, and ranks, in the latest loop of state.steps
        self._follows = rank is None
        self._sizes: Sequence[int] | None = None
        self._cursor = shards.Cursor(shards.Shards(0, (), range(1), 0, tail), 0)  # of nothing yet
        self._handed_before = 0  # by the cursors before this one
        self._in_hand = 0  # positions of the batch that state.steps has given to its loop
        self._length_part: Length = "iteration"
        self._progress: shards.Progress
        self._take_length()
        self._shard((range(self.length),), *world_of(rank, world_size), None, step=0)

    @property
    def epoch(self) -> int:
        """The current epoch; see set_epoch."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many of the epoch's indices all ranks together have trained on and recorded."""
        return self.length - sum(map(len, self._progress.remaining()))

    def __len__(self) -> int:
        """How many indices this rank gets from its iterator; constant while that runs.

        Until another one begins, or an epoch, a world: then it is what remains of the epoch.
        """
        self._follow()
        if self._length_part == "epoch":
            return replace(self._shards, remaining=(range(self.length),)).size
        if self._length_part == "iteration" and self._cursor.stage is not shards.Stage.NEW:
            return self._shards.size - self._cursor.start
        return self._shards.size - self._progress.count - self._in_hand

    def __iter__(self) -> Iterator[int]:
        """Go on after what is recorded. A second iterator makes the first one void."""
        self._follow()
        if self._is_used_up():
            used_up = f"epoch {self._epoch} has been used up"
            raise UsageError(f"{used_up}: call set_epoch({self._epoch + 1}) before the next")
        return Indices.of(self, self._blocks())

    def _is_used_up(self) -> bool:
        match self._cursor.stage, self._cursor.counting:
            case (shards.Stage.OUT, shards.Counting.BY_HAND):
                return not self._end_epoch()
            case (shards.Stage.OUT, counting):
                return counting is shards.Counting.LOOP_ENDED
            case _:
                return False

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; nothing changes if it is the current one, which may be half used.

        With a function as shuffle all ranks call this, and it raises ValueError on all of them if
        their orders differ. That costs one all_gather of one number.
        """
        self._asked_epoch = epoch
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._take_length()
            self._shard((range(self.length),), self.rank, self.world_size, self._sizes)
        if callable(self.shuffle):
            self._compare_orders()

    def record(self, batch: int | torch.Tensor | Sequence[int]) -> None:
        """This rank has trained on this many of its next indices; state.steps does it for you.

        batch: a number, a tensor whose first dimension counts samples, or the list of indices.
        Raises TypeError for a batch that does not tell how many samples it has, as what a loader
        has collated from pairs; ValueError if the iterator has not handed out so many; UsageError
        for a batch that state.steps counts.
        """
        if self._in_hand:
            raise UsageError("state.steps counts the batches of this loop: leave record() out")
        self._progress.add(samples_in(batch), self._cursor.handed)

    @property
    def _handed_out(self) -> int:
        """How many indices all its iterators have handed out; it only grows. For state.steps."""
        return self._handed_before + self._cursor.handed - self._cursor.start

    def _number_of_batch(self, count: int) -> int:
        """The number in the epoch of the batch after the one in hand, which has `count` samples.

        It counts batches as they are in this world, from 0.
        """
        own, turn = len(self._shards.own_slots), len(self._shards.slots)
        used = self._progress.count + self._in_hand
        before = self.length - self._shards.total + used // own * turn
        return before // (max(1, self._progress.step or count // own) * turn)

    def _take(self, count: int) -> None:
        """A loop of state.steps goes on to its next batch, of so many samples.

        The batch before counts as trained on. This one is in hand from now on; it counts with the
        next one, or when something asks where the sampler stands: a commit, a change of world,
        another epoch. Raises RuntimeError for a batch from before the sampler began anew.
        """
        self._settle()
        if count > self._cursor.handed - self._progress.count:
            raise RuntimeError(
                "the sampler has begun anew since this batch was handed out: loop anew"
            )
        self._warned = True  # nobody forgets to record here
        self._in_hand = count
        self._cursor.counting = shards.Counting.IN_LOOP

    def _settle(self) -> None:
        """Count the batch in hand, if any, as trained on."""
        count, self._in_hand = self._in_hand, 0
        if count:
            self._progress.add(count, self._cursor.handed)

    def _shares_step(self) -> bool:
        """Whether all ranks take part in the step that begins with the batch in hand."""
        return self._shards.is_shared(self._progress.count)

    def _end_here(self) -> None:
        """The batch in hand is the last one of an uneven tail, in a step that is not whole.

        The others have a batch more or less, so that all is used on all ranks when this step ends.
        """
        self._progress.finish()

    def _finish(self) -> None:
        """A loop of state.steps is at its end: with tail="uneven" all is used on all ranks.

        A rank that takes one step less than others does not see their last one.
        """
        self._settle()
        self._cursor.counting = shards.Counting.LOOP_ENDED
        if self.tail == "uneven" and self._cursor.stage is shards.Stage.OUT:
            self._progress.finish()

    @contextmanager
    def _length_of(self, part: Length) -> Iterator[None]:
        """Let len() be that of a whole epoch, or of an iteration that began now."""
        self._length_part = part
        try:
            yield
        finally:
            self._length_part = "iteration"

    def _in_all(self, own: int) -> int:
        """How many samples all ranks take while this one takes `own`."""
        return own * self.world_size if self._sizes is None else sum(self._sizes)

    def agree(self, group: dist.ProcessGroup | None = None) -> None:
        """Tell all ranks what each of them has recorded; all call it at the same step.

        It is needed before a commit only where ranks record numbers that are not in proportion to
        their batch sizes. It costs one all_gather of one number.
        """
        self._settle()
        if self.world_size == 1:
            return
        counts = [count for (count,) in gather([self._progress.count], group)]
        if len(counts) != self.world_size:
            raise ValueError(f"the group has {len(counts)} ranks, not {self.world_size}")
        self._progress.agree(counts)

    def reshard(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        batch_sizes: int | Sequence[int] | None = None,
    ) -> None:
        """Shard what remains of the epoch anew; all ranks call it at the same step.

        rank, world_size: the new world; None: as they are. batch_sizes: how many samples each rank
        takes in a step, when not all take the same; a number is this rank's own, and those of the
        others are gathered. Iterators made before are void.
        """
        self._follow()
        self._follows &= rank is None
        rank = self.rank if rank is None else rank
        world_size = self.world_size if world_size is None else world_size
        if isinstance(batch_sizes, int):
            own = [batch_sizes]
            batch_sizes = [size for (size,) in gather(own)] if world_size > 1 else own
        if batch_sizes is not None and len(batch_sizes) != world_size:
            raise ValueError(f"{len(batch_sizes)} batch sizes for {world_size} ranks")
        self._shard(self._remaining(), rank, world_size, batch_sizes)

    def state_dict(self) -> dict[str, Any]:
        """The state after what is recorded; its values are integers, strings, False and lists.

        For example {"epoch": 3, "seed": 0, "consumed": 76800, "skipped": [], "length": 1281167,
        "shuffle": "exact", "step": 32}: "step" is turns in a step; "skipped" holds [start, stop,
        step] of positions that were passed over, and is empty unless ranks recorded different
        numbers. Raises RuntimeError in the middle of a step, UsageError where agree() is missing.
        """
        remaining = self._remaining()
        self._warn(self._progress.missed_between_commits(self._cursor.handed))
        return self._state(remaining)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of whatever world and rank. Iterators made before are void.

        Raises WrongHere if it is of a data set of another length, or of another shuffle.
        """
        if state["shuffle"] == self._shuffle_name() == "given":
            self._epoch, self._seed = state["epoch"], state["seed"]
            self._take_length()
        mine = self._state(())
        shards.refuse_other_data(state, {n: mine.get(n) for n in ("shuffle", "length", "order")})
        self._epoch, self._seed = state["epoch"], state["seed"]
        remaining = shards.unpack_ranges(state["consumed"], state["skipped"], self.length)
        self._shard(remaining, self.rank, self.world_size, self._sizes, state["step"])

    def _handed_state(self) -> dict[str, Any]:
        """The state as if all handed out were recorded, or {"unsettled": why there is none}.

        For a loader that counts for itself what of it was delivered (torchdata).
        """
        self._warned = True  # such a loader needs no record
        handed, step = self._cursor.handed, self._progress.step
        if reason := self._shards.unsettled(handed, step):
            return {"unsettled": reason}
        return self._state(self._shards.remaining_after_own(handed, step))

    def _load_handed_state(self, state: Mapping[str, Any]) -> None:
        """As load_state_dict; but a used up epoch gives way to another that was asked for.

        Raises ValueError if there was none.
        """
        if "unsettled" in state:
            raise ValueError(f"this loader's state tells no place to go on: {state['unsettled']}")
        self._warned = True
        self.load_state_dict(state)
        if not self._shards.size and self._asked_epoch is not None:
            self.set_epoch(self._asked_epoch)

    def _shard(
        self,
        remaining: tuple[range, ...],
        rank: int,
        world_size: int,
        sizes: Sequence[int] | None,
        step: int | None = None,
    ) -> None:
        """Begin with these shards; step: turns in a step, 0 if not known, None: as before."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        slots = range(world_size) if sizes is None else shards.slots_of(sizes)
        self._in_hand = 0
        self.rank, self.world_size, self._sizes = rank, world_size, sizes
        self._shards = shards.Shards(self.length, remaining, slots, rank, self.tail)
        known = 0 if sizes is None else sizes[rank] // len(self._shards.own_slots)
        before = self._progress.step if step is None else step
        self._progress = shards.Progress(self._shards, before, known)
        self._replace_cursor()

    def _follow(self) -> None:
        """Shard for the world that torch.distributed has made since, unless one was given here."""
        if self._follows and (world := rank_and_size()) != (self.rank, self.world_size):
            self._shard(self._remaining(), *world, None)

    def _blocks(self) -> Iterator[Iterator[int]]:
        """The indices that are not recorded yet; a new iterator begins with its first index."""
        self._settle()
        self._replace_cursor()
        yield from self._cursor.blocks(self._order_of_epoch())

    def _order_of_epoch(self) -> Order:
        key = self._seed, self._epoch
        if self._order is None or self._order[0] != key:
            self._order = None  # let go of the old one before the new one takes memory
            self._order = key, self._make_order(*key)
        return self._order[1]

    def _make_order(self, seed: int, epoch: int) -> Order:
        if callable(self.shuffle):
            return Listed(self.shuffle(epoch, seed), self._dataset_length)
        return order_of(self.shuffle, self.length, seed, epoch)

    def _take_length(self) -> None:
        """Ask a function for this epoch's order, which says how long the epoch is."""
        if callable(self.shuffle):
            order = cast("Listed", self._order_of_epoch())
            self.length, self._digest = len(order), order.digest()

    def _compare_orders(self) -> None:
        self._follow()
        if rank_and_size(launched=False) != (self.rank, self.world_size) or self.world_size == 1:
            return
        digests = [digest for (digest,) in gather([self._digest])]
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            text = f"shuffle({self._epoch}, {self._seed}) gives ranks {others} another order"
            raise ValueError(f"{text} than rank 0: it may depend on nothing but epoch and seed")

    def _shuffle_name(self) -> str | bool:
        return "given" if callable(self.shuffle) else self.shuffle

    def _replace_cursor(self) -> None:
        self._handed_before = self._handed_out
        self._cursor.stage = shards.Stage.VOID
        self._cursor = shards.Cursor(self._shards, self._progress.count)

    def _remaining(self) -> tuple[range, ...]:
        self._settle()
        return self._progress.remaining()

    def _state(self, remaining: tuple[range, ...]) -> dict[str, Any]:
        consumed, skipped = shards.pack_ranges(remaining, self.length)
        order = {"order": self._digest} if callable(self.shuffle) else {}
        return {
            "epoch": self._epoch,
            "seed": self._seed,
            "consumed": consumed,
            "skipped": skipped,
            "length": self.length,
            "shuffle": self._shuffle_name(),
            **order,
            "step": self._progress.step,
        }

    def _end_epoch(self) -> bool:
        """Warn if the epoch ends with less recorded than it should, and return whether."""
        if self._cursor.stage is not shards.Stage.OUT:
            return False
        self._settle()
        missed = self._progress.missed_in_epoch(self._cursor.start, self._cursor.handed)
        self._warn(missed)
        return bool(missed)

    def _warn(self, missed: str) -> None:
        if missed and not self._warned:
            self._warned = True
            cure = "loop over state.steps(loader), or call sampler.record(batch) after each step"
            text = f"ElasticSampler: {missed}: {cure}, or they are used again after a change"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def samples_in(batch: object) -> int:
    """How many samples it has. Raises TypeError for a batch that does not say so."""
    if isinstance(batch, (int, Integral)):
        return int(batch)
    if isinstance(batch, torch.Tensor) and batch.dim():
        return len(batch)
    if isinstance(batch, Sequence) and all(isinstance(index, Integral) for index in batch):
        return len(batch)
    shown = type(batch).__name__
    raise TypeError(
        f"a {shown} does not tell how many samples it has: loop over state.steps(loader), which "
        "counts for you, or give record() the number, or a tensor with a row for each sample"
    )


class Indices(chain[int]):
    """An iterator over indices with the state that torchdata's StatefulDataLoader asks for."""

    sampler: ElasticSampler

    @classmethod
    def of(cls, sampler: ElasticSampler, blocks: Iterator[Iterator[int]]) -> Self:
        """Iterate over these blocks, which `sampler` makes."""
        indices = cast("Self", cls.from_iterable(blocks))
        indices.sampler = sampler
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The state after all that is handed out: the loader knows how much was delivered."""
        return self.sampler._handed_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; possible before the first index is taken."""
        self.sampler._load_handed_state(state)
