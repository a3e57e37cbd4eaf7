"""How all ranks stop at the same step for a planned change, without a collective at each step.

The training loop calls `check()` once per step; that counts, reads one flag and is all, as long
as nothing happens. When a change is announced, a thread of each rank

1. sets the flag: the loop is held at its next check;
2. reads the count n of checks that the loop has come to;
3. publishes n in this generation's store, over a connection of its own; the rank that publishes
   last writes the target, max(n) + 1;
4. waits for the target and lets the loop go. Each loop stops at the check whose number it is.

No rank has gone past the target: n is read after the flag was set, and a loop counts before it
looks at the flag (one order for all, under the GIL), so that it can be held in check n + 1 at
most, and n + 1 <= max(n) + 1. No deadlock either: publishing needs no loop, so the target comes
however far ahead of a device, or deep in a collective, a loop is; then every loop goes on to the
same check, with the partners of all collectives on the way. What would break that is a bound of
its own: without a target within PATIENCE seconds this rank treats the world as broken.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PATIENCE = 8.0  # below the time that agents give a planned change
_KEY = "elastic_etcd/boundary"


class WorldChanged(BaseException):
    """The world changes as planned; all that was trained so far is committed.

    Raised by ElasticState.check and caught by ee.run. No Exception, so that a training loop's
    `except Exception` doesn't stop it on its way.
    """


class WorldBroken(BaseException):
    """The world is broken: what was trained since the last commit is lost. Caught by ee.run."""


class Boundary:
    """Where the ranks of one world stop together.

    `connect()` gives a torch.distributed.Store of this generation's that only this object uses.
    `lost(why)` frees a loop that waits for a rank which does not agree, and calls `interrupt`.
    Raise and `check` are the loop's; all else belongs to the thread that hears of changes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Any],
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self.came = 0  # checks that the loop has come to
        self._held = False
        self._rank, self._world_size, self._connect = rank, world_size, connect
        self._lost = lost or self.interrupt
        self._settled = threading.Event()
        self._target = 0
        self._broken = ""
        self._thread: threading.Thread | None = None

    def check(self) -> bool:
        """Whether to stop here: commit, and raise WorldChanged. Raises WorldBroken."""
        self.came += 1
        return self._held and self._look()

    def stop(self) -> None:
        """Have all ranks stop at the same check; returns at once. Every rank's thread is to."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._agree, name="elastic_etcd boundary")
            self._held = True
            self._thread.start()

    def interrupt(self, reason: str) -> None:
        """Let the loop raise WorldBroken at its next check, or in the one that holds it."""
        self._broken = self._broken or reason
        self._held = True
        self._settled.set()

    def join(self) -> None:
        """Wait for our thread, which ends soon once its connection is cut off."""
        if self._thread:
            self._thread.join()

    def intact(self) -> None:
        """Raise WorldBroken if it is known to be broken."""
        if self._broken:
            raise WorldBroken(self._broken)

    def _look(self) -> bool:
        self._settled.wait()
        self.intact()
        return self.came >= self._target

    def _agree(self) -> None:
        came = self.came
        try:
            self._target = came + 1 if self._world_size == 1 else self._ask(came)
        except RuntimeError as error:  # all of a store's errors
            self._lost(f"the ranks could not agree where to stop: {error}")
        self._settled.set()

    def _ask(self, came: int) -> int:
        store = self._connect()
        store.set(f"{_KEY}/{self._rank}", str(came))
        if store.add(f"{_KEY}/published", 1) == self._world_size:
            published = store.multi_get([f"{_KEY}/{r}" for r in range(self._world_size)])
            store.set(f"{_KEY}/target", str(max(map(int, published)) + 1))
        store.wait([f"{_KEY}/target"], timedelta(seconds=PATIENCE))
        return int(store.get(f"{_KEY}/target"))


_nowhere = Boundary(0, 1, dict)
_boundary = _nowhere


def check() -> bool:
    """At a step's end, on every rank: whether all ranks stop here; see Boundary.check.

    Costs a fraction of a microsecond. Without ee.run it is always False.
    """
    return _boundary.check()


def intact() -> None:
    """Raise WorldBroken if what has been computed may be wrong.

    A collective of NCCL's that is aborted ends as if it had succeeded. The flag is set before.
    """
    _boundary.intact()


def begin(boundary: Boundary | None) -> None:
    """Make it the one that `check` looks at; None: there is nothing to stop for."""
    global _boundary  # noqa: PLW0603 - one training loop per process
    _boundary = boundary or _nowhere
