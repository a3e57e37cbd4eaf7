"""One generation's process group in this worker: formed, broken if need be, and dropped."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

# The first DDP module imports it in its constructor, and what that leaves behind holds the process
# group of that time for ever (torch 2.13).
import torch._dynamo  # noqa: F401
import torch.distributed as dist

from elastic_etcd.errors import UsageError
from elastic_etcd.train import boundary, ddp, nccl
from elastic_etcd.train.boundary import PATIENCE, Boundary
from elastic_etcd.train.cut import cut

_OURS = 2  # references to a group that nobody else holds: ours, and that of the one who counts
_AGAIN = 0.05  # seconds: what is connected after a cut has to be cut, too

log = logging.getLogger(__name__)


class World:
    """A generation as its agent described it; `env` has torchrun's variables for this worker.

    `attempt` counts the worlds that a script makes in one generation: one after the other, with
    keys of their own in the same store.
    `form` and `drop` are the training loop's; `change` and `interrupt` come from another thread,
    at any time.
    """

    def __init__(self, generation: int, env: Mapping[str, str], attempt: int = 0) -> None:
        self.generation = generation
        self.leaving = False  # this node leaves the job: nothing follows this world
        self.broken = ""  # why
        self.rank, self.world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self._local_rank = int(env["LOCAL_RANK"])
        self._endpoint = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        self._prefix = f"elastic_etcd/{generation}/{attempt}"
        self._boundary = Boundary(self.rank, self.world_size, self._connect, self.interrupt)
        self._ending = threading.Lock()
        self._dropped = threading.Event()
        self._breaker: threading.Thread | None = None
        self._group: Any = None
        self._aborted: list[Any] = []

    def form(self, backend: str | None, options: Mapping[str, Any]) -> None:
        """Build the default process group. Raises torch's errors, and UsageError."""
        if dist.is_initialized():
            raise UsageError("there is a process group already, but ee.run is to make it")
        backend = _prepare(backend, self._local_rank)
        nccl.leave_errors_to_us()
        store = self._connect(timedelta(seconds=300))
        boundary.begin(self._boundary)
        if self.broken:  # before there was a connection that could be cut
            raise boundary.WorldBroken(self.broken)
        # One that failed in here has used up a name, by which the others' keys are not found.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, **options
        )

    def change(self, leaving: bool) -> None:
        """A planned change: all ranks stop at the same step."""
        with self._ending:
            if not self._dropped.is_set():
                self.leaving = self.leaving or leaving
                self._boundary.stop()

    def interrupt(self, reason: str) -> None:
        """The world is broken: free the loop, wherever in a collective it waits."""
        with self._ending:
            if self.broken or self._dropped.is_set():
                return
            self.broken = reason
            self._boundary.interrupt(reason)
            self._breaker = threading.Thread(target=self._break, name="elastic_etcd breaker")
            self._breaker.start()

    def meet(self) -> None:
        """At a planned end: wait until no rank is in the last step's collectives any more."""
        with suppress(RuntimeError):  # a peer is done or has broken off; everything is committed
            dist.barrier()
        cut(self._endpoint[1])  # gloo closes each connection 10 ms faster when it has failed

    def drop(self, *, broken: bool) -> None:
        """Take the process group down, with nobody waiting for us in it if it is `broken`.

        It is gone when `collect` has been called, too.
        """
        boundary.begin(None)
        ddp.forget()
        if broken:
            self._boundary.interrupt("the world is dropped")
            self._cut()
        with self._ending:
            self._dropped.set()
        if self._breaker:
            self._breaker.join()
        if dist.is_initialized():
            self._group = dist.group.WORLD
            self._destroy(broken=broken)
        self._boundary.join()

    def collect(self) -> None:
        """Free the dropped group, and first what else holds it, which are DDP modules in cycles.

        Gloo's aborts the process at exit, and such a module's hooks are still in its parameters. A
        collection takes as long as there are objects, 0.1 s and more where nothing is frozen.

        The group goes last: a DDP module's end keeps the GIL, and with the group's last reference
        it would wait there for gloo's threads, one of which may wait for the GIL (torch 2.13).
        """
        if self._group is not None and sys.getrefcount(self._group) > _OURS:
            gc.collect()
        self._group = None

    def _destroy(self, *, broken: bool) -> None:
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)  # torch 2.6
        try:
            if broken and abort and self._aborted:
                abort()
            else:
                dist.destroy_process_group()
        except RuntimeError as error:
            if dist.is_initialized():
                raise
            log.debug("the process group ended with: %s", error)  # of a broken one no news

    def _connect(self, timeout: timedelta = timedelta(seconds=PATIENCE)) -> dist.Store:
        address, port = self._endpoint
        client = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        return dist.PrefixStore(self._prefix, client)

    def _break(self) -> None:
        self._cut()
        while not self._dropped.wait(_AGAIN):
            self._cut()

    def _cut(self) -> None:
        cut(self._endpoint[1])
        nccl.abort(self._aborted)


def form_alone(backend: str | None, options: Mapping[str, Any]) -> None:
    """Build the process group that torchrun describes, or else a world of one."""
    backend = _prepare(backend, int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend, **options)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)


def _prepare(backend: str | None, local_rank: int) -> str:
    if not nccl.usable():
        return backend or "gloo"
    nccl.prepare(local_rank)
    return backend or "cpu:gloo,cuda:nccl"
