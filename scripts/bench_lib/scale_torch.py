"""The same with torch: many DynamicRendezvousHandlers on one TCPStore, as torchrun's c10d.

Each handler has a thread and a connection of its own, in a few processes.
"""

import asyncio
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

STORE_TIMEOUT = timedelta(seconds=60)


class Counting(C10dRendezvousBackend):  # type: ignore[misc]  # mypy does not follow torch
    """Counts what it asks of the store, and the bytes of state that come back."""

    requests = 0
    received = 0

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        answer = super()._call_store(store_op, *args, **kwargs)
        self.requests += 1
        self.received += len(answer or b"")
        return answer


def join(port: int, number: int, nodes: int, bound: float) -> None:
    """Be one node until the world is complete; print what it took."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_TIMEOUT)
    backend = Counting(store, "scale")
    handler: DynamicRendezvousHandler = create_handler(
        store,
        backend,
        RendezvousParameters(
            "c10d",
            f"127.0.0.1:{port}",
            "scale",
            nodes,
            nodes,
            local_addr="127.0.0.1",
            join_timeout=bound,
        ),
    )
    began = time.monotonic()
    try:
        handler.next_rendezvous()
    except RendezvousTimeoutError:
        ended = None
    else:
        ended = time.monotonic()
    found = [number, began, ended, backend.requests, backend.received]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Formation:
    """Seconds from the last join to the last answer, and what was asked of the store."""

    final: float
    requests: int
    received: int  # bytes


async def measure(nodes: int, processes: int, bound: float) -> Formation | None:
    """One formation of `nodes` handlers; None: not within `bound` seconds."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = (sys.executable, "-m", "scripts.bench_lib.scale_torch", str(nodes), str(processes))
    children = [
        await asyncio.create_subprocess_exec(
            *(*command, str(bound), str(i), str(server.port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for i in range(processes)
    ]
    outputs = await asyncio.gather(*(child.communicate() for child in children))
    told = [json.loads(line) for out, _ in outputs for line in out.splitlines()]
    ended = [end for _, _, end, _, _ in told if end is not None]
    if len(ended) < nodes:
        return None
    return Formation(
        final=max(ended) - max(began for _, began, *_ in told),
        requests=sum(line[3] for line in told),
        received=sum(line[4] for line in told),
    )


def main() -> None:
    """NODES PROCESSES BOUND: print the formation as JSON; with INDEX PORT: be one process of it."""
    nodes, processes, bound = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if len(sys.argv) == 4:
        found = asyncio.run(measure(nodes, processes, bound))
        sys.stdout.write(json.dumps(found and asdict(found)) + "\n")
        return
    mine, port = range(int(sys.argv[4]), nodes, processes), int(sys.argv[5])
    threads = [threading.Thread(target=join, args=(port, i, nodes, bound)) for i in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # their heartbeats go on for ever


if __name__ == "__main__":
    main()
