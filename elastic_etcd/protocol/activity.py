"""A page of shared memory in which a worker says what it is doing, and its agent reads it.

It costs the worker neither a message nor a system call. `step` is called by what trains: by the
wrappers and calls of this package, or else by every optimizer of torch's. Standard library only:
what a worker begins with loads this file by its path.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A worker that gets it writes its main thread's Python stack to its stderr. A real-time signal that
# neither torch nor CUDA uses.
DUMP_STACKS = signal.SIGRTMAX - 3
VARIABLE = "ELASTIC_ETCD_ACTIVITY"  # the page's path, in a worker's environment
_NAME = "elastic_etcd-activity"
SIZE = 4096
_HEAD = struct.Struct("=5Q")  # doing, since, steps, when the step began, whether steps are told
_WHAT = struct.Struct("=128s")
_WHAT_AT = 64
_COMMITS = struct.Struct("=3Q")  # how many, how long they took together, when the last one ended
_COMMITS_AT = 192
_INIT_AT = 256  # when it began to do that
_RECENT = struct.Struct("=64Q")  # how long the last steps took, by number modulo 64
_RECENT_AT = 512
_RECENT_STEPS = 64
# The time of a step outside of collectives: whether it is to be measured, how many times it was
# measured, after how many steps the last time; and the last results, by number modulo 10.
_OUTSIDE = struct.Struct("=3Q")
_OUTSIDE_AT = 1024
_MEASURED = struct.Struct("=10Q")
_MEASURED_AT = 1088
# How far the training has come: who says so, the commit, the step; and the batch in hand: how many
# of its indices are there and one more, its epoch, its number.
_REACHED = struct.Struct("=3Q")
_REACHED_AT = 1280
_NOBODY, _STATE, _SCRIPT = range(3)
_BATCH = struct.Struct("=3Q")
_BATCH_AT = 1312
_INDICES_AT = 1344
INDICES = 32  # of a batch, at most
_LARGEST = (1 << 63) - 1  # of a step, as of all numbers that others read
MEASURED = 10  # results that make a figure
EVERY = 5  # steps, for one of them
EVERY_ON_GPUS = 25
_ONE = struct.Struct("=Q")
_NS = 1e-9


class Doing(IntEnum):
    """The things that a worker says it does.

    It is watched in STEP, and in COMMIT while no bytes move.
    """

    STARTING = 0
    INIT = 1  # making the process group, synchronising the state
    STEP = 2
    CHECK = 3  # waiting for the others at a step at which all stop
    COMMIT = 4
    SAVE = 5
    QUIET = 6  # whatever the script has said by ee.quiet
    DONE = 7  # the script is at its end, or has destroyed its process group


class Activity(NamedTuple):
    """A worker's activity at one moment; times are in seconds."""

    doing: Doing
    # Since it began to do that; in STEP and DONE, since the last step's end; in COMMIT, since bytes
    # have moved.
    seconds: float
    steps: int  # of this world
    slowest: float  # of the recent steps
    what: str = ""  # ee.quiet was told
    told: bool = False  # the steps are told by the script, and not its optimizers'
    commits: int = 0  # of this world
    commit_seconds: float = 0.0  # of these commits together
    since_commit: float = 0.0  # since the last one ended
    since_init: float = 0.0  # since INIT began, 0 if it has not
    usual: float = 0.0  # for a step: a median, 0 if it is not known yet
    outside: float = 0.0  # of collectives in a step, likewise
    measured: int = 0  # times that this was measured


class ToldPlace(NamedTuple):
    """A place in the whole training: so many steps after a commit, or a step of the script's."""

    step: int
    commit: int | None = None  # of the state; None where the script says its step
    batch: tuple[int, int] | None = None  # its epoch and number
    indices: tuple[int, ...] = ()  # of this rank's batch, the first ones


class ActivityPage:
    """The memory. Times are of CLOCK_MONOTONIC, which both ends share."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)

    def step(self, *, told: bool) -> None:
        """A step has ended; those of optimizers don't count where others are `told`."""
        now = monotonic_ns()
        _, _, steps, began, is_told = _HEAD.unpack_from(self._memory)
        if is_told != told:
            if is_told:
                return
            steps = 0
        if steps:
            _ONE.pack_into(self._memory, _RECENT_AT + 8 * (steps % _RECENT_STEPS), now - began)
        _HEAD.pack_into(self._memory, 0, Doing.STEP, now, steps + 1, now, told)

    @contextlib.contextmanager
    def during(self, doing: Doing, what: str = "") -> Iterator[None]:
        """Something else than a step; its time is not the step's."""
        before, since, steps, began, told = _HEAD.unpack_from(self._memory)
        if before == doing == Doing.INIT:  # a part of it
            yield
            return
        was = _WHAT.unpack_from(self._memory, _WHAT_AT)
        start = monotonic_ns()
        _WHAT.pack_into(self._memory, _WHAT_AT, what.encode(errors="replace"))
        _HEAD.pack_into(self._memory, 0, doing, start, steps, began, told)
        if doing is Doing.INIT:
            _ONE.pack_into(self._memory, _INIT_AT, start)
        try:
            yield
        finally:
            took = monotonic_ns() - start
            _WHAT.pack_into(self._memory, _WHAT_AT, *was)
            _HEAD.pack_into(self._memory, 0, before, since + took, steps, began + took, told)
            if doing is Doing.COMMIT:
                commits, spent, _ = _COMMITS.unpack_from(self._memory, _COMMITS_AT)
                more = (commits + 1, spent + took, start + took)
                _COMMITS.pack_into(self._memory, _COMMITS_AT, *more)

    def move(self) -> None:
        """Bytes of a commit have moved: how long it takes is counted from here on."""
        doing, _, *rest = _HEAD.unpack_from(self._memory)
        if doing == Doing.COMMIT:
            _HEAD.pack_into(self._memory, 0, doing, monotonic_ns(), *rest)

    def reach(self, step: int, commit: int | None = None) -> None:
        """Training has come to this step, or so many steps after a commit.

        A script's own word counts more than its state's. A step that is no number counts as none.
        """
        by, _, _ = _REACHED.unpack_from(self._memory, _REACHED_AT)
        if (commit is None or by != _SCRIPT) and 0 <= step <= _LARGEST:
            place = (_SCRIPT, 0, step) if commit is None else (_STATE, commit, step)
            _REACHED.pack_into(self._memory, _REACHED_AT, *place)

    def take(self, epoch: int, number: int, indices: Sequence[int]) -> None:
        """This batch is in hand from now on, with at most INDICES of its indices."""
        struct.pack_into(f"={len(indices)}Q", self._memory, _INDICES_AT, *indices)
        _BATCH.pack_into(self._memory, _BATCH_AT, len(indices) + 1, epoch, number)

    def put_down(self) -> None:
        """No batch is in hand any more."""
        _BATCH.pack_into(self._memory, _BATCH_AT, 0, 0, 0)

    def reached(self) -> ToldPlace | None:
        """The place that it tells, None if it tells none."""
        by, commit, step = _REACHED.unpack_from(self._memory, _REACHED_AT)
        if by == _NOBODY:
            return None
        known, epoch, number = _BATCH.unpack_from(self._memory, _BATCH_AT)
        count = min(max(known - 1, 0), INDICES)
        indices = struct.unpack_from(f"={count}Q", self._memory, _INDICES_AT)
        return ToldPlace(
            min(step, _LARGEST),
            None if by == _SCRIPT else min(commit, _LARGEST),
            (min(epoch, _LARGEST), min(number, _LARGEST)) if known else None,
            tuple(min(index, _LARGEST) for index in indices),
        )

    def done(self) -> None:
        """From here on nothing is a step, until one has ended."""
        _, *rest = _HEAD.unpack_from(self._memory)
        _HEAD.pack_into(self._memory, 0, Doing.DONE, *rest)

    @property
    def is_measured(self) -> bool:
        """Whether it is asked how long a step takes outside of collectives."""
        wanted, _, _ = _OUTSIDE.unpack_from(self._memory, _OUTSIDE_AT)
        return bool(wanted)

    def waited(self, ns: int) -> None:
        """Say for how many nanoseconds this worker has waited for other ranks since the last call.

        From that and the steps that have ended since, the time outside of collectives is reckoned.
        """
        _, _, steps, _, _ = _HEAD.unpack_from(self._memory)
        wanted, measured, before = _OUTSIDE.unpack_from(self._memory, _OUTSIDE_AT)
        count = steps - before
        if before and 0 < count < _RECENT_STEPS:
            recent = _RECENT.unpack_from(self._memory, _RECENT_AT)
            spent = sum(recent[number % _RECENT_STEPS] for number in range(before, steps))
            at = _MEASURED_AT + 8 * (measured % MEASURED)
            _ONE.pack_into(self._memory, at, max(0, spent - ns) // count)
            measured += 1
        _OUTSIDE.pack_into(self._memory, _OUTSIDE_AT, wanted, measured, steps)

    def clear(self, *, measured: bool = False) -> None:
        """Begin a world: nothing is known of its steps."""
        self._memory[:] = bytes(SIZE)
        _OUTSIDE.pack_into(self._memory, _OUTSIDE_AT, measured, 0, 0)
        _HEAD.pack_into(self._memory, 0, Doing.STARTING, monotonic_ns(), 0, 0, False)

    def read(self) -> Activity:
        """The activity that it tells. Whoever runs in the worker can write anything there."""
        doing, since, steps, _, told = _HEAD.unpack_from(self._memory)
        (what,) = _WHAT.unpack_from(self._memory, _WHAT_AT)
        recent = _RECENT.unpack_from(self._memory, _RECENT_AT)
        commits, spent, ended = _COMMITS.unpack_from(self._memory, _COMMITS_AT)
        (init,) = _ONE.unpack_from(self._memory, _INIT_AT)
        _, measured, _ = _OUTSIDE.unpack_from(self._memory, _OUTSIDE_AT)
        outside = _MEASURED.unpack_from(self._memory, _MEASURED_AT)
        now = monotonic_ns()
        return Activity(
            doing=Doing(min(doing, Doing.DONE)),
            seconds=max(0, now - since) * _NS,
            steps=steps,
            slowest=max(recent) * _NS,
            what=what.rstrip(b"\0").decode(errors="replace"),
            told=bool(told),
            commits=commits,
            commit_seconds=spent * _NS,
            since_commit=max(0, now - ended) * _NS,
            since_init=max(0, now - init) * _NS if init else 0.0,
            usual=_middle([took for took in recent if took]) * _NS,
            outside=_middle(outside) * _NS if measured >= MEASURED else 0.0,
            measured=measured,
        )


class ActivityPages:
    """The agent's: a page for each local rank."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int, ActivityPage]] = {}

    def begin(self, local_rank: int, *, measured: bool = False) -> str:
        """Clear its page for a new world; gives the path for its environment.

        `measured`: whether it is to measure what its steps take outside of collectives.
        "" where there is no memory or descriptor to be had: then nothing is known of this worker.
        """
        from elastic_etcd.system.kernel import sealed_memfd  # noqa: PLC0415 - a worker has no such module

        if local_rank not in self._pages:
            try:
                fd = sealed_memfd(_NAME, SIZE)
                self._pages[local_rank] = fd, ActivityPage(fd)
            except OSError:
                return ""
        fd, page = self._pages[local_rank]
        page.clear(measured=measured)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def all(self) -> tuple[ActivityPage, ...]:
        """Those that there are; one that is held outlives `close`."""
        return tuple(page for _, page in self._pages.values())

    def read(self, local_rank: int) -> Activity:
        """The activity that the worker of that local rank tells."""
        if local_rank not in self._pages:
            return Activity(Doing.STARTING, 0.0, 0, 0.0)
        return self._pages[local_rank][1].read()

    def reached(self, local_rank: int) -> ToldPlace | None:
        """The place in the training that the worker of that local rank tells."""
        return self._pages[local_rank][1].reached() if local_rank in self._pages else None

    def close(self) -> None:
        """Let go of all of them."""
        for fd, _ in self._pages.values():
            os.close(fd)
        self._pages.clear()


def _middle(numbers: Sequence[int]) -> int:
    """A median; the module of that name takes long to import."""
    return sorted(numbers)[len(numbers) // 2] if numbers else 0


# --- in a worker --------------------------------------------------------------------------

_page: ActivityPage | None = None
_looked = False


def own_page() -> ActivityPage | None:
    """This worker's page, if it has one."""
    return _page if _looked else look()


def step(*, told: bool = True) -> None:
    """A step of training has ended: `told` by the script, or seen at an optimizer."""
    if page := own_page():
        page.step(told=told)


def measured() -> ActivityPage | None:
    """This worker's page, if what its steps take outside of collectives is asked for."""
    page = own_page()
    return page if page and page.is_measured else None


def during(doing: Doing, what: str = "") -> contextlib.AbstractContextManager[None]:
    """While this is open, the worker does something else than a step."""
    page = own_page()
    return page.during(doing, what) if page else contextlib.nullcontext()


def move() -> None:
    """Bytes of a commit have moved."""
    if page := own_page():
        page.move()


def done() -> None:
    """The worker trains no more, and no rank waits for it."""
    if page := own_page():
        page.done()


def look() -> ActivityPage | None:
    """This worker's page, if its agent has given it one."""
    global _page, _looked  # noqa: PLW0603 - one process, one worker, one page
    _looked = True
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError, ValueError):
            if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
                return None  # in another pid namespace: nobody watches
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _page = ActivityPage(fd)
            finally:
                os.close(fd)
    return _page


def _forget() -> None:
    """In a forked child, such as a data loader's: the page is the worker's."""
    global _page  # noqa: PLW0603
    _page = None


os.register_at_fork(after_in_child=_forget)
