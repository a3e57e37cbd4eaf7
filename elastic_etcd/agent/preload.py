"""What the job's script imports, told to the nodes that join later: --preload auto."""

from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Preload


class PreloadTeller:
    """`tell()` runs for ever, and `see` is told of every state."""

    def __init__(self, membership: Membership, workers: Workers) -> None:
        self._membership = membership
        self._workers = workers
        self._state: State | None = None

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state."""
        del before, event
        self._state = state

    async def tell(self) -> None:
        """Put into etcd what this node's fork server has learned, whenever it has."""
        while True:
            modules = await self._workers.learned.get()
            if self._state and self._state.local.lease:
                txn = writes.put_preload(self._membership.keys, self._state.local, Preload(modules))
                await self._membership.publish(txn)
