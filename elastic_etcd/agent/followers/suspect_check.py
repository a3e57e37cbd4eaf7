"""--preflight once more, for a node that is left out, as its workers failed or it went too often.

It is checked while it waits as a spare, and nothing runs on it. If it is not fit it leaves, as by
--health-check.
"""

from contextlib import suppress

from elastic_etcd.agent import preflight
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import Notice, Tasks
from elastic_etcd.core.failure_policies import left_out
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.errors import EtcdError, UnfitNode
from elastic_etcd.etcd.client import Client


class SuspectCheck:
    """Checks this node each time that it is left out."""

    def __init__(self, client: Client, config: AgentConfig, tasks: Tasks) -> None:
        self._client = client
        self._config = config
        self._tasks = tasks
        self._checked = False

    def see(self, before: State, event: Event, state: State) -> None:
        """Begin a check where this node is left out and none of its workers is left."""
        del before, event
        view, limits = state.view, state.limits
        if view is None or limits is None:
            return
        if self._config.node not in left_out(view.ledger, limits):
            self._checked = False
        elif not (self._checked or state.local.running):
            self._checked = True
            self._tasks.create(self._check())

    async def _check(self) -> None:
        with suppress(EtcdError, OSError):  # nothing is known then
            if why := await preflight.why_unfit(self._client, self._config):
                self._tasks.inbox.put(Notice(why, exit_code=UnfitNode.exit_code))
