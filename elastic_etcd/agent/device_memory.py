"""Memory of this node's GPUs that somebody holds when a worker finds too little at its start.

It is looked for only then. A process that ends gives its memory back before an agent sees its end,
and what has left a worker's group is ended before the next start, so that nearly always there is
nothing to wait for; and a look costs half a second or more (nvidia-smi). If somebody holds memory
all the same, such as a driver at work on a killed process, or another job's program, a worker fails
at once. Its failure says who, and the next start on this node waits a while. NVIDIA's GPUs only.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from elastic_etcd.agent.fitness import run
from elastic_etcd.core.words import listed
from elastic_etcd.system.threads import in_thread

_QUERY = ("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv,noheader")
_LINE = re.compile(r"(\d+), (\d+ MiB|\[N/A\]), (\S+)")
_ASK = 5.0  # seconds for the driver's answer
_LOOK = 1.0  # from one look to the next
_TELLS = 2.0  # until it is told who is waited for
_PATIENCE = 30.0  # and then workers start beside them

log = logging.getLogger(__name__)


async def holders(sessions: Collection[int]) -> list[str]:
    """`pid 4711 (python3) holds 70000 MiB of GPU-8f3...`, but for the processes of these sessions.

    None, as far as is known, where there is no nvidia-smi or it does not answer.
    """
    with suppress(OSError):  # a TimeoutError is one
        return await in_thread(partial(_ask_driver, sessions), 2 * _ASK)
    return []


async def wait_until_free(sessions: Collection[int], stops: Callable[[], bool]) -> None:
    """Wait until nobody but these sessions holds any, or a while; or until workers are to stop."""
    loop = asyncio.get_running_loop()
    began, told = loop.time(), False
    while (found := await holders(sessions)) and not stops():
        seconds = loop.time() - began
        if seconds >= _PATIENCE:
            log.warning("workers start after %.0f s, although %s", seconds, listed(found))
            return
        if seconds >= _TELLS and not told:
            told = True
            log.info("waiting for memory of a GPU for %.0f s: %s", seconds, listed(found))
        await asyncio.sleep(_LOOK)


def _ask_driver(sessions: Collection[int]) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    code, text = run(["nvidia-smi", *([f"--id={visible}"] if visible else []), *_QUERY], _ASK)
    found = []
    for pid, memory, gpu in _LINE.findall(text if code == 0 else ""):
        session, name = 0, "ended"
        with suppress(OSError):
            session = os.getsid(int(pid))
            name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        if session not in sessions:
            found.append(f"pid {pid} ({name}) holds {memory} of {gpu}")
    return found
