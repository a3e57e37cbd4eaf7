"""What this node gives to a world: its workers, and the store when it is group rank 0."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from elastic_etcd.agent import store
from elastic_etcd.agent.channel import Channels, Peer
from elastic_etcd.agent.config import AgentConfig, substitute
from elastic_etcd.agent.environment import GroupRanks, common_env, worker_env
from elastic_etcd.agent.logs import Logs, WorkerLog
from elastic_etcd.agent.warm import WarmPool
from elastic_etcd.agent.worker import Started, WorkerSpec, execute
from elastic_etcd.agent.workers import Notice, WorkerExit, WorkerGroup
from elastic_etcd.core.events import Emptied, Event, WorkerEnded
from elastic_etcd.core.values import Failure, Master, Round
from elastic_etcd.errors import UsageError

if TYPE_CHECKING:
    import socket

GOODBYE = 3.0  # seconds for a parked worker to end by itself
PATIENCE = 2.0  # seconds beyond a lease's TTL: by then a lost node is known to be lost

Post: TypeAlias = Callable[[Event], None]
Current: TypeAlias = Callable[[int], Coroutine[None, None, tuple[bool | None, str]]]

log = logging.getLogger(__name__)


class Host:
    """Starts and stops the workers of one generation at a time. Events go to `post`.

    `changed` says that `groups`, the process groups that run here, are others. `current` answers
    whether a generation is still the job's, and why not.
    """

    def __init__(
        self,
        config: AgentConfig,
        logs: Logs,
        post: Post,
        changed: Callable[[], None],
        current: Current,
    ) -> None:
        self._config = config
        self._logs = logs
        self._post = post
        self._changed = changed
        self._current = current
        self._group: WorkerGroup | None = None
        self._empty = True  # nothing of the group runs, though some of it may be parked
        self._channels = Channels(self._heard, self._asked)
        self._socket = self._channels.open()
        self._questions: set[asyncio.Task[None]] = set()
        self._pool: WarmPool | None = None
        if config.warm:
            env = common_env(os.environ, config.nproc)
            self._pool = WarmPool(config.argv, env, config.preload, config.nproc + 1)  # and a store
            self._pool.start()
        self._store = store.StoreHost(self._store_died, self._pool)
        self._listener: tuple[int, socket.socket] | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups of this node's workers."""
        return self._group.groups if self._group else ()

    @property
    def elastic(self) -> bool:
        """Whether every worker that runs here recovers in process."""
        return self._group is not None and self._group.elastic

    async def warm(self) -> None:
        """Make everything ready that a start would otherwise wait for. Raises UsageError."""
        if self._pool:
            await self._pool.warm()

    def offer(self, generation: int, address: str) -> Master:
        """The endpoint at which this node would host the store of `generation`."""
        if self._listener is None or self._listener[0] != generation:
            self._drop_listener()
            self._listener = (generation, store.bind(address)[0])
        return address, self._listener[1].getsockname()[1]

    def start(self, lease: int, now: Round) -> None:
        """Start this node's workers of the final round `now`, or send on those that wait for it."""
        place = now.place(lease)
        assert self._empty, "I3: older workers are alive"
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
        if nprocs[place] != self._config.nproc:
            wrong = (nprocs[place], self._config.nproc)
            log.warning("the round says %d workers, this node has been given %d", *wrong)
        specs = [self._spec(i, ranks, now, now.master) for i in range(self._config.nproc)]
        parked = self._group.release() if self._group else {}
        self._group = WorkerGroup(
            now.generation,
            specs,
            self._logs,
            self._exited,
            self._emptied,
            self._start_worker,
            self._config.lease_ttl + PATIENCE,
        )
        self._empty = False
        self._group.start(parked, now.reason)
        self._changed()

    def stop(self, grace: float, notice: Notice) -> None:
        """Ask the workers to stop, after `grace` seconds SIGKILL; answered by Emptied."""
        if self._group and not self._empty:  # else Emptied is in the mailbox
            self._group.stop(grace, notice)

    async def end(self, reason: str) -> None:
        """Say goodbye to parked workers, and wait a moment for them to end by themselves."""
        if self._group:
            await self._group.say_bye(reason, GOODBYE)

    def close(self) -> None:
        """End what is left, the hard way: the ordinary way is `stop` and its Emptied."""
        if self._group:
            self._group.end()
        for question in self._questions:
            question.cancel()
        if self._pool:
            self._pool.close()
        self._channels.close()
        self._store.close()
        self._drop_listener()

    def _start_worker(
        self, spec: WorkerSpec, output: WorkerLog, then: Callable[[Started], None]
    ) -> None:
        def started(process: Started) -> None:
            then(process)
            self._changed()

        start = self._pool.start_worker if self._pool else execute
        start(spec, output, started)

    def _heard(self, peer: Peer, message: dict[str, Any]) -> None:
        """A worker has something to say; what comes too late is of no interest any more."""
        worker = self._group.find(peer) if self._group else None
        if self._group is None or worker is None:
            log.debug("process %d is no worker of this node", peer.pid)
            return
        match message["type"]:
            case "elastic":
                worker.peer = peer
            case "disconnected" if worker.peer is peer:
                worker.peer = None
            case "parked" if message["generation"] == self._group.generation:
                self._group.park(worker, message["error"])

    def _asked(self, peer: Peer, number: int) -> None:
        task = asyncio.create_task(self._answer(peer, number))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, peer: Peer, number: int) -> None:
        current, why = await self._current(peer.generation)
        peer.send({"type": "current", "id": number, "current": current, "reason": why})

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
            socket=self._socket,
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
        self._post(WorkerEnded(ended.generation, failure, ended.by_peer))

    def _emptied(self, generation: int) -> None:
        self._empty = True
        self._changed()
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
