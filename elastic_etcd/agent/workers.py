"""All that runs on this node for the job: its workers, and the store where it is group rank 0.

An exit is an event, never found by polling. I3 rests on WorkersGone: it comes when nothing of any
worker's process group runs any more, not when the leaders are gone. A worker that waits at the
barrier without a process group of torch's (it is parked) counts as gone.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.config import AgentConfig, substitute
from elastic_etcd.agent.environment import GroupRanks, common_env, worker_env
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import Inbox, Tasks, Unkillable
from elastic_etcd.agent.logs import Logs, WorkerLog
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.offload import begin
from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.agent.store import StoreServer, bind
from elastic_etcd.agent.worker import Worker, WorkerSpec, execute
from elastic_etcd.core.lifecycle import WorkerEnded, WorkersGone
from elastic_etcd.core.peers import ends_with_lost_peer
from elastic_etcd.core.schema import Failure, Master, Round
from elastic_etcd.process import Process, ProcessGroups
from elastic_etcd.protocol import (
    AskCurrent,
    Bye,
    Change,
    Current,
    Disconnected,
    Elastic,
    FromWorker,
    Interrupt,
    Parked,
)
from elastic_etcd.times import ERROR_FILE, GOODBYE, PARKED_PATIENCE, STUCK

if TYPE_CHECKING:
    import socket

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes
_LOOK_AGAIN = 1.0

log = logging.getLogger(__name__)


class Workers:
    """Starts, watches and stops the workers of one generation at a time.

    `start` (or `launch`), then a WorkerEnded in the inbox for each worker that ends, and last
    WorkersGone, exactly once; `stop` and `kill` may be called at any time. What a worker leaves of
    its process group is killed as soon as it is dead. Workers that parked live on to the next
    `start`. The guardian is told of every process group.
    """

    def __init__(
        self,
        config: AgentConfig,
        logs: Logs,
        inbox: Inbox,
        tasks: Tasks,
        membership: Membership,
        guardian: Guardian,
    ) -> None:
        self.generation = 0
        self._config = config
        self._logs = logs
        self._inbox = inbox
        self._tasks = tasks
        self._membership = membership
        self._guardian = guardian
        self._starting = 0
        self._running: dict[int, Worker] = {}  # by pid, like the others
        self._parked: dict[int, Worker] = {}
        self._dead: dict[int, Worker] = {}  # something of their groups may still run
        self._groups = ProcessGroups(self._groups_emptied)
        self._stopping = False
        self._gone = True  # nothing of the generation runs, though some of it may be parked
        self._killed = False
        self._until_kill: asyncio.TimerHandle | None = None
        self._until_stuck: asyncio.TimerHandle | None = None
        self._until_unkillable: asyncio.TimerHandle | None = None
        self._parked_ended = asyncio.Event()
        self._explaining = 0  # failures whose cause is being read
        self._in_order = asyncio.Lock()
        self._channels = ChannelServer(self._heard)
        self._socket = self._channels.open()
        self._prefork: Prefork | None = None
        if config.prefork:
            env = common_env(os.environ, config.nproc)
            size = config.nproc + 1  # and a store server
            self._prefork = Prefork(config.argv, env, config.preload, size)
            self._prefork.start()
        self._store = StoreServer(tasks, self._prefork)
        self._listener: tuple[int, socket.socket] | None = None

    @property
    def pids(self) -> dict[int, int]:
        """{rank: pid} of the workers that run."""
        return {worker.spec.rank: worker.pid for worker in self._running.values()}

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups of all workers that live, parked ones too."""
        return (*self._running, *self._parked)

    async def warm(self) -> None:
        """Make everything ready that a start would otherwise wait for. Raises UsageError."""
        if self._prefork:
            await self._prefork.warm()

    def offer(self, generation: int, address: str) -> Master:
        """Bind a socket for the store of `generation`; gives its endpoint. Raises OSError."""
        if self._listener is None or self._listener[0] != generation:
            self._drop_listener()
            self._listener = (generation, bind(address)[0])
        return Master(address, self._listener[1].getsockname()[1])

    def start(self, lease: int, now: Round) -> None:
        """Start this node's workers of the final round `now`, or send on those that wait for it."""
        ranks = GroupRanks.of(now, lease)
        master = now.master
        assert master is not None
        if ranks.group_rank == 0 and self._listener and self._listener[0] == now.generation:
            self._store.serve(now.generation, self._listener[1])
            self._listener = None
        self._drop_listener()
        last = ranks.first_rank + ranks.local_world_size - 1
        log.info(
            "generation %d (%s): group rank %d of %d, ranks %d-%d of %d, master %s:%d",
            *(now.generation, now.reason, ranks.group_rank, ranks.group_world_size),
            *(ranks.first_rank, last, ranks.world_size, master.addr, master.port),
        )
        if ranks.local_world_size != self._config.nproc:
            wrong = (ranks.local_world_size, self._config.nproc)
            log.warning("the round says %d workers, this node has been given %d", *wrong)
        specs = [self._spec(now, ranks, local_rank) for local_rank in range(self._config.nproc)]
        self.launch(now.generation, specs, now.reason)

    def launch(self, generation: int, specs: Sequence[WorkerSpec], reason: str = "") -> None:
        """Start every worker; one that can't be started is told as an exit, like any other."""
        assert self._gone, "I3: older workers are alive"
        self.generation = generation
        self._gone = self._stopping = self._killed = False
        waiting, self._parked = self._parked, {}
        by_local_rank = {worker.spec.local_rank: worker for worker in waiting.values()}
        for spec in specs:
            worker = by_local_rank.pop(spec.local_rank, None)
            if worker is None or not self._resume(worker, spec, reason):
                self._starting += 1
                self._tasks.create(self._begin(spec))
        self._guard()
        self._settle_soon()

    def stop(self, grace: float, notice: Change | Interrupt | None = None) -> None:
        """Send SIGTERM now, SIGKILL after `grace` seconds. Of two calls the shorter grace counts.

        A worker that can park is given `notice`, if there is one, instead of SIGTERM.
        """
        if self._gone:  # WorkersGone is in the inbox
            return
        again, self._stopping = self._stopping, True
        for worker in self._running.values():
            told = notice and worker.channel and worker.channel.send(notice)
            if not told and not again:
                self._terminate(worker)
        self._settle_soon()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        if self._until_kill is None or end < self._until_kill.when():
            self._cancel_kill()
            if self._running:
                self._until_kill = loop.call_at(end, self.kill)
        if grace <= 0:
            self.kill()

    def kill(self) -> None:
        """SIGKILL the process group of every worker that still runs now."""
        self._cancel_kill()
        self._cancel_stuck()
        self._cancel_unkillable()
        self._stopping = self._killed = True
        for worker in self._running.values():
            worker.kill()
        self._settle_soon()

    async def end(self, reason: str) -> None:
        """Say goodbye to parked workers, and wait a moment for them to end by themselves."""
        for worker in self._parked.values():
            if worker.channel is None or not worker.channel.send(Bye(reason)):
                self._terminate(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                while self._parked:
                    self._parked_ended.clear()
                    await self._parked_ended.wait()

    def close(self) -> None:
        """Kill what is left. The ordinary end is `stop`, and then WorkersGone."""
        self.kill()
        for worker in self._parked.values():
            worker.kill()
        if self._prefork:
            self._prefork.close()
        self._channels.close()
        self._store.close()
        self._drop_listener()

    # --- starting -------------------------------------------------------------------------

    def _spec(self, now: Round, ranks: GroupRanks, local_rank: int) -> WorkerSpec:
        rank = ranks.first_rank + local_rank
        error_file = self._logs.error_file(now.generation, rank)
        env = worker_env(
            os.environ,
            self._config,
            now,
            ranks,
            local_rank,
            error_file=error_file,
            socket=self._socket,
        )
        argv = tuple(substitute(self._config.argv, local_rank))
        return WorkerSpec(argv, env, rank, local_rank, error_file)

    def _resume(self, worker: Worker, spec: WorkerSpec, reason: str) -> bool:
        """Whether a parked worker could be sent on."""
        if worker.resume(spec, self.generation, reason):
            self._logs.move(worker.output, self.generation, spec.rank, spec.local_rank)
            self._running[worker.pid] = worker
            return True
        worker.kill()
        self._parked[worker.pid] = worker  # until it is reaped
        return False

    async def _begin(self, spec: WorkerSpec) -> None:
        """Start one worker; `_starting` counts it until now."""
        try:
            output = self._logs.worker(self.generation, spec.rank, spec.local_rank)
        except OSError as error:
            self._not_started(spec, error)
            return
        try:
            process = await self._fork_or_execute(spec, output)
        except OSError as error:
            output.begin()
            output.close()
            self._not_started(spec, error)
            return
        output.begin()
        self._starting -= 1
        worker = Worker(spec, output, process, self._ended)
        self._running[worker.pid] = worker
        self._guard()
        if self._stopping:  # asked for before it was there
            worker.kill()

    async def _fork_or_execute(self, spec: WorkerSpec, output: WorkerLog) -> Process:
        if self._prefork and self._prefork.ready:
            out, err = output.out.child_fd, output.err.child_fd
            try:
                return await self._prefork.fork(spec.argv, spec.env, out, err)
            except OSError as error:
                log.debug("no fork of rank %d: %s", spec.rank, error)
        return execute(spec, output)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        message = f"can't start {spec.argv[0]}: {error.strerror}"
        self._starting -= 1
        self._report(spec, 0, code, 0.0, message)
        self._settle_soon()

    def _terminate(self, worker: Worker) -> None:
        """SIGTERM: a script decides for what it has started, a shell would hand nothing on."""
        worker.terminate(group=self._config.no_python)

    # --- the ends of workers --------------------------------------------------------------

    def _ended(self, worker: Worker, code: int) -> None:
        self._dead[worker.pid] = worker
        self._groups.add(worker.pid)
        if self._parked.pop(worker.pid, None):
            self._parked_ended.set()
            log.debug("worker %d ended at the barrier: %d", worker.spec.rank, code)
            self._guard()
            return
        del self._running[worker.pid]
        self._guard()
        log.debug("worker %d exited %d after %.1f s", worker.spec.rank, code, worker.uptime)
        if code:
            self._explaining += 1
            self._tasks.create(self._explain(worker, code, worker.uptime))
        else:
            self._report(worker.spec, worker.pid, code, worker.uptime, "")

    async def _explain(self, worker: Worker, code: int, uptime: float) -> None:
        """Report a failure with its cause, which may lie on a disk that stands still.

        WorkersGone waits for it, so that it is still of this generation; I3 bears any delay of
        that. Failures are told in their order, because the first one is the culprit's.
        """
        spec, tail = worker.spec, worker.output.err.tail()
        reading = begin(partial(failure_message, code, spec.error_file, tail))
        async with self._in_order:
            await asyncio.wait({reading}, timeout=ERROR_FILE)
            known = reading.done()
            message = reading.result() if known else failure_message(code, "", tail)
            if not known:
                log.warning("rank %d: no answer from the disk of %s", spec.rank, spec.error_file)
            by_peer = ends_with_lost_peer(message)
            self._report(spec, worker.pid, code, uptime, message, by_peer=by_peer)
        self._explaining -= 1
        self._settle()

    def _report(
        self,
        spec: WorkerSpec,
        pid: int,
        code: int,
        uptime: float,
        message: str,
        *,
        by_peer: bool = False,
    ) -> None:
        failure = Failure(
            node=self._config.node,
            rank=spec.rank,
            local_rank=spec.local_rank,
            pid=pid,
            code=code,
            uptime=round(uptime, 3),
            message=message,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        self._inbox.put(WorkerEnded(self.generation, failure if code else None, by_peer))

    def _groups_emptied(self, groups: Collection[int]) -> None:
        for group in groups:
            self._dead.pop(group).output.close()
        self._settle()

    def _settle_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Say it when nothing of the generation is left."""
        self._expect_the_end_of_the_killed()
        self._expect_the_end_of_all()
        if self._running or self._groups or self._starting or self._explaining:
            return
        self._cancel_kill()
        held = self._parked and not self._stopping  # its generation may still go on without it
        if not (held or self._gone):
            self._gone = True
            self._guard()
            self._inbox.put(WorkersGone(self.generation))

    def _expect_the_end_of_the_killed(self) -> None:
        """Once for all that was killed and is still there; when it is gone, forget that."""
        if not (self._groups or (self._killed and self._running)):
            self._cancel_stuck()
        elif self._until_stuck is None:
            loop = asyncio.get_running_loop()
            self._until_stuck = loop.call_later(STUCK, self._tell_stuck)

    def _expect_the_end_of_all(self) -> None:
        """Give up some time after the last SIGKILL of a generation that has to end."""
        all_killed = self._killed or not self._running
        left = self._running or self._groups
        if not (self._stopping and all_killed and left):
            self._cancel_unkillable()
        elif self._until_unkillable is None:
            loop = asyncio.get_running_loop()
            self._until_unkillable = loop.call_later(self._config.kill_timeout, self._look_again)

    def _look_again(self) -> None:
        """An agent that stood still meanwhile has to see first what has ended."""
        loop = asyncio.get_running_loop()
        self._until_unkillable = loop.call_later(_LOOK_AGAIN, self._inbox.put, Unkillable())

    def _cancel_unkillable(self) -> None:
        if self._until_unkillable is not None:
            self._until_unkillable.cancel()
            self._until_unkillable = None

    def _cancel_kill(self) -> None:
        if self._until_kill is not None:
            self._until_kill.cancel()
            self._until_kill = None

    def _cancel_stuck(self) -> None:
        if self._until_stuck is not None:
            self._until_stuck.cancel()
            self._until_stuck = None

    def _tell_stuck(self) -> None:
        killed = self._running.values() if self._killed else ()
        ranks = [worker.spec.rank for worker in (*killed, *self._dead.values())]
        log.warning(
            "generation %d: processes of rank %s are still there %d s after SIGKILL, stuck in the "
            "kernel (a hung device or network file system?); this node waits for them",
            self.generation, ", ".join(map(str, ranks)), STUCK,
        )  # fmt: skip

    # --- what workers say -----------------------------------------------------------------

    def _heard(self, channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        """Take a message of a worker; one of an older generation is ignored."""
        if isinstance(message, AskCurrent):
            self._tasks.create(self._answer(channel, message.id))
            return
        worker = self._find(channel)
        if worker is None:
            log.debug("process %d is no worker of this node", channel.pid)
            return
        match message:
            case Elastic():
                worker.channel = channel
            case Disconnected() if worker.channel is channel:
                worker.channel = None
            case Parked(generation, error) if generation == self.generation:
                self._park(worker, error)

    def _find(self, channel: WorkerChannel) -> Worker | None:
        """The worker at the other end: the process itself, or one that it has started."""
        known = [*self._running.values(), *self._parked.values()]
        by_pid = (worker for worker in known if worker.pid == channel.pid)
        of_now = known if channel.generation == self.generation else []
        by_rank = (worker for worker in of_now if worker.spec.local_rank == channel.local_rank)
        return next(by_pid, None) or next(by_rank, None)

    def _park(self, worker: Worker, error: str) -> None:
        """`worker` waits at the barrier; `error` is why, if nobody has asked it to."""
        if self._running.pop(worker.pid, None) is None:
            return
        self._parked[worker.pid] = worker
        if not self._stopping:
            why = error or "it left its generation without being asked to"
            patience = self._config.lease_ttl + PARKED_PATIENCE
            loop = asyncio.get_running_loop()
            loop.call_later(patience, self._waited, worker, self.generation, why)
        self._settle_soon()

    def _waited(self, worker: Worker, generation: int, why: str) -> None:
        """Nobody else had a reason for a new generation: what the worker met is the failure."""
        of_now = generation == self.generation and not self._stopping
        if of_now and worker.pid in self._parked:
            message = f"it lost its peers: {why}"
            self._report(worker.spec, worker.pid, 1, worker.uptime, message)

    async def _answer(self, channel: WorkerChannel, number: int) -> None:
        current, why = await self._membership.current(channel.generation)
        channel.send(Current(number, current, why))

    # --- and the rest ---------------------------------------------------------------------

    def _guard(self) -> None:
        self._guardian.guard(groups=self.groups)

    def _drop_listener(self) -> None:
        if self._listener:
            self._listener[1].close()
            self._listener = None
