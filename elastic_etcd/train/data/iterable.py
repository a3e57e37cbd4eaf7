"""ElasticIterable: samples that are streamed from files, each once in an epoch over all worlds.

shards.py has the positions of an epoch, and who reads which. Each batch of a loader carries
the position that its worker had reached, so that prefetched ones do not count. docs/stream.md says
what is guaranteed.
"""

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from numbers import Integral
from operator import index
from os import PathLike
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data import default_convert as convert
from torch.utils.data._utils import worker as torch_worker

from elastic_etcd.core.words import counted
from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.train.collectives import gather, rank_and_size, world_of
from elastic_etcd.train.data.permutation import Shuffle, order_of
from elastic_etcd.train.data.shards import (
    MOST_FILES,
    TAILS,
    FileRange,
    Layout,
    Ranges,
    Tail,
    from_position,
    refuse_other_data,
)

_AHEAD = 8  # batches that ranks have ready between two questions whether all have more

_Mark = tuple[int, int]  # a worker, and the position after the last sample that it has read


class ElasticIterable(IterableDataset[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """This rank's samples of a list of shards; record() counts those that were trained on.

        data = ee.ElasticIterable(paths, lambda path, start: islice(read(path), start, None))
        state = ee.ElasticState(model=model, data=data)
        for batch in state.steps(data.loader(batch_size=32, num_workers=4), commit_every=10):

    shards: paths, URLs, numbers, as `open` takes them; the same list on all ranks, in one order.
    open: a function of a shard and a number that gives the samples from that one on, always in the
    same order; if it can't seek it reads and drops those before.
    lengths: how many samples each shard has; with it shards are split, and all ranks get equally
    many samples.
    shuffle: the shards' order, by seed and epoch. buffer: samples of a shard that are shuffled with
    each other; 0: none are.
    tail: with lengths, the fate of the samples that the world does not divide, as for
    ElasticSampler. Without, "drop" ends the epoch on all ranks when the first one has no more;
    with "uneven" each reads all that it has.
    rank, world_size: as for ElasticSampler.

    All ranks make it with the same arguments but rank, and batches of the same size by the same
    number of workers. The state is a few integers for each worker. Raises ValueError for an
    argument out of its bounds. docs/stream.md says what is guaranteed.
    """

    def __init__(
        self,
        shards: Iterable[Any],
        open: Callable[[Any, int], Iterable[Any]],  # noqa: A002 - the best name for it
        *,
        lengths: Sequence[int] | None = None,
        shuffle: bool = True,
        buffer: int = 0,
        seed: int = 0,
        tail: Tail = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.shards = list(shards)
        self.lengths = None if lengths is None else [index(length) for length in lengths]
        _check_shards(self.shards, self.lengths)
        names = [_base_name(shard) for shard in self.shards]
        listed = blake2b(repr((names, self.lengths)).encode(), digest_size=7).digest()
        self._order = int.from_bytes(listed)  # 56 bits that tell whether two have the same list
        if tail not in TAILS or (tail == "pad" and lengths is None):
            known = ", ".join(TAILS) if lengths is not None else "drop, uneven (pad: with lengths)"
            raise ValueError(f"tail is one of {known}, not {tail!r}")
        if buffer < 0:
            raise ValueError(f"a buffer holds 0 or more samples, not {buffer}")
        self.tail, self.shuffle, self.buffer = tail, shuffle, buffer
        self._open, self._seed, self._epoch = open, seed, 0
        self._follows = rank is None
        self._warned = False
        self._current: object = None  # the token of the loader that has begun last
        self._begun: list[int] | None  # what each of its workers had to read
        self.rank, self.world_size = world_of(rank, world_size)
        self._begin_epoch(0)

    @property
    def epoch(self) -> int:
        """The current epoch; see set_epoch."""
        return self._epoch

    def loader(
        self, batch_size: int | None = 1, *, kind: Any = DataLoader, **arguments: Any
    ) -> Any:
        """A loader whose batches can be recorded; it takes a DataLoader's arguments.

        kind: DataLoader, or a class that is made like it, as torchdata's StatefulDataLoader. Raises
        ValueError for persistent workers, who would read the first epoch again and again.
        """
        return StreamLoader(self, batch_size, kind, arguments)

    def __iter__(self) -> Iterator[Any]:
        """The samples that this rank has yet to read, without marks. Train with loader()."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        own = self._split_own(workers)[number]
        return (sample for _, sample in self._read(own))

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; nothing changes if it is the current one, which may be half used."""
        if epoch != self._epoch:
            self._settle()
            if self._ended and self._delivered and not self._warned:
                self._warned = True
                missed = f"{len(self._delivered)} batches of an epoch were not recorded"
                text = f"ElasticIterable: {missed}: call record() after each step"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._begin_epoch(epoch)

    def record(self, batches: int = 1) -> None:
        """This rank has trained on this many more of the batches that its loader has given.

        Raises ValueError if they are not so many, TypeError for no number.
        """
        if self._in_hand:
            raise UsageError("state.steps counts the batches of this loop: leave record() out")
        count = index(batches)
        if not 0 <= count <= len(self._delivered):
            open_ = f"{len(self._delivered)} that data.loader(...) gave are open"
            raise ValueError(f"recorded {count} batches, but {open_}")
        for _ in range(count):
            worker, position = self._delivered.popleft()
            self._by_worker[worker] = from_position(self._by_worker[worker], position)
        self._agreed &= not count

    def _take(self) -> None:
        """A loop of state.steps goes on to the batch that was given last: it is in hand now.

        The batch before counts as trained on.
        """
        self._settle()
        self._in_hand = self._warned = True

    def _settle(self) -> None:
        """Count the batch in hand, if any, as trained on."""
        if self._in_hand:
            self._in_hand = False
            self.record()

    def _shares_step(self) -> bool:
        """Whether all ranks take part in the step that begins with the batch in hand."""
        return self.tail != "uneven" or self.world_size == 1

    def _end_here(self) -> None:
        """Do nothing for an uneven tail: before a commit streams ask the others."""

    def _is_whole(self) -> bool:
        """Whether there is an epoch of which nothing is used yet."""
        return self._agreed and 0 < self._layout.end == sum(map(len, self._remaining))

    def agree(self) -> None:
        """Tell all ranks the samples that each has yet to read; ElasticState.commit() calls it.

        Collective, where there is a process group. Raises, on all ranks alike, RuntimeError if they
        are in different epochs, WrongHere if they have different shards.
        """
        self._settle()
        own = self._layout.join([part for ranges in self._by_worker for part in ranges])
        if self.world_size == 1:
            self._remaining = self._layout.join([*own, *self._left_over])
        elif rank_and_size(launched=False) == (self.rank, self.world_size):
            self._remaining = self._layout.join([*self._gather_own(own), *self._left_over])
        else:
            return  # nobody to ask; state_dict() says so where it matters
        self._agreed = True

    def reshard(self, rank: int | None = None, world_size: int | None = None) -> None:
        """Split what remains of the epoch anew; all ranks call it at the same step.

        rank, world_size: the new world; None: as they are. Loaders' iterators made before are void.
        Raises UsageError where agree() is missing.
        """
        self._follow()
        self._follows &= rank is None
        rank = self.rank if rank is None else rank
        self._begin_shard(
            self._settled(), rank, self.world_size if world_size is None else world_size
        )

    def state_dict(self) -> dict[str, Any]:
        """The state after what is recorded: {"epoch": 3, "seed": 0, "remaining": [[start, stop]...

        Global, and equal on all ranks. Its other values tell whether it fits. Raises UsageError
        if something was recorded since agree(), unless this rank is alone.
        """
        remaining = [[part.start, part.stop] for part in self._settled()]
        return {"epoch": self._epoch, "seed": self._seed, "remaining": remaining, **self._kind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, of whatever world and rank. Iterators made before are void.

        Raises WrongHere if it is of other shards, by their base names, or in another order.
        """
        refuse_other_data(state, self._kind())
        self._seed = state["seed"]
        self._begin_epoch(state["epoch"])
        remaining = tuple(range(start, stop) for start, stop in state["remaining"])
        self._begin_shard(remaining, self.rank, self.world_size)

    def _begin(self, workers: int) -> object:
        """A loader begins: its workers share what this rank has yet to read.

        The value is `current` as long as no other one has begun. Raises UsageError for an epoch
        that is used up.
        """
        self._settle()
        self._follow()
        if self._ended:
            used_up = f"epoch {self._epoch} has been used up"
            raise UsageError(f"{used_up}: call set_epoch({self._epoch + 1}) before the next")
        self._begun = self._sizes(workers, running=False)
        self._by_worker = self._split_own(max(workers, 1))
        self._delivered.clear()
        self._current = object()
        return self._current

    def _deliver(self, mark: _Mark) -> None:
        """A loader gives a batch to its loop."""
        self._delivered.append(mark)

    def _finish(self) -> None:
        """A loader, or a loop of state.steps, has no more batches."""
        self._settle()
        self._ended = True

    def _sizes(self, workers: int, *, running: bool) -> list[int] | None:
        """How many samples each worker would read from now on; None if nobody knows.

        `running`: those of the loader that has begun last, if there is one.
        """
        self._follow()
        if self.lengths is None:
            return None
        if running and self._begun:
            return self._begun
        return [sum(map(len, ranges)) for ranges in self._split_own(max(workers, 1))]

    def _ranges_of(self, worker: int) -> Ranges:
        """The positions that this worker has to read."""
        return self._by_worker[worker]

    def _read(self, ranges: Ranges) -> Iterator[tuple[int, Any]]:
        """The samples at these positions, each with the position after it."""
        for part in self._layout.file_ranges(ranges):
            yield from _with_positions(part, self._read_file(part))

    def _read_file(self, part: FileRange) -> Iterator[Any]:
        shard, count = self.shards[part.file], part.stop - part.start
        length = None if self.lengths is None else self.lengths[part.file]
        samples = self._read_shuffled(part, length) if self.buffer else self._read_in_order(part)
        read = 0
        for sample in islice(_as_without_workers(samples), count):
            read += 1
            yield sample
        if length is not None and read < count:
            short = f"shard {shard!r} ended after {part.start + read} samples"
            raise ValueError(f"{short}, but its length was given as {length}")

    def _read_in_order(self, part: FileRange) -> Iterator[Any]:
        """A generator, so that the file is opened where no worker can be seen."""
        yield from self._open(self.shards[part.file], part.start)

    def _read_shuffled(self, part: FileRange, length: int | None) -> Iterator[Any]:
        """Blocks of the file, each shuffled by its place, from the part's start on."""
        first = part.start - part.start % self.buffer
        samples = iter(self._open(self.shards[part.file], first))
        while first < part.stop:
            size = self.buffer if length is None else min(self.buffer, length - first)
            block = list(islice(samples, size))
            if not block:
                return
            key = f"{self._seed} {self._epoch} {part.file} {first}"
            random.Random(key).shuffle(block)  # noqa: S311 - no secret
            yield from block[max(part.start - first, 0) :]
            first += self.buffer

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        numbers = torch.arange(len(self.shards), device="cpu")
        shuffle: Shuffle = "exact" if self.shuffle else False
        order = order_of(shuffle, len(self.shards), self._seed, epoch)(numbers).tolist()
        self._layout = Layout(order, self.lengths)
        self._begin_shard(self._layout.join([range(self._layout.end)]), self.rank, self.world_size)

    def _begin_shard(self, remaining: Ranges, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.rank, self.world_size = rank, world_size
        parts, self._left_over = self._layout.split(remaining, world_size, self.tail)
        self._remaining, self._agreed = remaining, True
        self._by_worker = [parts[rank]]
        self._delivered: deque[_Mark] = deque()
        self._current, self._begun = None, None
        self._ended = self._in_hand = False

    def _split_own(self, workers: int) -> list[Ranges]:
        """Repetitions stay at the end: they have the highest positions."""
        own = sorted(
            (part for ranges in self._by_worker for part in ranges), key=lambda part: part.start
        )
        return self._layout.split(tuple(own), workers, "uneven")[0]

    def _settled(self) -> Ranges:
        """The remaining positions, of all ranks. Raises UsageError if they are not known."""
        self._settle()
        if not self._agreed and self.world_size == 1:
            self.agree()
        if not self._agreed:
            raise UsageError("recorded more since agree(): agree() on all ranks before a commit")
        return self._remaining

    def _follow(self) -> None:
        """Split for the world that torch.distributed has made since, unless one was given here."""
        if self._follows and (world := rank_and_size()) != (self.rank, self.world_size):
            self._begin_shard(self._settled(), *world)

    def _gather_own(self, own: Ranges) -> list[range]:
        """The positions that all ranks have yet to read."""
        rows = gather([self._epoch, len(own), self._order])
        epochs = [epoch for epoch, _, _ in rows]
        if len(set(epochs)) > 1:
            raise RuntimeError(f"ranks are in different epochs: {epochs}; call set_epoch on all")
        if others := [rank for rank, row in enumerate(rows) if row[2] != rows[0][2]]:
            raise WrongHere(
                f"ranks {others} have other shards than rank 0, or in another order: give all the "
                "same list (sort what glob.glob() gives)"
            )
        most = max(count for _, count, _ in rows)
        padded = [*own, *[range(0)] * (most - len(own))]
        rows = gather([bound for part in padded for bound in (part.start, part.stop)])
        pairs = (zip(row[::2], row[1::2], strict=True) for row in rows)
        return [range(*pair) for row in pairs for pair in row]

    def _kind(self) -> dict[str, Any]:
        samples = None if self.lengths is None else sum(self.lengths)
        kind = {"shuffle": self.shuffle, "buffer": self.buffer, "order": self._order}
        return {"shards": len(self.shards), "samples": samples, **kind}


class StreamLoader:
    """A DataLoader over an ElasticIterable, with marked batches; a BatchSource for a loop.

    `data` is the ElasticIterable, `loader` the DataLoader. `len()` is how many batches its iterator
    gives, and constant while that runs: until another one begins, or an epoch, a world. TypeError
    without lengths.
    """

    def __init__(
        self, data: ElasticIterable, batch_size: int | None, kind: Any, arguments: dict[str, Any]
    ) -> None:
        if arguments.get("persistent_workers"):
            raise ValueError("persistent workers would read the first epoch again: leave them out")
        batched = batch_size is not None
        collate = arguments.pop("collate_fn", None) or (default_collate if batched else convert)
        marking = partial(_collate_marked, collate, batched)
        self.data, self.counting = data, [data]
        self.loader = kind(_Marked(data), batch_size=batch_size, collate_fn=marking, **arguments)

    def __len__(self) -> int:
        return self._batches(running=True)

    def remaining(self) -> int:
        """How many batches an iterator would give that began now; TypeError without lengths."""
        return self._batches(running=False)

    def _batches(self, *, running: bool) -> int:
        sizes = self.data._sizes(self.loader.num_workers, running=running)
        if sizes is None:
            raise TypeError("the number of batches is not known: give ElasticIterable lengths")
        batch = self.loader.batch_size or 1
        down = self.loader.drop_last
        return sum(size // batch if down else -(-size // batch) for size in sizes)

    def begin(self, accumulate: int, ranks_before: int) -> int | None:  # noqa: ARG002 - a BatchSource's
        """Begin a loop of state.steps. Returns how many batches it has, None without lengths."""
        self.data._settle()  # the batch in hand of the loop before is none of this one
        return None if self.data.lengths is None else self.remaining()

    def take_each(self) -> Iterator[Any]:
        """Yield each batch, which is in hand then: the one before has been trained on."""
        for batch in self:
            self.data._take()
            yield batch

    def refuse_empty(self) -> None:
        """Raise UsageError for a whole epoch that gave no batch; an uneven one may, on a rank."""
        data, loader = self.data, self.loader
        if not (data._shares_step() and data._is_whole()):
            return
        of, cure = f"{sum(data.lengths or ())} samples", ""
        if data.lengths is None:
            of = f"{counted(len(data.shards), 'file')} of unknown length"
            cure = "give the stream its lengths=, or more files than there are ranks, or "
        workers = counted(max(loader.num_workers, 1), "worker")
        raise UsageError(
            f"no batch in an epoch of {of} for {counted(data.world_size, 'rank')} with {workers} "
            f"each and batches of {loader.batch_size or 1}, so nothing would be trained: {cure}"
            "take smaller batches, fewer workers, drop_last=False or fewer ranks"
        )

    def __iter__(self) -> Iterator[Any]:
        """Go on after what is recorded. Another iterator makes the one before void."""
        begun = self.data._begin(self.loader.num_workers)
        return self._deliver(begun, iter(self.loader))

    def _deliver(self, begun: object, batches: Iterator[Any]) -> Iterator[Any]:
        """A generator: the data has begun anew before its first batch is asked for."""
        for mark, batch in self._together(batches):
            if self.data._current is not begun:
                raise RuntimeError("this iterator is void: the data has begun anew since")
            self.data._deliver(mark)
            yield batch
        if self.data._current is begun:
            self.data._finish()

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """As many on each rank as on the one that has the fewest, where lengths don't see to it."""
        data = self.data
        single = rank_and_size(launched=False)[1] == 1 or data.world_size == 1
        if single or data.lengths is not None or data.tail != "drop":
            yield from batches
            return
        ready = _AHEAD
        while ready == _AHEAD:
            ahead = list(islice(batches, _AHEAD))
            ready = min(count for (count,) in gather([len(ahead)]))
            yield from ahead[:ready]


class _Marked(IterableDataset[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """The samples with their positions, as the loader's workers read them."""

    def __init__(self, data: ElasticIterable) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._data._read(self._data._ranges_of(_worker()))


def _collate_marked(
    collate: Callable[[Any], Any], batched: bool, samples: Any
) -> tuple[_Mark, Any]:
    """The batch that the user's collate_fn makes, behind its mark."""
    marked = samples if batched else [samples]
    plain = [sample for _, sample in marked]
    return (_worker(), marked[-1][0]), collate(plain if batched else plain[0])


def _worker() -> int:
    worker = get_worker_info()
    return worker.id if worker else 0


def _as_without_workers(samples: Iterator[Any]) -> Iterator[Any]:
    """The samples, made as if there were no workers.

    webdataset and datasets split their samples among the workers that they see: here that would
    split a worker's part once more.
    """
    more = True
    while more:
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            batch = list(islice(samples, 1))
        finally:
            torch_worker._worker_info = info
        more = bool(batch)
        yield from batch


def _with_positions(part: FileRange, samples: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Each sample with the position after it; after the last one, that is the part's end."""
    held: list[Any] = []
    position = part.position
    for sample in samples:
        if held:
            position += 1
            yield position, held.pop()
        held.append(sample)
    if held:
        yield part.position + part.stop - part.start, held.pop()


def _base_name(shard: Any) -> str:
    """By which nodes with other mount points know a path or a URL, or a number; "" of all else."""
    if not isinstance(shard, (str, PathLike, Integral)):
        return ""
    return str(shard).partition("?")[0].rstrip("/").rpartition("/")[2]  # without a signature


def _check_shards(shards: Sequence[Any], lengths: Sequence[int] | None) -> None:
    if lengths is None and len(shards) > MOST_FILES:
        raise ValueError(f"{len(shards)} shards of unknown length are more than {MOST_FILES}")
    if lengths is not None and len(lengths) != len(shards):
        raise ValueError(f"{len(lengths)} lengths for {len(shards)} shards")
    if lengths is not None and min(lengths, default=0) < 0:
        raise ValueError(f"a shard has 0 or more samples, not {min(lengths)}")
