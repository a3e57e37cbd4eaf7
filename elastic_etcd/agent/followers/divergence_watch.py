"""Workers whose values are not those of the other replicas: told to all, and what is done about it.

The workers compare each other (train/state/replicas.py). The agent of rank 0 puts who differs into
etcd; the agent of a worker that is wrong begins the world anew without its values, or drains its
node, if --on-divergence says so.
"""

import logging
from datetime import UTC, datetime

from elastic_etcd.agent.followers.periodic import PeriodicFollower
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import requests, writes
from elastic_etcd.core.lifecycle import Event, State, WorkersDiverged
from elastic_etcd.core.schema import MOST_DIVERGENCES, Divergence, Drain, Keys

log = logging.getLogger(__name__)


class DivergenceWatch(PeriodicFollower):
    """Tells of workers that differ, and acts on those of this node."""

    name = "divergences"

    def __init__(self, node: str, keys: Keys, workers: Workers, tasks: Tasks) -> None:
        super().__init__(keys, workers, tasks)
        self._node = node
        self._found: list[WorkersDiverged] = []  # that nobody has acted on
        self._published = Divergence(0)
        self._drains = 0  # in which world this node is still to be drained

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state, and of what a worker has found."""
        super().see(before, event, state)
        if isinstance(event, WorkersDiverged):
            self._found.append(event)
            self.news.set()
        elif self._drains and state.view is not before.view:
            self.news.set()

    async def hear(self) -> None:
        """Tell of each, and act on it."""
        while self._found:
            found = self._found.pop(0)
            here = found.generation == self.state.local.running
            if not self.state.local.lease:
                continue
            if found.rank == 0:
                await self._tell(found)
            elif found.named and here:
                log.warning("%s", found.line)
            if found.alone and here:
                await self._act(found)
        if self._drains:
            await self._drain()

    async def _tell(self, found: WorkersDiverged) -> None:
        """Also of a world that is over: the node of the worker that is wrong may be first."""
        before = self._published
        if found.generation < before.generation:
            return
        lines = before.lines if before.generation == found.generation else ()
        lines = (*lines, found.line)[-MOST_DIVERGENCES:]
        self._published = Divergence(found.generation, lines)
        await self.publish(writes.put_divergence(self._keys, self.state.local, self._published))

    async def _act(self, found: WorkersDiverged) -> None:
        action = self.state.limits.on_divergence if self.state.limits else "report"
        if action == "restart":
            self._workers.give_up(found.rank, found.line, "")
        elif action == "drain":
            self._drains = found.generation

    async def _drain(self) -> None:
        """Ask for it as people do, unless it is asked for or too few nodes would be left."""
        generation, self._drains = self._drains, 0
        own, view, local = self.state.limits, self.state.view, self.state.local
        if own is None or view is None or view.round is None or local.running != generation:
            return
        limits = requests.scaled(view, local.run, own)
        if not limits.largest(view.round.nodes - 1):
            why = f"fewer nodes than --nnodes {limits.nnodes} would be left"
            log.warning("%s is not drained: %s", self._node, why)
            return
        if view.wanted and any(drain.node == self._node for drain in view.wanted.drains):
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        drain = Drain(self._node, by="--on-divergence drain", at=at)
        asked = writes.put_drain(self._keys, view, local, drain)
        if asked is None:
            log.warning("%s is not drained: no more nodes can be, undrain some", self._node)
            return
        if not await self.publish(asked):
            self._drains = generation  # others have asked for something: once more, after that
            if self.state.view is not view:
                self.news.set()
