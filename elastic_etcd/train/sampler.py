"""A sampler whose epoch goes on after any change of world: each index once, state of O(1).

An epoch is one order of all indices. What has been trained on is recorded; what is left of the
order is dealt out anew to each new world. docs/sampler.md says what is guaranteed.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from elastic_etcd.train.dealing import TAILS, Deal, Tail, lanes_of, packed, unpacked
from elastic_etcd.train.indices import Hand, Indices
from elastic_etcd.train.permutation import Order, Shuffle, order_of
from elastic_etcd.train.place import gather, place
from elastic_etcd.train.recording import Record


class ElasticSampler(Sampler[int]):  # type: ignore[misc]  # torch is not read by mypy
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
        self.shuffle: Shuffle = "exact" if shuffle is True else shuffle
        self.tail = tail
        self._seed = seed
        self._epoch = 0
        self._asked: int | None = None  # epoch
        self._order: tuple[tuple[int, int], Order] | None = None  # for (seed, epoch)
        self._warned = False
        self._follows = rank is None
        self._sizes: Sequence[int] | None = None
        self._hand: Hand | None = None
        self._record: Record
        here = place() if rank is None or world_size is None else (rank, world_size)
        self._deal_out((range(self.length),), *here, None, step=0)

    @property
    def epoch(self) -> int:
        """The current epoch; see set_epoch."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many of the epoch's indices all ranks together have trained on and recorded."""
        return self.length - sum(map(len, self._record.left()))

    def __len__(self) -> int:
        """How many indices this rank has yet to get in this epoch, as things stand."""
        self._follow()
        return self._deal.size - self._record.count

    def __iter__(self) -> Iterator[int]:
        """Go on after what is recorded. A second iterator makes the first one void."""
        self._follow()
        if self._hand is not None and self._hand.ended and not self._end_epoch():
            used_up = f"epoch {self._epoch} has been used up"
            raise RuntimeError(f"{used_up}: call set_epoch({self._epoch + 1}) before the next")
        return Indices.of(self, self._blocks())

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; nothing changes if it is the current one, which may be half used."""
        self._asked = epoch
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch = epoch
            self._deal_out((range(self.length),), self.rank, self.world_size, self._sizes)

    def record(self, batch: int | torch.Tensor | Sequence[int]) -> None:
        """This rank has trained on this many of its next indices.

        batch: a number, a tensor whose first dimension counts samples, or the list of indices.
        Raises ValueError if the iterator has not handed out so many.
        """
        self._record.add(batch if isinstance(batch, int) else len(batch), self._handed())

    def agree(self, group: dist.ProcessGroup | None = None) -> None:
        """Tell each other what each rank has recorded: all ranks, at the same step.

        Needed before a commit only where ranks record numbers that are not in proportion to their
        batch sizes. One all_gather of one number.
        """
        counts = gather(self._record.count, group)
        if len(counts) != self.world_size:
            raise ValueError(f"the group has {len(counts)} ranks, not {self.world_size}")
        self._record.agree(counts)

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
            batch_sizes = gather(batch_sizes) if world_size > 1 else [batch_sizes]
        if batch_sizes is not None and len(batch_sizes) != world_size:
            raise ValueError(f"{len(batch_sizes)} batch sizes for {world_size} ranks")
        self._deal_out(self._record.left(), rank, world_size, batch_sizes)

    def state_dict(self) -> dict[str, Any]:
        """The state after what is recorded: integers, a string or False, a list of integers.

        "skipped" holds [start, stop, step] of positions that were passed over; it is empty unless
        ranks recorded different numbers. Raises RuntimeError in the middle of a step.
        """
        self._say(self._record.missed_between_commits(self._handed()))
        return self._state(self._record.left())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of whatever world and rank. Iterators made before are void.

        Raises ValueError if it is of a data set of another length, or of another shuffle.
        """
        for name, mine in (("length", self.length), ("shuffle", self.shuffle)):
            if state[name] != mine:
                raise ValueError(f"the state's {name} is {state[name]!r}, the sampler's {mine!r}")
        self._epoch, self._seed = state["epoch"], state["seed"]
        left = unpacked(state["consumed"], state["skipped"], self.length)
        self._deal_out(left, self.rank, self.world_size, self._sizes, state["step"])

    def handed_state(self) -> dict[str, Any]:
        """The state as if all handed out were recorded, or {"unsettled": why there is none}.

        For a loader that counts for itself what of it was delivered (torchdata).
        """
        self._warned = True  # such a loader needs no record
        handed, step = self._handed(), self._record.step
        if reason := self._deal.unsettled(handed, step):
            return {"unsettled": reason}
        return self._state(self._deal.after_own(handed, step))

    def load_handed_state(self, state: Mapping[str, Any]) -> None:
        """As load_state_dict; but a used up epoch gives way to another that was asked for.

        Raises ValueError if there was none.
        """
        if "unsettled" in state:
            raise ValueError(f"this loader's state tells no place to go on: {state['unsettled']}")
        self._warned = True
        self.load_state_dict(state)
        if not self._deal.size and self._asked is not None:
            self.set_epoch(self._asked)

    def _deal_out(
        self,
        left: tuple[range, ...],
        rank: int,
        world_size: int,
        sizes: Sequence[int] | None,
        step: int | None = None,
    ) -> None:
        """Begin with this deal; step: rounds in a step, 0 if not known, None: as before."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        if self._hand is not None:
            self._hand.void = True
        self.rank, self.world_size, self._sizes = rank, world_size, sizes
        lanes = range(world_size) if sizes is None else lanes_of(sizes)
        self._deal = Deal(self.length, left, lanes, rank, self.tail)
        told = 0 if sizes is None else sizes[rank] // len(self._deal.own)
        self._record = Record(self._deal, self._record.step if step is None else step, told)
        self._hand = None

    def _follow(self) -> None:
        """Take the place that torch.distributed has given since, unless one was given here."""
        if self._follows and (here := place()) != (self.rank, self.world_size):
            self._deal_out(self._record.left(), *here, None)

    def _blocks(self) -> Iterator[Iterator[int]]:
        """What is not recorded yet; it counts as begun when the first index is taken."""
        if self._hand is not None:
            self._hand.void = True
        key = self._seed, self._epoch
        if self._order is None or self._order[0] != key:
            self._order = None  # let go of the old one before the new one takes memory
            self._order = key, order_of(self.shuffle, self.length, *key)
        self._hand = Hand(self._deal, self._order[1], self._record.count)
        yield from self._hand.blocks()

    def _handed(self) -> int:
        return 0 if self._hand is None else self._hand.handed

    def _state(self, left: tuple[range, ...]) -> dict[str, Any]:
        consumed, skipped = packed(left, self.length)
        return {
            "epoch": self._epoch,
            "seed": self._seed,
            "consumed": consumed,
            "skipped": skipped,
            "length": self.length,
            "shuffle": self.shuffle,
            "step": self._record.step,
        }

    def _end_epoch(self) -> bool:
        """Say it if the epoch ends with less recorded than it should, and return whether."""
        if self._hand is None or not self._hand.ended:
            return False
        missed = self._record.missed_in_epoch(self._hand.start, self._hand.handed)
        self._say(missed)
        return bool(missed)

    def _say(self, missed: str) -> None:
        if missed and not self._warned:
            self._warned = True
            text = f"{missed}: call sampler.record(batch) after each step, or they are used again"
            said = f"ElasticSampler: {text} after a change of world"
            warnings.warn(said, RuntimeWarning, stacklevel=4)
