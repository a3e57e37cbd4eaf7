"""--health-check: a command of the site's own that says whether this node is fit to train.

It runs before the agent joins, and then every --health-interval seconds, also while the node is a
spare. A node that is not fit does not join, or leaves between two steps: nothing is lost.
"""

import asyncio
import logging
from functools import partial

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.fitness import run, tell_unfit
from elastic_etcd.agent.inbox import Inbox, Notice
from elastic_etcd.errors import UnfitNode
from elastic_etcd.etcd.client import Client
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HEALTH_TIMEOUT

_LONGEST = 300  # characters of what the command says last

log = logging.getLogger(__name__)


async def check_before_joining(client: Client, config: AgentConfig, command: str) -> None:
    """Raise UnfitNode, with the command's last words, unless it exits 0."""
    if why := await _unfit(command):
        await tell_unfit(client, config, why)
        raise UnfitNode(
            f"this node does not join: {why}\nIt is free for others; start the agent again when "
            "the command exits 0."
        )


async def watch(client: Client, config: AgentConfig, command: str, inbox: Inbox) -> None:
    """Run the command again and again, until it does not exit 0; the agent leaves then."""
    while True:
        await asyncio.sleep(config.health_interval)
        if why := await _unfit(command):
            await tell_unfit(client, config, why)
            inbox.put(Notice(why, exit_code=UnfitNode.exit_code))
            return


async def _unfit(command: str) -> str:
    """Why this node is not fit, "" if it is. A command that can't be started says nothing."""
    name = f"--health-check {command.split(maxsplit=1)[0]}"
    try:
        ask = partial(run, ["/bin/sh", "-c", command], HEALTH_TIMEOUT)
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
