"""The loop over a loader's batches, for `state.steps`: counts, commits, checks.

A loader may have read many batches ahead of the one that is trained on, and its batches don't say
how many samples went into them. So its batch sampler is asked instead: each batch that comes out of
the loader is the next one that the batch sampler gave, and a note says which sampler gave how many
positions for it.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal, NamedTuple, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import activity
from elastic_etcd.train.collectives import gather, rank_and_size
from elastic_etcd.train.data.batch_sampler import MicroBatches
from elastic_etcd.train.data.iterable import ElasticIterable, StreamLoader
from elastic_etcd.train.data.sampler import ElasticSampler, Indices, Length
from elastic_etcd.train.state import agreement
from elastic_etcd.train.state.commit_interval import CommitInterval

_INSIDE = ("loader", "_loader", "dataloader", "_dataloader", "iterable")  # of what wraps a loader
_BY_HAND = "or call sampler.record(number), state.commit() and state.check() in a loop of your own"

log = logging.getLogger(__name__)
CommitEvery = int | Literal["auto"] | None


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


class Committing(Protocol):
    """A state, as a loop needs it; ElasticState is one."""

    def commit(self, every: int = 1) -> None:
        """Take a snapshot, at each so many calls."""

    def check(self) -> None:
        """Stop here if all ranks are to stop."""


class Loops:
    """The loops over the batches of a state, which owns this: only the latest may commit."""

    def __init__(self) -> None:
        self._latest: object = None
        self.ranks_before = 0  # of the commit from which all go on, if there was one
        self.within_step = 0  # the batches of the step that the batch in hand does not end
        self.interval = CommitInterval()

    def begin(self) -> object:
        """A loop that commits or checks begins; the value stands for it."""
        self._latest = object()
        return self._latest

    def note_step(self, loop: object, batches: int) -> None:
        """Note that the batch in hand does not end its step of so many batches; 0: it does.

        A loop of None, which does not check, may run within the step of another.
        """
        if loop is not None:
            self.within_step = batches

    def raise_within_step(self, call: str) -> None:
        """Raise UsageError if the batch in hand does not end its step."""
        if self.within_step:
            raise UsageError(
                f"{call} within a step of {self.within_step} batches: the gradients of those before"
                " would be lost with this world. Leave it to state.steps(commit_every=n), or call "
                "it where the loop's `ends_step` is true"
            )

    def raise_if_another(self, loop: object) -> None:
        """Raise UsageError if another loop has begun since."""
        if loop is not self._latest:
            raise UsageError(
                "two loops of state.steps run at the same time: which of their batches are trained "
                "on when one of them commits can't be told. Give all of them check=False, and call "
                "state.commit(every=n) and state.check() at the end of the loop's body"
            )


class Steps:
    """The batches of an epoch, or the rest of it; ElasticState.steps makes it.

    `len()` is how many batches remain. While a loop runs it stays as it was at the beginning, so
    that a bar of progress has its total. It can be looped over again, for the next epoch.
    """

    def __init__(
        self,
        state: Committing,
        loops: Loops,
        loader: Iterable[Any],
        samplers: Sequence[ElasticSampler | ElasticIterable],
        commit_every: CommitEvery,
        accumulate: int,
        *,
        check: bool,
    ) -> None:
        is_number = isinstance(commit_every, int) and commit_every >= 1 and check
        if not is_number and commit_every not in ("auto", None):
            what = "at least 1" if check else "not in a loop with check=False"
            raise UsageError(f"steps(commit_every={commit_every}): {what}")
        if accumulate < 1:
            raise UsageError(f"steps(accumulate={accumulate}): at least 1")
        if not samplers:
            raise UsageError(f"the state has no ElasticSampler: give it one, {_BY_HAND}")
        self._state, self._loops, self._loader = state, loops, loader
        self._samplers = [s for s in samplers if isinstance(s, ElasticSampler)]
        self._commit_every, self._accumulate, self._check = commit_every, accumulate, check
        self._batches: Batches | StreamLoader
        self._own: list[ElasticSampler | ElasticIterable]  # that give the loader its samples
        if isinstance(loader, StreamLoader):
            self._batches, self._own = loader, [loader.data]
        else:
            self._batches = _batches_of(loader)
            self._own = [*samplers_in(self._batches)]
        for sampler in self._own:
            if not any(sampler is known for known in samplers):
                raise UsageError(
                    f"the loader's {type(sampler).__name__} is not the state's: give the state "
                    "this one, as ElasticState(sampler=...), or the loader the state's"
                )
        self._total: int | None = None
        self._ends_step = False

    @property
    def ends_step(self) -> bool:
        """Whether a step of the optimizer ends with the batch in hand.

        That is so with each `accumulate`-th batch, and with the last one of the epoch.
        """
        return self._ends_step

    def __len__(self) -> int:
        return self._remaining() if self._total is None else self._total

    def __iter__(self) -> Iterator[Any]:
        """Raises UsageError for a batch that can't be counted, and what commit and check raise.

        At its end all ranks ask each other once more whether their world is whole.
        """
        loop = self._loops.begin() if self._check else None
        self._tell_size()
        if isinstance(self._batches, StreamLoader):
            self._batches.data._settle()  # the batch in hand of the loop before is none of this one
        try:
            self._total = self._remaining()
        except TypeError:  # a batch sampler without a length
            self._total = None
        if self._total is None and self._accumulate > 1:
            raise UsageError(
                f"accumulate={self._accumulate} over a loader without a length: nobody knows which "
                "batch is the last, whose step would be lost. Give the stream its lengths="
            )
        self._refuse_other_lengths()
        untouched = all(s._is_whole() for s in self._own if isinstance(s, ElasticIterable))
        number, shared = 0, True
        try:
            for batch in self._take_each():
                shared &= all(sampler._shares_step() for sampler in self._own)
                number += 1
                whole = number % self._accumulate == 0
                self._ends_step = whole or number == self._total
                self._loops.note_step(loop, 0 if self._ends_step else self._accumulate)
                if self._ends_step and not whole and self._uneven:
                    for sampler in self._own:
                        if isinstance(sampler, ElasticSampler):  # streams ask the others
                            sampler._end_here()
                yield batch
                self._loops.note_step(loop, 0)
                # Of an uneven tail one rank may have its share in an incomplete step, another none.
                self._turn(loop, ends=self._ends_step and shared and (whole or not self._uneven))
                shared = shared or whole  # of the next one
        finally:
            self._total = None
            self._loops.note_step(loop, 0)
        if not number and untouched:
            self._refuse_an_empty_epoch()
        for sampler in self._own:
            sampler._finish()
        if self._check and not any(sampler.tail == "uneven" for sampler in self._own):
            agreement.agree(0, 0)  # the training may end here, without another commit

    def _tell_size(self) -> None:
        """Let rank 0 say what a step is now, where the world has another size than before."""
        if isinstance(self._batches, StreamLoader):
            return
        for sampler in self._own[:1]:
            assert isinstance(sampler, ElasticSampler)
            size, (was, ranks) = self._samples(sampler), sampler._in_step
            sampler._in_step = size, sampler.world_size
            ranks = ranks or self._loops.ranks_before
            if not size or size == was or sampler.rank or ranks in (0, sampler.world_size):
                continue
            known = f"was {was}" if was else f"of {sampler.world_size} ranks, which were {ranks}"
            log.info("a step is %d samples, %s", size, known)

    def _samples(self, sampler: ElasticSampler) -> int:
        """The samples of all ranks in a step; 0 if a batch may have any number of them."""
        assert isinstance(self._batches, Batches)
        batches = self._batches.inner
        if isinstance(batches, MicroBatches):
            return sampler._in_all(sum(batches.sizes))
        if type(batches) is not BatchSampler:
            return 0
        return sampler._in_all(batches.batch_size * self._accumulate)

    def _remaining(self) -> int:
        """How many batches a loop has that begins now. Raises TypeError if nobody knows."""
        if isinstance(self._batches, StreamLoader):
            return self._batches.remaining()
        return _length(self._batches, self._samplers, "rest")

    def _refuse_other_lengths(self) -> None:
        """Raise UsageError, on all ranks, if some have more batches than others, or may have."""
        _, size = rank_and_size(launched=False)
        if isinstance(self._batches, StreamLoader) or _sizes_are_alike(self._batches.inner):
            return
        if size == 1 or any(sampler.world_size != size for sampler in self._samplers):
            return
        lengths = [n for (n,) in gather([-1 if self._total is None else self._total])]
        most, least = max(lengths), min(lengths)
        if least >= 0 and most - least <= self._uneven:
            return
        named, cure = _named(self._batches.inner), "or give all ranks the same __len__()"
        told = f"{named} gives the ranks {lengths} batches: some would wait for others for ever"
        if least < 0:
            told = f"{named} has no length, so that a rank may have more batches than another"
        raise UsageError(
            f"{told}. Let an ElasticBatchSampler deal out the batches of a whole epoch, equally "
            f"many to each rank, {cure}"
        )

    def _refuse_an_empty_epoch(self) -> None:
        """Raise UsageError if not even a whole epoch has a batch for this rank, nor is to.

        A stream's is known to be empty when it was.
        """
        if isinstance(self._batches, StreamLoader):
            self._batches.refuse_empty()
            return
        if self._uneven:
            return
        for sampler in samplers_in(self._batches):
            with suppress(TypeError):  # a batch sampler without a length
                if sampler.length and _length(self._batches, [sampler], "epoch") == 0:
                    raise UsageError(
                        f"no batch in an epoch of {sampler.length} samples for rank {sampler.rank} "
                        f"of {sampler.world_size}, so nothing would be trained: take smaller "
                        'batches, drop_last=False, ElasticSampler(tail="pad") or fewer ranks'
                    )

    @property
    def _uneven(self) -> bool:
        return any(sampler.tail == "uneven" for sampler in self._own)

    def _take_each(self) -> Iterator[Any]:
        """Each batch of the loader, which is in hand then; the one before is trained on."""
        if isinstance(self._batches, StreamLoader):
            for batch in self._batches:
                self._batches.data._take()
                yield batch
            return
        self._batches.begin(self._samplers)
        for sampler in samplers_in(self._batches):
            sampler._varies |= not _sizes_are_alike(self._batches.inner)
        for batch in self._loader:
            note = self._batches.next_note()
            if note is None:
                what = f"{_named(self._loader)} gave a batch that no sampler has handed out"
                raise UsageError(f"{what}: loop over the DataLoader itself, {_BY_HAND}")
            for sampler, count in note.counts:
                sampler._take(count)
                if sampler not in self._own:  # hidden in a batch sampler of the user's
                    self._own.append(sampler)
            yield batch
            self._batches.tell_next()
        if page := activity.own_page():
            page.put_down()
        if self._batches.next_note():
            raise UsageError(f"{_named(self._loader)} has lost batches: {_BY_HAND}")

    def _turn(self, loop: object, *, ends: bool) -> None:
        """The loop is done with the batch in hand. `ends`: a step that all ranks take."""
        for sampler in self._own:
            sampler._settle()
        if self._check and ends:
            self._loops.raise_if_another(loop)
            if self._commit_every == "auto":
                self._state.commit(every=self._loops.interval.steps)
                self._loops.interval.tell()
            elif self._commit_every is not None:
                self._state.commit(every=self._commit_every)
            self._state.check()


class Batches(Sampler[Any]):  # type: ignore[misc]  # torch is not read by mypy
    """Stands in a loader for its batch sampler, or sampler, and notes the samples of each batch.

    It has the notes of the latest iteration: there is a loop at a time.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._samplers: Sequence[ElasticSampler] = ()
        self._notes: deque[_Note] = deque()

    def begin(self, samplers: Sequence[ElasticSampler]) -> None:
        """A loop begins: note what these samplers give."""
        self._samplers, self._notes = samplers, deque()

    def tell_next(self) -> None:
        """Tell which batch is in hand from now on, if its samples are handed out already.

        A loader with workers reads ahead, and one of them may fail by the batch that is due.
        """
        if self._notes:
            self._notes[0].tell()

    def next_note(self) -> _Note | None:
        """The samples of the next batch that comes out of the loader."""
        return self._notes.popleft() if self._notes else None

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.inner)
        if not self._samplers:
            return batches
        self._notes = deque()
        kind = _StatefulNoted if hasattr(batches, "state_dict") else _Noted
        return kind(batches, self._samplers, self._notes)

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
        raise UsageError(f"{_named(loader)} is no DataLoader: give steps() one, {_BY_HAND}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset deals out its samples itself, and no sampler counts them: make it "
            f"a data set with indices, or an ElasticIterable and take its loader(), {_BY_HAND}"
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
            f"DataLoader(sampler=state.sampler), {_BY_HAND}"
        )
    return (
        f"the loader's batch sampler took {handed} indices for a batch of {size}: what is trained "
        "on must be the sampler's next indices, each of them, in its order"
    )


def _named(loader: object) -> str:
    return f"{type(loader).__module__}.{type(loader).__qualname__}"
