"""Whether a node is fit to train: how a command is asked, and how others learn that it is not."""

import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.schema import Keys, Unfit, encode
from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdError
from elastic_etcd.etcd.client import Client
from elastic_etcd.system.child_process import spawn
from elastic_etcd.system.kernel import new_memfd
from elastic_etcd.system.processes import signal_group
from elastic_etcd.times import KILLED, PUBLISH_TIMEOUT

_REMEMBERED = 600  # seconds for which the key of a node outlives its agent
_TAIL = 1 << 16  # bytes of a command's output that are read

BESIDE_AGENT = "ELASTIC_ETCD_HEALTH_CHECK"  # a variable of the command of --health-check

log = logging.getLogger(__name__)


async def tell_unfit(client: Client, config: AgentConfig, why: str) -> None:
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


def run(command: Sequence[str], timeout: float, **variables: str) -> tuple[int | None, str]:
    """The exit code, None if it had to be killed after so many seconds, and the end of its output.

    It writes into memory: the end of a pipe comes with the last process that it has left running.
    Raises OSError if no process is to be had.
    """
    code = None
    with os.fdopen(new_memfd("elastic_etcd-check"), "rb") as said:
        process = spawn(command, os.environ | variables, stdout=said.fileno(), stderr=said.fileno())
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)
            try:
                process.wait(KILLED)
            except subprocess.TimeoutExpired:  # it hangs in a driver: nobody waits for its end
                process.returncode = -signal.SIGKILL
        said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL))
        return code, said.read().decode(errors="replace")
