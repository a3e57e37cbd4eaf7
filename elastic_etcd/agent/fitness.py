"""Whether a node is fit to train: how a check is run, and how others learn of a node that is not.

--health-check runs a command of the site's own, --preflight what is built in.
"""

import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.schema import Checked, Keys, encode
from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdError
from elastic_etcd.etcd.client import Client
from elastic_etcd.system.child_process import spawn
from elastic_etcd.system.memfds import new_memfd
from elastic_etcd.system.processes import signal_group
from elastic_etcd.times import CONTACT_TIMEOUT, KILLED, PUBLISH_TIMEOUT

_REMEMBERED = 600  # seconds for which the key of a node outlives its agent
_TAIL = 1 << 16  # bytes of a command's output that are read

log = logging.getLogger(__name__)


class CheckedKey:
    """The key by which a node that is checked is known, for ten minutes from its first write."""

    def __init__(
        self, client: Client, config: AgentConfig, timeout: float = CONTACT_TIMEOUT
    ) -> None:
        self.path = Keys(f"{config.prefix}/{config.job}").checked(
            config.node, config.limits.max_nodes
        )
        self.lease = 0
        self._client = client
        self._timeout = timeout

    async def put(self, checked: Checked) -> None:
        """Write it, over that of the node's last agent. Raises EtcdError."""
        former = 0
        if not self.lease:
            found = await self._client.range(Get(self.path), timeout=self._timeout)
            former = found.kvs[self.path].lease if self.path in found.kvs else 0
            self.lease = (await self._client.grant(_REMEMBERED, self._timeout)).id
        put = Put(self.path, encode(checked), self.lease)
        await self._client.txn(Txn((), (put,)), self._timeout)
        if former:
            await self._client.revoke(former, self._timeout)


async def tell_unfit(client: Client, config: AgentConfig, why: str) -> None:
    """Have `elastic-etcd status` show for ten minutes why this node was kept out."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    key = CheckedKey(client, config, PUBLISH_TIMEOUT)
    try:
        await key.put(Checked(config.node, unfit=why, at=at))
    except EtcdError as error:
        log.warning("status won't show why this node is kept out: %s", error)


def run(command: Sequence[str], timeout: float) -> tuple[int | None, str]:
    """The exit code, None if it had to be killed after so many seconds, and the end of its output.

    It writes into memory: the end of a pipe comes with the last process that it has left running.
    Raises OSError if no process is to be had.
    """
    code = None
    with os.fdopen(new_memfd("elastic_etcd-check"), "rb") as said:
        process = spawn(command, os.environ, stdout=said.fileno(), stderr=said.fileno())
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
