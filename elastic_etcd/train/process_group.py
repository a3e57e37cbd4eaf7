"""The process group of a generation in this worker: initialised, aborted if need be, torn down."""

import atexit
import ctypes
import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

# The first DDP module imports it in its constructor, and the remains of that hold the process group
# of that time for ever (torch 2.13).
import torch._dynamo  # noqa: F401
import torch.distributed as dist

from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.system.sockets import short_lookups
from elastic_etcd.times import NCCL_LOOK, PARK_LATE, SYNC_PATIENCE
from elastic_etcd.train import abort, ddp, sync_point
from elastic_etcd.train.accelerator import devices, uses_devices
from elastic_etcd.train.sync_point import SyncPoint

_OURS = 2  # references to a group that nobody else holds: a list's, and who counts
_ABORT_AGAIN = 0.05  # seconds: connections made after an abort have to be shut down, too

log = logging.getLogger(__name__)


class ProcessGroup:
    """torch's default process group of one generation, from its beginning to its end.

    `env` has torchrun's variables for this worker. `attempt` counts the groups that a script makes
    in one generation: one after the other, with keys of their own in the same store.
    The training loop calls `init`, `barrier`, `teardown` and `release`; `change` and `interrupt`
    come from another thread, at any time.
    """

    def __init__(self, generation: int, env: Mapping[str, str], attempt: int = 0) -> None:
        self.generation = generation
        self.leaving = False  # this node leaves the job: no other generation follows
        self.broken = ""  # why
        self.own_reason = ""  # the same, where it was found out here
        self.rank, self.world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        self._local_rank = int(env["LOCAL_RANK"])
        self._endpoint = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        self._store: frozenset[abort.Address] = frozenset()
        self._strangers: frozenset[str] = frozenset()
        self._prefix = f"elastic_etcd/{generation}/{attempt}"
        self._sync_point = SyncPoint(self.rank, self.world_size, self._connect, self.fail)
        self._ending = threading.Lock()
        self._torn_down = threading.Event()
        self._aborter: threading.Thread | None = None
        self._place_timer: threading.Timer | None = None
        self._nccl_watch = threading.Thread(
            target=self._watch_nccl, name="elastic_etcd NCCL", daemon=True
        )
        self._loop = threading.get_ident()
        self._groups: list[Any] = []  # that are destroyed, and not released
        self._aborted: list[Any] = []
        self._excepthooks: tuple[Any, Any] = None, None  # before init_process_group and after it

    def init(self, backend: str | None, options: Mapping[str, Any]) -> None:
        """Call init_process_group. Raises torch's errors, WorldBroken and UsageError."""
        if dist.is_initialized():
            raise UsageError("there is a process group already, but ee.run is to make it")
        backend = _prepare(backend, self._local_rank, options)
        _tame_watchdog()
        self._loop = threading.get_ident()
        self._strangers = abort.strangers()
        store = self._connect(timedelta(seconds=300))
        sync_point.install(self._sync_point)
        if self.broken:  # before there was a connection that could be shut down
            raise sync_point.WorldBroken(self.broken)
        # One that failed in here has used up a name, by which the others' keys are not found.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        before = sys.excepthook
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, **options
        )
        self._excepthooks = before, sys.excepthook
        if abort.uses_nccl():
            self._nccl_watch.start()

    def change(self, leaving: bool) -> None:
        """A planned change: all ranks stop at the same step."""
        with self._ending:
            if not self._torn_down.is_set():
                self.leaving = self.leaving or leaving
                self._sync_point.stop()

    def interrupt(self, reason: str) -> None:
        """The world is broken: free the loop, wherever in a collective it waits."""
        with self._ending:
            if self.broken or self._torn_down.is_set():
                return
            self.broken = reason
            self._sync_point.interrupt(reason)
            self._aborter = threading.Thread(target=self._keep_aborting, name="elastic_etcd abort")
            self._aborter.start()
            self._place_timer = threading.Timer(PARK_LATE, self._log_place)
            self._place_timer.daemon = True  # like that thread it keeps no process that ends
            self._place_timer.start()

    def tells_garbage(self) -> bool:
        """Whether a collective of NCCL's may have been aborted: it ends as if it had succeeded."""
        return bool(self.broken) and abort.has_nccl()

    def fail(self, reason: str) -> None:
        """Interrupt the world for a reason that was met here, which the agent does not know."""
        self.own_reason = self.own_reason or reason
        self.interrupt(reason)

    def barrier(self) -> None:
        """At a planned end: wait until no rank is in the last step's collectives any more."""
        if dist.is_initialized():  # else the training's own `finally` has destroyed it
            with suppress(RuntimeError):  # a peer is done or has broken off; all is committed
                dist.barrier()
        # Gloo closes a connection 10 ms faster when it has failed.
        abort.abort_gloo(self._store, self._strangers)

    def teardown(self, *, broken: bool) -> None:
        """Destroy the process group, with nobody waiting for us in it if it is `broken`.

        It is gone when `release` has been called, too.
        """
        sync_point.install(None)
        ddp.forget()
        if broken:
            self._sync_point.interrupt("the process group is torn down")
            self._abort()
        with self._ending:
            self._torn_down.set()
        if self._aborter:
            self._aborter.join()
        if self._nccl_watch.ident:
            self._nccl_watch.join()
        if dist.is_initialized():
            self._groups = _groups()
            self._destroy()
        self._sync_point.join()

    def release(self) -> None:
        """Free the destroyed group with its threads, and first what else holds it: DDP modules.

        Only the user's objects hold it longer: then it is freed with a later world, see `_free`.
        """
        _free(self._groups)
        if self._place_timer:
            self._place_timer.cancel()
            self._place_timer.join()

    def unhook(self) -> None:
        """Before another world: torch puts the rank before each line of an error, in each anew."""
        before, after = self._excepthooks
        if sys.excepthook is after:  # else it is the user's
            sys.excepthook = before

    def _destroy(self) -> None:
        abort_all = getattr(dist.distributed_c10d, "_abort_process_group", None)  # torch 2.6
        try:
            if abort_all and self._aborted:
                abort_all()
            else:
                dist.destroy_process_group()
        except RuntimeError as error:
            if dist.is_initialized():
                raise
            log.debug("the process group ended with: %s", error)  # of a broken one no news

    def _connect(self, timeout: timedelta = timedelta(seconds=SYNC_PATIENCE)) -> dist.Store:
        address, port = self._endpoint
        self._store = abort.addresses_of(address, port)
        with short_lookups(address):
            client = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        return dist.PrefixStore(self._prefix, client)

    def _keep_aborting(self) -> None:
        """Until it is torn down, or the script has ended: the interpreter waits for this thread."""
        self._abort()
        while not self._torn_down.wait(_ABORT_AGAIN) and threading.main_thread().is_alive():
            self._abort()

    def _log_place(self) -> None:
        """A communicator that NCCL initialises can't be aborted, nor a wait of the script's."""
        stack = traceback.extract_stack(sys._current_frames().get(self._loop))[-3:]  # noqa: SLF001
        log.warning(
            "rank %d is not out of generation %d %g s after this: %s; it is in %s",
            *(self.rank, self.generation, PARK_LATE, self.broken),
            " < ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(stack)),
        )

    def _watch_nccl(self) -> None:
        """NCCL's errors and time-outs end the world, as they would else end the process."""
        while not self._torn_down.wait(NCCL_LOOK):
            if error := abort.nccl_error():
                self.fail(f"NCCL has met an error: {error}")
                return

    def _abort(self) -> None:
        abort.abort_gloo(self._store, self._strangers)
        try:
            abort.abort_nccl(self._aborted)
        except RuntimeError as error:
            log.debug("NCCL could not be aborted, and will be again: %s", error)


def init_agentless(backend: str | None, options: Mapping[str, Any]) -> None:
    """Without an agent: build the process group that torchrun describes, or else of one rank."""
    backend = _prepare(backend, int(os.environ.get("LOCAL_RANK", "0")), options)
    if "RANK" in os.environ:
        dist.init_process_group(backend, **options)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)


def teardown_agentless() -> None:
    """Destroy the process groups of a world without an agent, and free them as `release` does."""
    ddp.forget()
    groups = _groups()
    dist.destroy_process_group()
    _free(groups)


def _groups() -> list[Any]:
    """The default process group and those that the user has made beside it."""
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no public list


_outlived: list[Any] = []  # groups that were torn down while something else held them


def _free(groups: list[Any]) -> None:
    """Free destroyed groups, each once nothing else holds it; `groups` is empty afterwards.

    A group goes after its DDP modules. A module's end keeps the GIL; with the group's last
    reference it would wait there for gloo's threads, one of which may wait for the GIL (torch
    2.13). So a group stays here as long as a module has it: one that the user keeps, or one in the
    traceback of the user's own error.

    Modules in cycles are collected first: their hooks are still in their parameters. A collection
    takes as long as there are objects, 0.1 s and more where nothing is frozen.
    """
    if _held_elsewhere(groups):
        gc.collect()
    _outlived.extend(groups)
    groups.clear()
    _outlived[:] = _held_elsewhere(_outlived)


def _held_elsewhere(groups: list[Any]) -> list[Any]:
    counts = list(map(sys.getrefcount, groups))  # of a name Python 3.14 counts one less
    return [group for group, count in zip(groups, counts, strict=True) if count > _OURS]


@atexit.register
def _keep_for_good() -> None:
    """At exit: a group that is held still is never freed, since gloo's would abort the process."""
    for group in _outlived:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_WATCHDOG = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # or a thread of the first group's may sleep for 8 minutes
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # with the lock that each collective takes
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
}


def _tame_watchdog() -> None:
    """Let NCCL's watchdog neither end the process at the first error nor wait for dumps then.

    By 0 it does nothing. If it looks for the rank that is behind, torch makes 3 of 0, which ends
    the process; by 2 it aborts the communicators.
    """
    desync = os.environ.get("TORCH_NCCL_DESYNC_DEBUG", "0") != "0"
    detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2" if desync or detail else "0"
    for name, value in _WATCHDOG.items():
        os.environ.setdefault(name, value)


def _prepare(backend: str | None, local_rank: int, options: Mapping[str, Any]) -> str:
    """The backend to use; with NCCL or the like this worker's device becomes the current one.

    The device is the option `device_id`, else the one of the local rank. Raises UsageError when
    there is none of that number.
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if abort.uses_nccl() else "gloo"
    if uses_devices(backend):
        device = options.get("device_id")
        devices().set_device(_device_of(local_rank) if device is None else device)
    return backend


def _device_of(local_rank: int) -> int:
    count: int = devices().device_count()
    if count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return local_rank % count
    if local_rank >= count:
        raise WrongHere(
            f"the worker with local rank {local_rank} has no GPU of its own: this process sees "
            f"{count}. Start as many workers as GPUs (--nproc-per-node gpu), or give ee.run "
            'backend="gloo", or a device_id; from NCCL 2.30 on NCCL_MULTI_RANK_GPU_ENABLE=1 lets '
            "workers share a GPU"
        )
    return local_rank
