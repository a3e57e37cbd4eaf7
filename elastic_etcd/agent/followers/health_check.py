"""--health-check: a command, as `elastic-etcd check`, that says whether this node is fit to train.

It runs before the agent joins, and then every --health-interval seconds, also while the node is a
spare, and when it is left out. A node that is not fit does not join, or leaves between two steps:
nothing is lost.
"""

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from elastic_etcd.agent.config import BESIDE_AGENT, AgentConfig
from elastic_etcd.agent.inbox import Notice, Tasks
from elastic_etcd.core.failure_policies import left_out
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Keys, Unfit, encode
from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdError, UnfitNode
from elastic_etcd.etcd.client import Client
from elastic_etcd.system.child_process import run_briefly
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HEALTH_TIMEOUT, PUBLISH_TIMEOUT

_REMEMBERED = 600  # seconds for which the key of a node outlives its agent
_LONGEST = 300  # characters of what the command says last

log = logging.getLogger(__name__)


async def check_before_joining(client: Client, config: AgentConfig, command: str) -> None:
    """Raise UnfitNode, with the command's last words, unless it exits 0."""
    if why := await _unfit(command):
        await _tell_unfit(client, config, why)
        raise UnfitNode(
            f"this node does not join: {why}\nIt is free for others; start the agent again when "
            "the command exits 0."
        )


class HealthCheck:
    """Runs the command every --health-interval, and when this node is left out (--suspect-after).

    When it does not exit 0 the agent leaves.
    """

    def __init__(self, client: Client, config: AgentConfig, command: str, tasks: Tasks) -> None:
        self._client = client
        self._config = config
        self._command = command
        self._inbox = tasks.inbox
        self._left_out = False
        self._asked = asyncio.Event()
        tasks.create(self._watch())

    def see(self, before: State, event: Event, state: State) -> None:
        """Ask once for each time that this node is left out, when none of its workers is left."""
        del before, event
        view, limits = state.view, state.limits
        if view is None or limits is None:
            return
        if self._config.node not in left_out(view.ledger, limits):
            self._left_out = False
        elif not (self._left_out or state.local.running):
            self._left_out = True
            self._asked.set()

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.health_interval):
                    await self._asked.wait()
            self._asked.clear()
            if why := await _unfit(self._command):
                await _tell_unfit(self._client, self._config, why)
                self._inbox.put(Notice(why, exit_code=UnfitNode.exit_code))
                return


async def _tell_unfit(client: Client, config: AgentConfig, why: str) -> None:
    """Have `elastic-etcd status` show for ten minutes why this node was kept out."""
    key = Keys(f"{config.prefix}/{config.job}").unfit_node(config.node)
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        found = await client.range(Get(key), timeout=PUBLISH_TIMEOUT)
        lease = (await client.grant(_REMEMBERED, PUBLISH_TIMEOUT)).id
        put = Put(key, encode(Unfit(config.node, why, at)), lease)
        await client.txn(Txn((), (put,)), PUBLISH_TIMEOUT)
        if key in found.kvs:
            await client.revoke(found.kvs[key].lease, PUBLISH_TIMEOUT)
    except EtcdError as error:
        log.warning("status won't show why this node is kept out: %s", error)


async def _unfit(command: str) -> str:
    """Why this node is not fit, "" if it is. A command that can't be started says nothing."""
    name = f"--health-check {command.split(maxsplit=1)[0]}"
    try:
        ask = partial(
            run_briefly, ["/bin/sh", "-c", command], HEALTH_TIMEOUT, **{BESIDE_AGENT: "1"}
        )
        code, said = await in_thread(ask, 2 * HEALTH_TIMEOUT)
    except TimeoutError:  # it does not even start: its disk stands still
        code, said = None, ""
    except OSError as error:  # no process or thread is to be had
        log.warning("%s could not be run: %s", name, error)
        return ""
    if code == 0:
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    how = f"has not ended in {HEALTH_TIMEOUT:g} s" if code is None else f"exited {code}"
    return ": ".join((f"{name} {how}", *(line[:_LONGEST] for line in lines[-1:])))
