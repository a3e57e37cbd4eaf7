"""The sources of the batches of `state.steps`: a loader whose samplers count, or a stream's.

A loader may have read many batches ahead of the one that is trained on, and its batches don't say
how many samples went into them. So its batch sampler is asked instead: each batch that comes out of
the loader is the next one that the batch sampler gave, and a note says which sampler gave how many
positions for it. A stream's batches carry their place themselves (iterable.py).
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import activity
from elastic_etcd.train.collectives import gather, rank_and_size
from elastic_etcd.train.data.batch_sampler import MicroBatches
from elastic_etcd.train.data.iterable import ElasticIterable, StreamLoader
from elastic_etcd.train.data.sampler import ElasticSampler, Indices, Length

_INSIDE = ("loader", "_loader", "dataloader", "_dataloader", "iterable")  # of what wraps a loader
BY_HAND = "or call sampler.record(number), state.commit() and state.check() in a loop of your own"

log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """The batches of a loop of state.steps, and what counts the positions that they use."""

    @property
    def counting(self) -> Sequence[ElasticSampler | ElasticIterable]:
        """The samplers, or the stream, of this loader, as far as is known."""

    def remaining(self) -> int:
        """Return how many batches a loop would have now. Raises TypeError if nobody knows."""

    def begin(self, accumulate: int, ranks_before: int) -> int | None:
        """Begin a loop. Returns how many batches it has, None if nobody knows.

        accumulate: batches in a step. ranks_before: of the commit from which all go on, or 0.
        Raises UsageError, on all ranks, if some have more batches than others, or may have.
        """

    def take_each(self) -> Iterator[Any]:
        """Yield each batch, which is in hand then: the one before has been trained on.

        Raises UsageError for a batch that can't be counted.
        """

    def refuse_empty(self) -> None:
        """Raise UsageError if not even a whole epoch has a batch for this rank.

        Call it after a loop that had none, before it is finished.
        """


def source_of(
    loader: Iterable[Any], samplers: Iterable[ElasticSampler | ElasticIterable]
) -> BatchSource:
    """The source of this loader's batches. Raises UsageError if they can't be counted.

    samplers: all that the state has, one of which a batch sampler of the user's may hide.
    """
    if isinstance(loader, StreamLoader):
        return loader
    return SampledLoader(loader, [s for s in samplers if isinstance(s, ElasticSampler)])


def is_uneven(source: BatchSource) -> bool:
    """True if one rank may take a step more than another."""
    return any(sampler.tail == "uneven" for sampler in source.counting)


class SampledLoader:
    """The source of a DataLoader, or of what wraps one, with samplers of the state."""

    def __init__(self, loader: Iterable[Any], samplers: Sequence[ElasticSampler]) -> None:
        self._loader, self._samplers = loader, samplers
        self._batches = _batches_of(loader)
        self._found = samplers_in(self._batches)
        self.counting = [*self._found]  # and those that are hidden, once they give something
        self._are_alike = _sizes_are_alike(self._batches.inner)

    def remaining(self) -> int:
        return _length(self._batches, self._samplers, "rest")

    def begin(self, accumulate: int, ranks_before: int) -> int | None:
        for sampler in self.counting:
            sampler._settle()  # the batch in hand of the loop before is none of this one
        self._log_step(accumulate, ranks_before)
        try:
            total = self.remaining()
        except TypeError:  # a batch sampler without a length
            total = None
        self._refuse_other_lengths(total)
        return total

    def take_each(self) -> Iterator[Any]:
        self._batches.begin(self._samplers)
        for sampler in self._found:
            sampler._varies |= not self._are_alike
        for batch in self._loader:
            if not self._batches.notes:
                what = f"{_named(self._loader)} gave a batch that no sampler has handed out"
                raise UsageError(f"{what}: loop over the DataLoader itself, {BY_HAND}")
            for sampler, count in self._batches.notes.popleft().counts:
                sampler._take(count)
                if sampler not in self.counting:
                    self.counting.append(sampler)
            yield batch
            if self._batches.notes:  # a loader with workers may fail by the batch that is due now
                self._batches.notes[0].tell()
        if page := activity.own_page():
            page.put_down()
        if self._batches.notes:
            raise UsageError(f"{_named(self._loader)} has lost batches: {BY_HAND}")

    def _log_step(self, accumulate: int, ranks_before: int) -> None:
        """Let rank 0 say how large a step is now, if the world has another size than before."""
        if not self.counting:
            return
        sampler = self.counting[0]
        size, (was, ranks) = self._samples(sampler, accumulate), sampler._in_step
        sampler._in_step = size, sampler.world_size
        ranks = ranks or ranks_before
        if size and size != was and not sampler.rank and ranks not in (0, sampler.world_size):
            known = f"was {was}" if was else f"of {sampler.world_size} ranks, which were {ranks}"
            log.info("a step is %d samples, %s", size, known)

    def _samples(self, sampler: ElasticSampler, accumulate: int) -> int:
        """The samples of all ranks in a step; 0 if a batch may have any number of them."""
        batches = self._batches.inner
        if isinstance(batches, MicroBatches):
            return sampler._in_all(sum(batches.sizes))
        if type(batches) is not BatchSampler:
            return 0
        return sampler._in_all(batches.batch_size * accumulate)

    def _refuse_other_lengths(self, total: int | None) -> None:
        _, size = rank_and_size(launched=False)
        if size == 1 or self._are_alike or any(s.world_size != size for s in self._samplers):
            return
        lengths = [n for (n,) in gather([-1 if total is None else total])]
        most, least = max(lengths), min(lengths)
        if least >= 0 and most - least <= is_uneven(self):
            return
        named, cure = _named(self._batches.inner), "or give all ranks the same __len__()"
        told = f"{named} gives the ranks {lengths} batches: some would wait for others for ever"
        if least < 0:
            told = f"{named} has no length, so that a rank may have more batches than another"
        raise UsageError(
            f"{told}. Let an ElasticBatchSampler deal out the batches of a whole epoch, equally "
            f"many to each rank, {cure}"
        )

    def refuse_empty(self) -> None:
        for sampler in [] if is_uneven(self) else self._found:
            with suppress(TypeError):  # a batch sampler without a length
                if sampler.length and _length(self._batches, [sampler], "epoch") == 0:
                    raise UsageError(
                        f"no batch in an epoch of {sampler.length} samples for rank {sampler.rank} "
                        f"of {sampler.world_size}, so nothing would be trained: take smaller "
                        'batches, drop_last=False, ElasticSampler(tail="pad") or fewer ranks'
                    )


class _Note(NamedTuple):
    """A batch that was handed out."""

    counts: list[tuple[ElasticSampler, int]]  # what gave how many positions for it
    batch: Any  # as the batch sampler gave it

    def tell(self) -> None:
        """Tell the agent that this is the batch in hand, with its indices if these are numbers."""
        page = activity.own_page()
        if page is None or not self.counts:
            return
        indices = self.batch if isinstance(self.batch, (list, tuple)) else [self.batch]
        indices = indices[: activity.INDICES]
        if not all(type(index) is int and 0 <= index < 1 << 63 for index in indices):
            indices = []
        sampler, count = self.counts[0]
        page.take(max(0, sampler.epoch), sampler._number_of_batch(count), indices)


class Batches(Sampler[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """Stands in a loader for its batch sampler, or sampler, and notes the samples of each batch.

    It has the notes of the latest iteration: there is a loop at a time.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._samplers: Sequence[ElasticSampler] = ()
        self.notes: deque[_Note] = deque()  # of what the loader has yet to give

    def begin(self, samplers: Sequence[ElasticSampler]) -> None:
        """A loop begins: note what these samplers give."""
        self._samplers, self.notes = samplers, deque()

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.inner)
        if not self._samplers:
            return batches
        self.notes = deque()
        kind = _StatefulNoted if hasattr(batches, "state_dict") else _Noted
        return kind(batches, self._samplers, self.notes)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not made yet: a copy, or one that is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class _Noted(Iterator[Any]):
    """An iteration over a batch sampler."""

    def __init__(
        self, batches: Iterator[Any], samplers: Sequence[ElasticSampler], notes: deque[_Note]
    ) -> None:
        self._batches, self._samplers, self._notes = batches, samplers, notes
        self._direct = isinstance(batches, Indices)  # nothing between: whatever one is, it is one
        self._began = False

    def __next__(self) -> Any:
        before = [sampler._handed_out for sampler in self._samplers]
        batch = next(self._batches)
        counts = [s._handed_out - was for s, was in zip(self._samplers, before, strict=True)]
        size = len(batch) if isinstance(batch, (list, tuple)) and not self._direct else 1
        if sum(counts) != size:
            raise UsageError(_why_not(size, sum(counts), began=self._began))
        self._began = True
        shares = [(s, n) for s, n in zip(self._samplers, counts, strict=True) if n]
        note = _Note(shares, batch)
        if not self._notes:  # nothing is read ahead: it is the next one
            note.tell()
        self._notes.append(note)
        return batch


class _StatefulNoted(_Noted):
    """Batches that are noted, where torchdata's StatefulDataLoader asks for their state."""

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)  # type: ignore[attr-defined]


def steps_per_epoch(loader: Iterable[Any], *, accumulate: int = 1) -> int:
    """How many steps of the optimizer a whole epoch has in this world, for a scheduler.

        steps = ee.steps_per_epoch(loader)
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=epochs * steps)

    loader: as for ElasticState.steps; accumulate: batches in a step. The number stays the same in
    the course of the epoch, and in other worlds if the global batch does. Raises UsageError for a
    loader without an ElasticSampler. "The loop" in docs/state.md has more.
    """
    batches = _batches_of(loader)
    samplers = samplers_in(batches)
    if not samplers:
        raise UsageError(f"{_named(loader)} has no ElasticSampler: give it sampler=")
    return -(-_length(batches, samplers, "epoch") // accumulate)


def _length(batches: Batches, samplers: Iterable[ElasticSampler], part: Length) -> int:
    with ExitStack() as stack:
        for sampler in samplers:
            stack.enter_context(sampler._length_of(part))
        return len(batches)


def samplers_in(batches: Any) -> list[ElasticSampler]:
    """The ElasticSamplers that a batch sampler has, or samplers of its own have."""
    if isinstance(batches, ElasticSampler):
        return [batches]
    values = vars(batches).items() if hasattr(batches, "__dict__") else ()
    inner = [value for name, value in values if "sampler" in name or name == "inner"]
    return [sampler for value in inner for sampler in samplers_in(value)]


def _sizes_are_alike(batches: Any) -> bool:
    """Whether all ranks take as many samples in a step, as far as is known of such a sampler."""
    theirs = type(batches).__module__.partition(".")[0] in {"torch", "torchdata"}
    return theirs or isinstance(batches, (ElasticSampler, MicroBatches))


def _batches_of(loader: Any) -> Batches:
    """The Batches of this loader, which gets them if it has none. Raises UsageError."""
    inner = _loader_in(loader)
    name = "sampler" if inner.batch_sampler is None else "batch_sampler"
    batches = vars(inner)[name]
    if not isinstance(batches, Batches):
        batches = vars(inner)[name] = Batches(batches)  # the loader's own attribute is read-only
    if running := getattr(inner, "_iterator", None):  # of workers that persist
        running._index_sampler = batches
    return batches


def _loader_in(loader: Any) -> Any:
    """The DataLoader that it is or wraps, if its batches can be counted. Raises UsageError."""
    if hasattr(loader, "base_dataloader"):
        raise UsageError(
            "this loader was prepared by accelerate, which shards it once more and sets its epochs:"
            " leave it out of accelerator.prepare(), and move batches to accelerator.device"
        )
    if isinstance(loader, StreamLoader):
        raise UsageError(
            "a stream's loader() counts its batches itself: give it to state.steps as it is, and "
            "put what wraps it around that. How many there are follows from its lengths"
        )
    if not isinstance(loader, DataLoader):
        for name in _INSIDE:
            if hasattr(loader, name):
                return _loader_in(getattr(loader, name))
        raise UsageError(f"{_named(loader)} is no DataLoader: give steps() one, {BY_HAND}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset deals out its samples itself, and no sampler counts them: make it "
            f"a data set with indices, or an ElasticIterable and take its loader(), {BY_HAND}"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise UsageError(
            "a loader with in_order=False gives its batches in another order than its sampler, so "
            "that others than were trained on would count: leave in_order out"
        )
    return loader


def _why_not(size: int, handed: int, *, began: bool) -> str:
    """Why a batch of so many indices can't be counted, when samplers handed out so many."""
    if began and not handed:
        return "the sampler has begun anew since this loop began: begin a new loop, too"
    if not handed:
        return (
            "this loader's batches do not come from an ElasticSampler of the state: give it "
            f"DataLoader(sampler=state.sampler), {BY_HAND}"
        )
    return (
        f"the loader's batch sampler took {handed} indices for a batch of {size}: what is trained "
        "on must be the sampler's next indices, each of them, in its order"
    )


def _named(loader: object) -> str:
    return f"{type(loader).__module__}.{type(loader).__qualname__}"
