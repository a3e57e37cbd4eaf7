"""How fast this node's workers are, told through etcd while somebody looks at the job."""

import asyncio
import random
from time import monotonic

from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import schema, writes
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.schema import Pace

_A_SECOND = 20  # paces of all nodes


class PaceTeller:
    """`tell()` runs for ever, and `see` is told of every state."""

    def __init__(self, membership: Membership, workers: Workers) -> None:
        self._membership = membership
        self._workers = workers
        self._news = asyncio.Event()
        self._state: State | None = None
        self._before: tuple[int, int, float] | None = None  # generation, steps, and when that was
        self._told = False  # it may be in etcd

    def see(self, state: State) -> None:
        """Take note of the agent's new state."""
        was, self._state = self._period(), state
        if self._period() != was:
            self._news.set()

    async def tell(self) -> None:
        """Put this node's pace into etcd again and again, as long as it is watched."""
        while True:
            await self._news.wait()
            self._news.clear()
            self._pace()
            while period := self._period():
                # Not all nodes at once.
                changes = await self._changes_within(period * random.uniform(0.5, 1))  # noqa: S311
                pace = None if changes else self._pace()
                if pace:
                    await self._put(pace)
            await self._put(None)
            self._before = None

    async def _changes_within(self, seconds: float) -> bool:
        """Whether the period becomes another one before so many seconds are over."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def _period(self) -> float:
        """Seconds until the next one, at most; 0: nobody looks."""
        state = self._state
        if state is None or state.view is None or not state.local.lease:
            return 0.0
        view = state.view
        nodes = view.round.nodes if view.round else 0
        return max(view.watched.seconds, nodes / _A_SECOND) if view.watched else 0.0

    async def _put(self, pace: Pace | None) -> None:
        state = self._state
        if state and state.local.lease and (pace or self._told):
            self._told = pace is not None
            txn = writes.put_pace(self._membership.keys, state.local, pace)
            await self._membership.publish(txn)

    def _pace(self) -> Pace | None:
        """None where no worker runs, or its world has just begun."""
        assert self._state
        local, found = self._state.local, [now for _, now in self._workers.activities()]
        if not local.running or not found:
            return None
        slowest = min(found, key=lambda now: now.steps)
        before, at = self._before, monotonic()
        self._before = local.running, slowest.steps, at
        if before is None or before[0] != local.running or before[1] > slowest.steps:
            return None
        rate = (slowest.steps - before[1]) / max(at - before[2], 0.001)
        doing = schema.RankDoing[slowest.doing.name]
        return Pace(local.lease, local.running, slowest.steps, round(rate, 3), doing)
