"""The sync point: the step at which all ranks stop for a planned change.

It costs no collective and no message as long as nothing happens: the training loop calls `check()`
once per step, which counts the step, reads one flag and is all. When a change is announced, a
thread of each rank

1. sets the flag: the loop is held at its next check;
2. reads the number n of steps that the loop has come to;
3. publishes n in this generation's store, over a connection of its own; the rank that publishes
   last writes the target, max(n) + 1;
4. waits for the target and lets the loop go. Each loop stops at the check whose number it is.

No rank has gone past the target: n is read after the flag was set, and a loop counts before it
looks at the flag (one order for all, under the GIL), so that it can be held in check n + 1 at
most, and n + 1 <= max(n) + 1. No deadlock either: publishing needs no loop, so the target comes
however far ahead of a device, or deep in a collective, a loop is; then every loop goes on to the
same check, with the partners of all collectives on the way. The wait has a bound, too: without
a target within SYNC_PATIENCE seconds this rank treats the world as broken.

JAX finds the step for a checkpoint before a preemption by the same algorithm (its preemption sync
manager and `multihost_utils.reached_preemption_sync_point`).
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from elastic_etcd.protocol import activity
from elastic_etcd.times import SYNC_PATIENCE

_KEY = "elastic_etcd/sync_point"


class WorldChanged(BaseException):
    """The world changes as planned.

        except ee.WorldChanged:
            logger.flush()
            raise

    ElasticState.check raises it, on all ranks at the same step; ee.run catches it and commits all
    that was trained so far. It is no Exception, so that a training loop's `except Exception` lets
    it pass. docs/state.md says when it comes.
    """


class WorldBroken(BaseException):
    """The world is broken: the training since the last commit is lost. ee.run catches it."""


class SyncPoint:
    """The step at which the ranks of a world stop together.

    `connect()` gives a torch.distributed.Store of this generation's that only this object uses.
    `on_failure(reason)` is called when the ranks do not agree: it frees a loop that waits for one
    of them in a collective, and calls `interrupt`. The training loop calls `check` and
    `raise_if_broken`; all else belongs to the thread that reads the agent's messages.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Any],
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.steps = 0  # checks that the loop has come to
        self._hold = False
        self._rank, self._world_size, self._connect = rank, world_size, connect
        self._on_failure = on_failure or self.interrupt
        self._decided = threading.Event()
        self._target = 0
        self._broken = ""
        self._thread: threading.Thread | None = None

    def check(self) -> bool:
        """At a step's end, on every rank: whether all ranks stop here, to raise WorldChanged.

        It costs a fraction of a microsecond. Raises WorldBroken.
        """
        self.steps += 1
        return self._hold and self._is_target()

    def stop(self) -> None:
        """Have all ranks stop at the same check; every rank's thread is to call it.

        Returns at once. A second call changes nothing.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._decide, name="elastic_etcd sync point")
            self._hold = True
            self._thread.start()

    def interrupt(self, reason: str) -> None:
        """Let the loop raise WorldBroken at its next check, or in the one that holds it."""
        self._broken = self._broken or reason
        self._hold = True
        self._decided.set()

    def join(self) -> None:
        """Wait for our thread, which ends soon once its connection is shut down."""
        if self._thread:
            self._thread.join()

    def raise_if_broken(self) -> None:
        """Raise WorldBroken after an `interrupt`: the results of a collective may be wrong.

        A collective of NCCL's that is aborted ends as if it had succeeded. The flag is set before.
        """
        if self._broken:
            raise WorldBroken(self._broken)

    def _is_target(self) -> bool:
        with activity.during(activity.Doing.CHECK):
            self._decided.wait()
        self.raise_if_broken()
        return self.steps >= self._target

    def _decide(self) -> None:
        steps = self.steps
        try:
            self._target = steps + 1 if self._world_size == 1 else self._agree(steps)
        except RuntimeError as error:  # all of a store's errors
            self._on_failure(f"the ranks could not agree where to stop: {error}")
        self._decided.set()

    def _agree(self, steps: int) -> int:
        store = self._connect()
        store.set(f"{_KEY}/{self._rank}", str(steps))
        if store.add(f"{_KEY}/published", 1) == self._world_size:
            published = store.multi_get([f"{_KEY}/{r}" for r in range(self._world_size)])
            store.set(f"{_KEY}/target", str(max(map(int, published)) + 1))
        store.wait([f"{_KEY}/target"], timedelta(seconds=SYNC_PATIENCE))
        return int(store.get(f"{_KEY}/target"))


_none = SyncPoint(0, 1, dict)
_current = _none


def current() -> SyncPoint:
    """This world's; without ee.run one that never stops the training."""
    return _current


def lose(what: str, error: Exception) -> NoReturn:
    """The training has met an error that shows that its world is broken.

    Raises WorldBroken, then and at each check from now on; without ee.run the error itself.
    """
    if _current is _none:
        raise error
    first = next(iter(str(error).splitlines()), "")  # stacks of C++ may follow
    reason = f"{what}: {first}"
    _current.interrupt(reason)
    raise WorldBroken(reason) from error


def install(sync_point: SyncPoint | None) -> None:
    """Let `current` give this one; None: there is nothing to stop for."""
    global _current  # noqa: PLW0603 - one training loop per process
    _current = sync_point or _none
