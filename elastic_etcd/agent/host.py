"""What this node gives to a world: its workers, and the store when it is group rank 0."""

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from elastic_etcd.agent import store
from elastic_etcd.agent.config import AgentConfig, substitute
from elastic_etcd.agent.environment import GroupRanks, worker_env
from elastic_etcd.agent.logs import Logs
from elastic_etcd.agent.workers import WorkerExit, WorkerGroup, WorkerSpec
from elastic_etcd.core.events import Emptied, Event, WorkerEnded
from elastic_etcd.core.values import Failure, Master, Round
from elastic_etcd.errors import UsageError

if TYPE_CHECKING:
    import socket

log = logging.getLogger(__name__)


class Host:
    """Starts and stops the workers of one generation at a time. Events go to `post`."""

    def __init__(self, config: AgentConfig, logs: Logs, post: Callable[[Event], None]) -> None:
        self._config = config
        self._logs = logs
        self._post = post
        self._workers: WorkerGroup | None = None
        self._store = store.StoreHost(self._store_died)
        self._listener: tuple[int, socket.socket] | None = None

    def close(self) -> None:
        """End what is left, the hard way: the ordinary way is `stop` and its Emptied."""
        if self._workers:
            self._workers.kill()
        self._store.close()
        self._drop_listener()

    def offer(self, generation: int, address: str) -> Master:
        """The endpoint at which this node will host the store of `generation`."""
        self._drop_listener()
        listener, port = store.bind(address)
        self._listener = (generation, listener)
        return address, port

    def start(self, lease: int, now: Round) -> None:
        """Start this node's workers of the final round `now`."""
        place = now.place(lease)
        assert self._workers is None, "I3: older workers are alive"
        assert place is not None
        assert now.master is not None
        if place == 0 and self._listener and self._listener[0] == now.generation:
            self._store.serve(now.generation, self._listener[1])
            self._listener = None
        self._drop_listener()
        nprocs = [p.nproc for p in now.participants]
        ranks = GroupRanks(place, len(nprocs), sum(nprocs[:place]), nprocs[place], sum(nprocs))
        last = ranks.first_rank + ranks.local_world_size - 1
        log.info(
            "generation %d (%s): group rank %d of %d, ranks %d-%d of %d, master %s:%d",
            *(now.generation, now.reason, place, len(nprocs), ranks.first_rank, last),
            *(ranks.world_size, *now.master),
        )
        specs = [self._spec(i, ranks, now, now.master) for i in range(nprocs[place])]
        self._workers = WorkerGroup(now.generation, specs, self._logs, self._exited, self._emptied)
        self._workers.start()

    def stop(self, grace: float) -> None:
        """SIGTERM, after `grace` seconds SIGKILL; answered by Emptied."""
        if self._workers:  # else they have just ended, and Emptied is in the mailbox
            self._workers.stop(grace)

    def _spec(self, local_rank: int, ranks: GroupRanks, now: Round, master: Master) -> WorkerSpec:
        config = self._config
        rank = ranks.first_rank + local_rank
        error_file = self._logs.error_file(now.generation, rank)
        env = worker_env(
            os.environ,
            job=config.job,
            generation=now.generation,
            node=config.node,
            role=config.role,
            local_rank=local_rank,
            ranks=ranks,
            master=master,
            restarts=now.restarts,
            max_restarts=config.max_restarts,
            virtual_local_rank=config.virtual_local_rank,
            error_file=error_file,
            signals=config.signals,
        )
        argv = tuple(substitute(config.argv, local_rank))
        return WorkerSpec(argv, env, rank, local_rank, error_file)

    def _exited(self, ended: WorkerExit) -> None:
        failure = None
        if ended.code:
            failure = Failure(
                node=self._config.node,
                rank=ended.rank,
                local_rank=ended.local_rank,
                pid=ended.pid,
                code=ended.code,
                uptime=round(ended.uptime, 3),
                message=ended.message,
                at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        log.debug("worker %d exited %d after %.1f s", ended.rank, ended.code, ended.uptime)
        self._post(WorkerEnded(ended.generation, failure))

    def _emptied(self, generation: int) -> None:
        self._workers = None
        self._post(Emptied(generation))

    def _store_died(self, text: str) -> None:
        log.warning("nobody answers at the master endpoint any more: %s", text)

    def _drop_listener(self) -> None:
        if self._listener:
            self._listener[1].close()
            self._listener = None


def check_devices(config: AgentConfig) -> None:
    """Raises UsageError now for what would only show when the first worker starts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if config.virtual_local_rank and visible and len(visible.split(",")) < config.nproc:
        raise UsageError(
            f"--virtual-local-rank needs {config.nproc} devices, CUDA_VISIBLE_DEVICES={visible} "
            "has fewer; make it longer or --nproc-per-node smaller"
        )
