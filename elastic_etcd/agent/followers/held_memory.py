"""How much memory the last commits take on this node, published for `elastic-etcd status`."""

import random

from elastic_etcd.agent.followers.periodic import PeriodicFollower
from elastic_etcd.core import writes
from elastic_etcd.core.schema import CommitMemory

_PERIOD = 5.0  # seconds between two looks, at least
_A_SECOND = 20  # looks of all nodes


class HeldMemory(PeriodicFollower):
    """Publishes it when it has changed: it does at the first commits of a world."""

    name = "held"
    found = (0, 0, 0)  # as Workers.bytes_held; a scrape reads it in another thread
    _published: CommitMemory | None = None

    def pause(self) -> float:
        """Not the same for all nodes, so that they do not publish at once."""
        now = self.state.view.round if self.state.view else None
        return max(_PERIOD, now.nodes / _A_SECOND if now else 0) * random.uniform(0.5, 1)  # noqa: S311

    async def look(self) -> None:
        """Publish what is another than before."""
        local = self.state.local
        self.found = self._workers.bytes_held()
        if not (local.lease and local.running):
            return
        held = CommitMemory(local.lease, *self.found)
        if held == self._published or (self._published is None and not held.own):
            return
        if await self.publish(writes.put_held(self._keys, local, held)):
            self._published = held
