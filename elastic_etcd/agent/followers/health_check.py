"""--health-check: a command of the site's own that says whether this node is fit to train.

It runs before the agent joins, and then every --health-interval seconds, also while the node is a
spare. A node that is not fit does not join, or leaves between two steps: nothing is lost.
"""

import asyncio
import logging
import os
import signal
import subprocess
from functools import partial

from elastic_etcd.agent.inbox import Inbox, Notice
from elastic_etcd.errors import UnfitNode
from elastic_etcd.system.child_process import spawn
from elastic_etcd.system.memfds import new_memfd
from elastic_etcd.system.processes import signal_group
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HEALTH_TIMEOUT

_LONGEST = 300  # characters of what the command says last
_TAIL = 1 << 12  # bytes of its output that are read

log = logging.getLogger(__name__)


async def check_before_joining(command: str) -> None:
    """Raise UnfitNode, with the command's last words, unless it exits 0."""
    if why := await _unfit(command):
        raise UnfitNode(
            f"this node does not join: {why}\nIt is free for others; start the agent again when "
            "the command exits 0."
        )


async def watch(command: str, interval: float, inbox: Inbox) -> None:
    """Run the command again and again, until it does not exit 0; the agent leaves then."""
    while True:
        await asyncio.sleep(interval)
        if why := await _unfit(command):
            inbox.put(Notice(why, exit_code=UnfitNode.exit_code))
            return


async def _unfit(command: str) -> str:
    """Why this node is not fit, "" if it is. A command that can't be started says nothing."""
    name = f"--health-check {command.split(maxsplit=1)[0]}"
    slow = f"{name} has not ended in {HEALTH_TIMEOUT:g} s"
    try:
        code, said = await in_thread(partial(_ask_command, command), 2 * HEALTH_TIMEOUT)
    except TimeoutError:
        return f"{slow}, and can't be killed"
    except OSError as error:  # no process or thread is to be had
        log.warning("%s could not be run: %s", name, error)
        return ""
    if code == 0:
        return ""
    return (slow if code is None else f"{name} exited {code}") + (f": {said}" if said else "")


def _ask_command(command: str) -> tuple[int | None, str]:
    """Its exit code, None if it had to be killed, and the last line that it has written.

    It writes into memory: the end of a pipe comes with the last process that it has left running.
    """
    shell, code = ["/bin/sh", "-c", command], None
    with os.fdopen(new_memfd("elastic_etcd-health"), "rb") as said:
        process = spawn(shell, os.environ, stdout=said.fileno(), stderr=said.fileno())
        try:
            code = process.wait(HEALTH_TIMEOUT)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL))
        written = said.read(_TAIL).decode(errors="replace")
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    return code, (lines or [""])[-1][:_LONGEST]
