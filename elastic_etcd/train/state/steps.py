"""The loop over a loader's batches, for `state.steps`, and the ranks' word before each commit.

train/data/source.py gives the batches and counts their positions. A loop makes steps of the
optimizer of them, each of `accumulate` batches, and the batch in hand has a place in one:

                 ┌───────────────────────────────────────────┐
                 v                                           │
    begin ──> WITHIN ──(the accumulate-th batch)──────────> WHOLE ──> commit, check
                 │
                 └────(the epoch's last batch, too soon)──> CUT ────> commit, check, if not uneven

With tail="uneven" one rank may have a batch in a step in which another has none: a step that is not
shared is neither committed nor checked, and of one that is cut nobody knows whether it is shared.

Before a commit all ranks ask each other whether their world is whole, and all are at it. A lost
peer is known by the agent's word, or by the error of a collective. That error may have been caught
by the script, to skip a batch. So each commit asks the group that has met it, by one all_gather of
a few numbers, which costs about as much as the smallest all_reduce.
"""

import logging
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_etcd.errors import UsageError
from elastic_etcd.train import sync_point
from elastic_etcd.train.abort import nccl_error
from elastic_etcd.train.accelerator import devices
from elastic_etcd.train.collectives import gather, rank_and_size
from elastic_etcd.train.data.iterable import ElasticIterable
from elastic_etcd.train.data.sampler import ElasticSampler
from elastic_etcd.train.data.source import BY_HAND, is_uneven, source_of

SHARE = 0.01  # of the time, for commits
LONGEST = 30.0  # seconds between two, whatever they cost

log = logging.getLogger("elastic_etcd")
CommitEvery = int | Literal["auto"] | None


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


class CommitInterval:
    """The steps between two commits with commit_every="auto", the same on all ranks.

    A world begins with a commit at each step. At each commit the ranks exchange `times`, of which
    all make the same number, or twice the last one where that is less: `take`. So an unusual time
    does little.
    """

    def __init__(self) -> None:
        self.steps = 1
        self._commit = self._asked = 0.0  # seconds that the last commit took, and the question
        self._cost = self._a_step = 0.0  # seconds, of all ranks
        self._since = time.monotonic()
        self._settled = self._told = False

    def begin(self) -> None:
        """A world begins, whose newcomers have measured nothing."""
        self.steps, self._commit, self._asked, self._since = 1, 0.0, 0.0, time.monotonic()

    def times(self, steps: int) -> list[int]:
        """This rank's microseconds: for the last commit, to ask before it, and for a step since.

        There were so many steps since.
        """
        a_step = (time.monotonic() - self._since) / steps
        return [int(seconds * 1e6) for seconds in (self._commit, self._asked, a_step)]

    def take(self, ranks: Sequence[Sequence[int]], asked: float) -> None:
        """Take the times of all ranks, which were `asked` in so many seconds.

        The rank that was asked last has not waited for others.
        """
        commits, questions, steps = ([x / 1e6 for x in times] for times in zip(*ranks, strict=True))
        self._cost, self._a_step = max(commits) + min(questions), max(*steps, 1e-6)
        wanted = min(math.ceil(self._cost / SHARE / self._a_step), int(LONGEST / self._a_step))
        self._settled = self._cost > 0 and wanted <= 2 * self.steps
        self.steps = max(1, min(wanted, 2 * self.steps))
        self._asked = asked

    def committed(self, seconds: float) -> None:
        """A commit has ended, and took so long."""
        self._commit, self._since = seconds, time.monotonic()

    def tell(self) -> None:
        """Say once how many steps that is, as soon as it is known."""
        if self._told or not self._settled:
            return
        self._told = True
        rank, _ = rank_and_size()
        if rank == 0:
            apart = self.steps * self._a_step
            steps = f"{self.steps} steps" if self.steps > 1 else "step"
            log.info(
                "state.steps() commits each %s, which is about each %.2g s and takes %.2g %% "
                "of the time: a failure costs about that at most, and the step under way. "
                "commit_every=n is another number, None is none",
                *(steps, apart, 100 * self._cost / (self._cost + apart)),
            )


class PlaceInStep(Enum):
    """The place of the batch in hand in its step of the optimizer."""

    WITHIN = auto()  # more of this step follow
    WHOLE = auto()  # it ends the step
    CUT = auto()  # it ends the epoch, before the step is whole


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
            raise UsageError(f"the state has no ElasticSampler: give it one, {BY_HAND}")
        self._state, self._loops, self._source = state, loops, source_of(loader, samplers)
        self._commit_every, self._accumulate, self._check = commit_every, accumulate, check
        for sampler in self._source.counting:
            if not any(sampler is known for known in samplers):
                raise UsageError(
                    f"the loader's {type(sampler).__name__} is not the state's: give the state "
                    "this one, as ElasticState(sampler=...), or the loader the state's"
                )
        self._total: int | None = None
        self._place = PlaceInStep.WITHIN

    @property
    def ends_step(self) -> bool:
        """Whether a step of the optimizer ends with the batch in hand.

        That is so with each `accumulate`-th batch, and with the last one of the epoch.
        """
        return self._place is not PlaceInStep.WITHIN

    def __len__(self) -> int:
        return self._source.remaining() if self._total is None else self._total

    def __iter__(self) -> Iterator[Any]:
        """Raises UsageError for a batch that can't be counted, and what commit and check raise.

        At its end all ranks ask each other once more whether their world is whole.
        """
        loop = self._loops.begin() if self._check else None
        self._total = self._source.begin(self._accumulate, self._loops.ranks_before)
        if self._total is None and self._accumulate > 1:
            raise UsageError(
                f"accumulate={self._accumulate} over a loader without a length: nobody knows which "
                "batch is the last, whose step would be lost. Give the stream its lengths="
            )
        number, shared = 0, True  # shared: all ranks take part in the step under way
        try:
            for number, batch in enumerate(self._source.take_each(), 1):
                shared &= all(sampler._shares_step() for sampler in self._source.counting)
                self._place = self._place_of(number)
                self._loops.note_step(loop, 0 if self.ends_step else self._accumulate)
                if self._place is PlaceInStep.CUT and is_uneven(self._source):
                    for sampler in self._source.counting:
                        sampler._end_here()
                yield batch
                self._loops.note_step(loop, 0)
                self._turn(loop, shared=shared)
                shared |= self._place is PlaceInStep.WHOLE  # the next one
        finally:
            self._total = None
            self._loops.note_step(loop, 0)
        if not number:
            self._source.refuse_empty()
        for sampler in self._source.counting:
            sampler._finish()
        if self._check and not is_uneven(self._source):
            agree(0, 0)  # the training may end here, without another commit

    def _place_of(self, number: int) -> PlaceInStep:
        """Return the place of the loop's number-th batch, counted from 1."""
        if number % self._accumulate == 0:
            return PlaceInStep.WHOLE
        return PlaceInStep.CUT if number == self._total else PlaceInStep.WITHIN

    def _turn(self, loop: object, *, shared: bool) -> None:
        """Count the batch in hand as trained on, and commit and check where its step ends.

        shared: all ranks take part in this step.
        """
        for sampler in self._source.counting:
            sampler._settle()
        match self._place:
            case PlaceInStep.WITHIN:
                return
            case PlaceInStep.CUT if is_uneven(self._source):
                return  # one rank may have a batch of it, another none
        if not (self._check and shared):
            return
        self._loops.raise_if_another(loop)
        if self._commit_every == "auto":
            self._state.commit(every=self._loops.interval.steps)
            self._loops.interval.tell()
        elif self._commit_every is not None:
            self._state.commit(every=self._commit_every)
        self._state.check()


# Of this world, by each optimizer of the process.
_taken: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _taken[optimizer] = _taken.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count_step)


def count_anew() -> None:
    """A world begins: all ranks have the same values, and count from here on."""
    _taken.clear()


def steps_of(values: Iterable[Any]) -> int:
    """How many steps the optimizers among these values have taken in this world."""
    return sum(_taken.get(value, 0) for value in values if isinstance(value, Optimizer))


def agree(commit: int, steps: int, others: Sequence[int] = ()) -> list[list[int]]:
    """Every rank's `others`, once all have come to the same commit. Collective.

    commit: its number; steps: those of optimizers until it, in this world. Raises WorldBroken, on
    all ranks, if one has others or if a collective has failed, here or on another rank; without
    ee.run it raises the error itself.
    """
    point = sync_point.current()
    point.raise_if_broken()
    if devices().is_initialized():
        devices().current_stream().synchronize()  # one that has left out a collective gets on
    _, size = rank_and_size(launched=False)
    if size == 1:
        return [list(others)]
    try:
        if error := nccl_error():
            raise RuntimeError(f"NCCL error: {error}")  # noqa: TRY301 - as the next line does
        rows = gather([commit, steps, *others])
    except RuntimeError as error:
        point.raise_if_broken()
        what = "a collective has failed, here or on another rank, so nothing is committed"
        sync_point.lose(what, error)
    if len({(commit, steps) for commit, steps, *_ in rows}) > 1:
        what = "not all ranks have taken the same steps, so nothing is committed"
        sync_point.lose(what, UsageError(_apart(rows)))
    return [row[2:] for row in rows]


def _apart(rows: Sequence[Sequence[int]]) -> str:
    """Which ranks are apart from the others, in words."""
    places = [tuple(row[:2]) for row in rows]
    usual = max(places, key=lambda place: (places.count(place), place))
    rank = next(rank for rank, place in enumerate(places) if place != usual)
    of_all = [f"commit {commit} after {steps} steps" for commit, steps in (places[rank], usual)]
    return (
        f"rank {rank} is at {of_all[0]} of its optimizers, others at {of_all[1]}. Has it caught an "
        "exception that the others have not met? commit() is for all ranks, at the same step"
    )
