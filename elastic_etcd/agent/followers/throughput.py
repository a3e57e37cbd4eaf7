"""How fast this node's workers are, published while somebody looks at the job."""

import random
from time import monotonic

from elastic_etcd.agent.followers.periodic import PeriodicFollower
from elastic_etcd.core import schema, writes
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Pace

_A_SECOND = 20  # throughputs of all nodes


class Throughput(PeriodicFollower):
    """Publishes it again and again, and removes it when nobody looks any more."""

    name = "throughput"
    _before: tuple[int, int, float] | None = None  # generation, steps, and when that was
    _published = False  # it may be in etcd

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state."""
        was = self._period
        super().see(before, event, state)
        if self._period != was:
            self.news.set()

    @property
    def _period(self) -> float:
        """Seconds until the next one, at most; 0: nobody looks."""
        view = self.state.view
        if view is None or view.watched is None or not self.state.local.lease:
            return 0.0
        return max(view.watched.seconds, view.round.nodes / _A_SECOND if view.round else 0.0)

    def pause(self) -> float | None:
        """Not the same for all nodes, so that they do not publish at once."""
        return self._period * random.uniform(0.5, 1) if self._period else None  # noqa: S311

    async def hear(self) -> None:
        """Begin to measure, or end it."""
        self._before = None
        if self._period:
            self._measure()
        elif self._published and self.state.local.lease:
            self._published = False
            await self._put(None)
        self.rest()

    async def look(self) -> None:
        """Publish how fast the slowest worker was since the look before."""
        if found := self._measure():
            self._published = True
            await self._put(found)

    async def _put(self, pace: Pace | None) -> None:
        local = self.state.local
        key = self._keys.pace(local.lease)
        await self.publish(writes.put_own(self._keys, local, key, pace))

    def _measure(self) -> Pace | None:
        """None where no worker runs, or its world has just begun."""
        local, found = self.state.local, [now for _, now in self._workers.activities()]
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
