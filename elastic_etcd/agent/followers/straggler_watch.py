"""How long a step takes this node's workers, told to all, and which nodes are slow."""

import asyncio
import logging
import random

from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import stragglers, writes
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.schema import StepTime
from elastic_etcd.core.view import Everything, View
from elastic_etcd.protocol.activity import MEASURED

_PERIOD = 5.0  # seconds between two looks; of many nodes it is longer
_A_SECOND = 5  # step times of all nodes
_SAME = 0.1  # what differs by less from what was told is not worth a write

log = logging.getLogger(__name__)


class StragglerWatch:
    """Both `tell()` and `compare()` run for ever, and `see` is told of every state."""

    def __init__(self, membership: Membership, workers: Workers) -> None:
        self._membership = membership
        self._workers = workers
        self._state: State | None = None
        self._told: StepTime | None = None
        self._measured = 0  # how often its slowest-to-measure worker was, when it was told
        self._heard: int | None = None  # the number of the last line

    def see(self, state: State) -> None:
        """Take note of the agent's new state; tell a new line, not one from before this agent."""
        self._state, view = state, state.view
        if view is None or not state.local.lease:
            return
        found = view.stragglers
        number = found.number if found else 0
        if found and self._heard is not None and number > self._heard:
            log.warning("%s", found.line)
        self._heard = number

    # --- this node's own ------------------------------------------------------------------

    async def tell(self) -> None:
        """Put what a step takes into etcd, whenever 50 more steps have shown something new."""
        while True:
            # Not all nodes at once.
            await asyncio.sleep(self._period() * random.uniform(0.5, 1))  # noqa: S311
            state = self._state
            if state is None or state.view is None or state.limits is None:
                continue
            now = state.view.round
            if now and stragglers.are_told(state.limits, now):
                await self._tell_step_times(state)

    def _period(self) -> float:
        now = self._state.view.round if self._state and self._state.view else None
        return max(_PERIOD, now.nodes / _A_SECOND if now else 0)

    async def _tell_step_times(self, state: State) -> None:
        found = [now for _, now in self._workers.activities()]
        local, told = state.local, self._told
        if not (local.lease and local.running and found):
            return
        slowest = max(found, key=lambda now: now.outside)
        outside, whole = round(slowest.outside, 6), round(slowest.usual, 6)
        time = StepTime(local.lease, local.running, outside, whole)
        measured = min(now.measured for now in found)
        if told and (told.lease, told.generation) == (time.lease, time.generation):
            is_same = abs(time.outside - told.outside) <= _SAME * told.outside
            if is_same or measured < self._measured + MEASURED:
                return
        txn = writes.put_step_time(self._membership.keys, local, time)
        if measured >= MEASURED and await self._membership.publish(txn):
            self._told, self._measured = time, measured

    # --- all nodes ------------------------------------------------------------------------

    async def compare(self) -> None:
        """As the coordinator, say which nodes are slow."""
        while True:
            await asyncio.sleep(_PERIOD)
            state = self._state
            if state and state.view and _leads(state, state.view):
                await self._compare(state, state.view)

    async def _compare(self, state: State, view: View) -> None:
        factor = state.limits.straggler_factor if state.limits else 0.0
        if factor and (found := stragglers.lead(view, factor)):
            txn = writes.put_stragglers(self._membership.keys, view, state.local, found)
            await self._membership.publish(txn)


def _leads(state: State, view: View) -> bool:
    now = view.round
    whole = view.coverage == Everything()
    return whole and now is not None and now.coordinator == state.local.lease
