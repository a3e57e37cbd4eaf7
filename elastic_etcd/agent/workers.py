"""All that runs on this node for the job: its workers, and the store where it is group rank 0.

An exit is an event, never found by polling. I3 rests on WorkersGone: it comes when nothing of any
worker's process group runs any more, not when the leaders are gone. A worker that waits at the
barrier without a process group of torch's (it is parked) counts as gone.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.config import AgentConfig, substitute
from elastic_etcd.agent.environment import common_env, worker_env
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.file_timers import FileTimerRequest, FileTimers
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import Inbox, Tasks, Unkillable
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.output.logs import Logs, WorkerLog
from elastic_etcd.agent.prefork import Prefork, saved_by_preload
from elastic_etcd.agent.store import StoreServer, bind
from elastic_etcd.agent.worker import Worker, WorkerSpec, execute, through_run_script
from elastic_etcd.core import stragglers
from elastic_etcd.core.lifecycle import (
    WorkerEnded,
    WorkersElastic,
    WorkersFinished,
    WorkersGone,
    WorkersHang,
)
from elastic_etcd.core.peers import ends_with_lost_peer
from elastic_etcd.core.schema import Failure, Limits, Master, Participant, Round
from elastic_etcd.protocol.activity import Activity, ActivityPage, ActivityPages
from elastic_etcd.protocol.messages import (
    AskCurrent,
    Bye,
    Change,
    Current,
    Disconnected,
    Elastic,
    Finished,
    FromWorker,
    Imported,
    Interrupt,
    Parked,
)
from elastic_etcd.system.exits import Process
from elastic_etcd.system.groups import ProcessGroups
from elastic_etcd.system.leftovers import Leftovers, Mark, end_former_agents_leftovers
from elastic_etcd.system.threads import begin
from elastic_etcd.times import ERROR_FILE, GOODBYE, PARKED_PATIENCE, STUCK

if TYPE_CHECKING:
    import socket

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes
_LOOK_AGAIN = 1.0
_LATE = 10.0  # seconds until it is told who does not stop; then after twice as long, and so on
_ENDING = 1.0  # from the end of a worker's connection to its own, if it ends

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
        memory: str = "",
        folder: str = "",
    ) -> None:
        self.generation = 0
        self._config = config
        self._logs = logs
        self._inbox = inbox
        self._tasks = tasks
        self._membership = membership
        self._guardian = guardian
        self._memory = memory
        alone = config.nproc == 1 and config.limits.max_nodes == 1
        self._at_terminal = alone and os.isatty(0) and os.isatty(1)
        self._starting = 0
        self._running: dict[int, Worker] = {}  # by pid, like the others
        self._parked: dict[int, Worker] = {}
        self._dead: dict[int, Worker] = {}  # something of their groups may still run
        self._groups = ProcessGroups(self._groups_emptied)
        self._stopping = False
        self._patient = False  # they stop when their step is over
        self._elastic = False  # all of the generation's workers recover in process
        self._finished = False  # some of them have left their worlds
        self._gone = True  # nothing of the generation runs, though some of it may be parked
        self._until_kill: asyncio.TimerHandle | None = None
        self._until_late: asyncio.TimerHandle | None = None
        self._until_stuck: asyncio.TimerHandle | None = None
        self._until_unkillable: asyncio.TimerHandle | None = None
        self._parked_ended = asyncio.Event()
        self._explaining = 0  # failures whose cause is being read
        self._in_order = asyncio.Lock()
        self._channels = ChannelServer(self._heard)
        self._socket = self._channels.open(folder)
        self._timers: FileTimers | None = None
        self._pages = ActivityPages()
        self._mark = Mark.own(config.node, config.job)
        self._leftovers = Leftovers(self._mark)
        self._sweeping = self._swept = False  # for leftovers, when all else has gone
        self._launches = 0
        self._times_imports = True  # of a restart, until a worker has told them
        self._prefork: Prefork | None = None
        if config.prefork:
            env = common_env(os.environ, config.nproc, str(self._mark))
            size = config.nproc + 1  # and a store server
            self._prefork = Prefork(config.argv, env, config.preload, size, tasks.create)
            self._prefork.start()
        self._store = StoreServer(tasks, self._prefork, self._store_lost)
        self._listener: tuple[int, socket.socket] | None = None
        self._interface = ""  # which has this node's address for the others

    @property
    def pids(self) -> dict[int, int]:
        """{rank: pid} of the workers that run."""
        return {worker.spec.rank: worker.pid for worker in self._running.values()}

    def activities(self) -> list[tuple[Worker, Activity]]:
        """The workers that run, with what they say that they do."""
        running = self._running.values()
        return [(worker, self._pages.read(worker.spec.local_rank)) for worker in running]

    @property
    def pages(self) -> tuple[ActivityPage, ...]:
        """What the workers of this generation write what they do on, also those that have ended."""
        return self._pages.all()

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups of all workers that live, parked ones too."""
        return (*self._running, *self._parked)

    @property
    def finished(self) -> bool:
        """Whether some that run have left their worlds: they do what comes after the training."""
        return any(worker.finished for worker in self._running.values())

    async def alone(self) -> None:
        """Wait until nothing is left of an agent of this node that has died.

        Raises ElasticEtcdError when that takes longer than the kernel should.
        """
        await end_former_agents_leftovers(self._mark, self._config.kill_timeout)

    async def warm(self) -> None:
        """Make everything ready that a start would otherwise wait for. Raises UsageError."""
        if self._config.timer_file is not None:
            path = self._config.timer_file or str(Path(self._socket).with_name("timers"))
            self._timers = FileTimers(path, self._timer_expired)
        if self._prefork:
            await self._prefork.warm()

    def offer(self, generation: int, reached: Reached) -> Master:
        """Bind a socket for the store of `generation`; gives its endpoint. Raises OSError."""
        if self._listener is None or self._listener[0] != generation:
            self._drop_listener()
            self._interface = reached.interface
            self._listener = (generation, bind(reached.address)[0])
        return Master(reached.address, self._listener[1].getsockname()[1])

    def tell_leaving(self) -> None:
        """From now on workers that ask are told that this node leaves."""
        self._channels.leaving = True

    def start(self, now: Round, part: Participant, limits: Limits) -> None:
        """Start this node's workers of the final round `now`, or send on those that wait for it.

        The node is participant `part` of it; `limits` are the job's.
        """
        master = now.master
        assert master is not None
        if part.group_rank == 0 and self._listener and self._listener[0] == now.generation:
            self._store.serve(now.generation, self._listener[1])
            self._listener = None
        self._drop_listener()
        last = part.first_rank + part.nproc - 1
        log.info(
            "generation %d (%s): group rank %d of %d, ranks %d-%d of %d, master %s:%d",
            *(now.generation, now.reason, part.group_rank, now.nodes),
            *(part.first_rank, last, now.world_size, master.addr, master.port),
        )
        if part.nproc != self._config.nproc:
            wrong = (part.nproc, self._config.nproc)
            log.warning("the round says %d workers, this node has been given %d", *wrong)
        specs = [self._spec(now, part, limits, n) for n in range(self._config.nproc)]
        self.launch(now.generation, specs, now.reason)

    def launch(self, generation: int, specs: Sequence[WorkerSpec], reason: str = "") -> None:
        """Start every worker; one that can't be started is told as an exit, like any other."""
        assert self._gone, "I3: older workers are alive"
        self.generation, self._channels.reason = generation, reason
        self._launches += 1
        self._gone = self._stopping = False
        self._elastic = self._finished = self._patient = self._swept = False
        waiting, self._parked = self._parked, {}
        by_local_rank = {worker.spec.local_rank: worker for worker in waiting.values()}
        for spec in specs:
            worker = by_local_rank.pop(spec.local_rank, None)
            if worker is None or not self._resume(worker, spec, reason):
                self._starting += 1
                self._tasks.create(self._begin(spec))
        self._tell_elastic()
        self._guard()
        self._settle_soon()

    def stop(
        self,
        grace: float | None,
        notice: Change | Interrupt | None = None,
        park: float | None = None,
    ) -> None:
        """Send SIGTERM now, SIGKILL after `grace` seconds. Of two calls the shorter grace counts.

        A worker that can park is given `notice`, if there is one, instead of SIGTERM, and has
        `park` seconds, if they are given. Without a `grace` the others get nothing, and all of
        them have the time that they need.
        """
        if self._gone:  # WorkersGone is in the inbox
            return
        again = self._stopping and not self._patient
        self._stopping, self._patient = True, grace is None
        for worker in self._running.values():
            told = notice is not None and worker.tell(notice)
            if not told and not again and grace is not None:
                self._terminate(worker)
            seconds = park if told and park is not None else grace
            if seconds is not None:
                worker.give(seconds)
        self._settle_soon()
        if notice:
            self._expect_stop(notice, _LATE)
        if grace is not None:
            self._kill_late(asyncio.get_running_loop().time())

    def _expect_stop(self, notice: Change | Interrupt, seconds: float) -> None:
        """After so many seconds say who has not stopped; and again, if it takes longer still."""
        self._cancel_late()
        loop = asyncio.get_running_loop()
        self._until_late = loop.call_later(seconds, self._tell_late, notice, seconds)

    def _tell_late(self, notice: Change | Interrupt, seconds: float) -> None:
        reason, finished = notice.reason, self._ranks(finished=True)
        if late := self._ranks(finished=False):
            what = "no state.check()" if isinstance(notice, Change) else "not out of its step"
            why = "they are waited for" if self._patient else "they will be killed"
            log.warning("%s: rank %s: %s for %g s; %s", reason, late, what, seconds, why)
        if finished:
            log.info("%s: rank %s: still at work after its training", reason, finished)
        if late or finished:
            self._expect_stop(notice, 2 * seconds)

    def _ranks(self, *, finished: bool) -> str:
        """Of the workers that run, and were told to park or can't be told."""
        workers = sorted(self._running.values(), key=lambda worker: worker.spec.rank)
        told = [w for w in workers if w.finished == finished and (finished or w.channel)]
        return ", ".join(str(worker.spec.rank) for worker in told)

    def _kill_late(self, now: float) -> None:
        """SIGKILL to those that have used up their grace, and wait for the next one's end."""
        self._cancel_kill()
        waiting = [worker for worker in self._running.values() if not worker.killed]
        late = [worker for worker in waiting if worker.end <= now]
        for worker in late:
            if worker.channel and not worker.finished:
                rank = worker.spec.rank
                log.warning("rank %d: not stopped within %g s: SIGKILL", rank, worker.grace)
            worker.kill()
        if late == waiting:
            if late:
                self.kill()
            return
        end = min(worker.end for worker in waiting if worker not in late)
        self._until_kill = asyncio.get_running_loop().call_at(end, self._kill_late, end)
        self._settle_soon()

    def _killed(self) -> list[Worker]:
        """Those that are still there."""
        return [worker for worker in self._running.values() if worker.killed]

    def give_up(self, rank: int | None, hang: str, message: str, *, kill: bool = True) -> None:
        """End the generation as hanging. The failure is that of `rank`; None: of no worker.

        `hang` says what hangs, `message` is shown with it. That worker is killed at once, unless
        `kill` is false; all others get their grace, as after any failure.
        """
        worker = next((w for w in self._running.values() if w.spec.rank == rank), None)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        failure = Failure("", 0, 0, 0, 0, self._uptime, message, at, hang)
        if worker:
            spec, node = worker.spec, self._config.node
            ids = {"rank": spec.rank, "local_rank": spec.local_rank, "pid": worker.pid}
            failure = replace(failure, node=node, **ids)
            if kill:
                worker.kill()
        self._inbox.put(WorkersHang(self.generation, failure))

    def _timer_expired(self, session: int, timer: FileTimerRequest, seconds: float) -> None:
        """The script itself has said that it hangs then, and by which signal it is to end."""
        worker = self._running.get(session)
        if worker is None or worker.killed:
            return
        rank, scope = worker.spec.rank, timer.scope_id
        why = f"rank {rank} on {self._config.node}: timer {scope!r} expired after {seconds:.1f} s"
        if timer.signal <= 0:
            log.warning("%s; it has no signal, so nothing is ended", why)
            return
        log.warning("%s: signal %d to process %d", why, timer.signal, timer.pid)
        kill = timer.signal == signal.SIGKILL
        if not kill:
            with contextlib.suppress(OSError):
                os.kill(timer.pid, timer.signal)
        self.give_up(rank, why, "", kill=kill)

    def _store_lost(self, generation: int, why: str) -> None:
        """End a world whose workers may not have come to it yet: they would try for half an hour.

        Those that have trained a step have all been there, and can do without it.
        """
        of_now = generation == self.generation and not (self._gone or self._stopping)
        if of_now and not all(page.read().steps for page in self.pages):
            self.give_up(None, why, "")

    @property
    def _uptime(self) -> float:
        return round(max((w.uptime for w in self._running.values()), default=0.0), 3)

    def kill(self) -> None:
        """SIGKILL the process group of every worker that still runs now."""
        self._cancel_kill()
        self._cancel_late()
        self._cancel_stuck()
        self._cancel_unkillable()
        self._stopping = True
        for worker in self._running.values():
            worker.kill()
        self._settle_soon()

    async def end(self, reason: str) -> None:
        """Say goodbye to parked workers, and wait a moment for them to end by themselves."""
        if not self._parked:
            return
        for worker in self._parked.values():
            if worker.channel is None or not worker.channel.send(Bye(reason)):
                self._terminate(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                while self._parked:
                    self._parked_ended.clear()
                    await self._parked_ended.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.kill_timeout):
                await self._leftovers.end(self.generation)

    def close(self) -> None:
        """Kill what is left. The ordinary end is `stop`, and then WorkersGone."""
        self.kill()
        for worker in self._parked.values():
            worker.kill()
        if self._prefork:
            self._prefork.close()
        if self._timers:
            self._timers.close()
        self._channels.close()
        self._pages.close()
        self._store.close()
        self._drop_listener()

    # --- starting -------------------------------------------------------------------------

    def _spec(self, now: Round, part: Participant, limits: Limits, local_rank: int) -> WorkerSpec:
        rank = part.first_rank + local_rank
        error_file = self._logs.error_file(now.generation, rank)
        env = worker_env(
            os.environ,
            self._config,
            now,
            part,
            limits,
            local_rank,
            error_file=error_file,
            interface=self._interface,
            socket=self._socket,
            activity=self._pages.begin(local_rank, measured=stragglers.are_told(limits, now)),
            mark=str(self._mark),
            memory=self._memory,
            timer_file=self._timers.path if self._timers else "",
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
            output = self._logs.worker(
                self.generation, spec.rank, spec.local_rank, at_terminal=self._at_terminal
            )
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
                times = self._times_imports and self._launches > 1 and spec.local_rank == 0
                return await self._prefork.fork(
                    spec.argv, spec.env, out, err, output.stdin, time_imports=times
                )
            except OSError as error:
                log.debug("no fork of rank %d: %s", spec.rank, error)
        scripted = not self._config.no_python and spec.argv[1:2] == ("-u",)  # as launch.py has it
        argv = through_run_script(spec.argv) if scripted else spec.argv
        return await execute(argv, spec.env, output)

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
        if self._timers:
            self._timers.forget(worker.pid)
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
                reading.cancel()
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
        self._cancel_late()
        held = self._parked and not self._stopping  # its generation may still go on without it
        if held or self._gone or self._sweeping:
            return
        if not (self._parked or self._swept):  # what a parked one has started lives on with it
            self._sweeping = True
            self._tasks.create(self._sweep())
            return
        self._gone = True
        self._guard()
        self._inbox.put(WorkersGone(self.generation))

    async def _sweep(self) -> None:
        """End what has left its process group: only then is nothing of the generation left."""
        await self._leftovers.end(self.generation)
        self._sweeping, self._swept = False, True
        self._settle()

    def _expect_the_end_of_the_killed(self) -> None:
        """Once for all that was killed and is still there; when it is gone, forget that."""
        if not (self._groups or self._killed()):
            self._cancel_stuck()
        elif self._until_stuck is None:
            loop = asyncio.get_running_loop()
            self._until_stuck = loop.call_later(STUCK, self._tell_stuck)

    def _expect_the_end_of_all(self) -> None:
        """Give up some time after the last SIGKILL of a generation that has to end."""
        all_killed = len(self._killed()) == len(self._running)
        left = self._running or self._groups or self._sweeping
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

    def _cancel_late(self) -> None:
        if self._until_late is not None:
            self._until_late.cancel()
            self._until_late = None

    def _cancel_stuck(self) -> None:
        if self._until_stuck is not None:
            self._until_stuck.cancel()
            self._until_stuck = None

    def _tell_stuck(self) -> None:
        ranks = [worker.spec.rank for worker in (*self._killed(), *self._dead.values())]
        log.warning(
            "generation %d: processes of rank %s are still there %d s after SIGKILL, stuck in the "
            "kernel (a hung device or network file system?); this node waits for them",
            self.generation, ", ".join(map(str, ranks)), STUCK,
        )  # fmt: skip

    # --- what workers say -----------------------------------------------------------------

    def _heard(self, channel: WorkerChannel, message: FromWorker | Disconnected) -> None:
        """Take a message of a worker; one of an older generation is ignored."""
        if isinstance(message, AskCurrent):
            self._tasks.create(self._answer_current(channel, message.id))
            return
        worker = self._find(channel)
        if worker is None:
            log.debug("process %d is no worker of this node", channel.pid)
            return
        match message:
            case Elastic():
                worker.channel, worker.finished = channel, False
                self._tell_elastic()
            case Finished():
                worker.finished = True
                self._tell_elastic()
                if self._stopping and not self._patient:
                    self._terminate(worker)  # it has not heard what it was told
            case Disconnected() if worker.channel is channel:
                worker.channel = None
                # It may be at its end, which says more.
                asyncio.get_running_loop().call_later(_ENDING, self._tell_elastic)
            case Parked(generation, error) if generation == self.generation:
                self._park(worker, error)
            case Imported(seconds) if self._times_imports:
                self._times_imports = False
                if line := saved_by_preload(seconds):
                    log.info("%s", line)

    def _find(self, channel: WorkerChannel) -> Worker | None:
        """The worker at the other end: the process itself, or one that it has started."""
        known = [*self._running.values(), *self._parked.values()]
        by_pid = (worker for worker in known if worker.pid == channel.pid)
        of_now = known if channel.generation == self.generation else []
        by_rank = (worker for worker in of_now if worker.spec.local_rank == channel.local_rank)
        return next(by_pid, None) or next(by_rank, None)

    def _tell_elastic(self) -> None:
        """Say it when it has changed; one that has finished has all the time of one that parks."""
        workers = self._running.values()
        parks = [worker.channel is not None or worker.finished for worker in workers]
        if self.finished != self._finished:
            self._finished = self.finished
            self._inbox.put(WorkersFinished(self.generation, self._finished))
        elastic = not self._starting and bool(parks) and all(parks)
        if elastic != self._elastic:
            self._elastic = elastic
            self._inbox.put(WorkersElastic(self.generation, elastic))

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

    async def _answer_current(self, channel: WorkerChannel, number: int) -> None:
        current, why = await self._membership.current(channel.generation)
        channel.send(Current(number, current, why))

    # --- and the rest ---------------------------------------------------------------------

    def _guard(self) -> None:
        self._guardian.guard(groups=tuple(self._running), parked=tuple(self._parked))

    def _drop_listener(self) -> None:
        if self._listener:
            self._listener[1].close()
            self._listener = None
