"""How long a step takes this node's workers, published for all, and which nodes are slow."""

import logging
import random

from elastic_etcd.agent.followers.periodic import PeriodicFollower, leads
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import stragglers, writes
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Keys, StepTime, Stragglers
from elastic_etcd.core.view import View
from elastic_etcd.protocol.activity import MEASURED

_PERIOD = 5.0  # seconds between two looks, at most
_A_SECOND = 5  # step times of all nodes

log = logging.getLogger(__name__)


class StragglerWatch(PeriodicFollower):
    """Publishes step times; and as the coordinator, which nodes are slow."""

    name = "stragglers"

    def __init__(self, keys: Keys, workers: Workers, tasks: Tasks) -> None:
        super().__init__(keys, workers, tasks)
        self._next = 0.0  # when this node's step time may be published again
        self._published: StepTime | None = None
        self._measured = 0  # how often its slowest-to-measure worker was, by then
        self._last_line: int | None = None  # its number
        self._turned: dict[str, float] = {}  # nodes that are slow or fast now, since when
        self._named: dict[str, float] = {}  # as slow, when last

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state; log a new line, not one from before this agent."""
        super().see(before, event, state)
        if state.view is None or not state.local.lease:
            return
        found = state.view.stragglers
        number = found.number if found else 0
        if found and self._last_line is not None and number > self._last_line:
            level = logging.INFO if found.line.endswith(stragglers.AGAIN) else logging.WARNING
            log.log(level, "%s", found.line)
        self._last_line = number

    def pause(self) -> float:
        """Not the same for all nodes, so that they do not publish at once."""
        return _PERIOD * random.uniform(0.5, 1)  # noqa: S311

    async def look(self) -> None:
        """Compare the nodes, and publish whatever 50 more steps have shown of this one."""
        state, view = self.state, self.state.view
        if view is None or state.limits is None:
            return
        factor = state.limits.straggler_factor
        if factor and leads(state):
            await self._compare(view, factor)
        now = view.round
        if now and state.limits.seek_stragglers(now.nodes) and self._loop.time() >= self._next:
            self._next = self._loop.time() + now.nodes / _A_SECOND * random.uniform(0.5, 1)  # noqa: S311
            await self._publish_step_time(state)

    async def _compare(self, view: View, factor: float) -> None:
        """Tell of those that have turned for long; of a node that was named lately only good."""
        known, now = view.stragglers or Stragglers(), self._loop.time()
        nodes = stragglers.measured(view)
        turned = stragglers.turned(known, nodes, factor)
        self._turned = {name: self._turned.get(name, now) for name in turned}
        told = {name for name, since in self._turned.items() if now - since >= stragglers.LASTING}
        quiet = {name for name, at in self._named.items() if now - at < stragglers.QUIET}
        told -= quiet.difference(known.nodes)
        if not told:
            return
        found = stragglers.compared(known, view.trains, nodes, told)
        self._named |= dict.fromkeys(told.difference(known.nodes), now)
        await self.publish(writes.put_stragglers(self._keys, view, self.state.local, found))

    async def _publish_step_time(self, state: State) -> None:
        found = [now for _, now in self._workers.activities()]
        local, published = state.local, self._published
        if not (local.lease and local.running and found):
            return
        slowest = max(found, key=lambda now: now.outside)
        outside, whole = round(slowest.outside, 6), round(slowest.usual, 6)
        time = StepTime(local.lease, local.running, outside, whole)
        measured, before = min(now.measured for now in found), 0
        if published and (published.lease, published.generation) == (time.lease, time.generation):
            before = self._measured
            if stragglers.is_same(time, published):
                return
        if measured < before + MEASURED:
            return
        key = self._keys.step_time(local.lease)
        if await self.publish(writes.put_own(self._keys, local, key, time)):
            self._published, self._measured = time, measured
