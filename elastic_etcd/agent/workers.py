"""All that runs on this node for the job: its workers, and the store where it is group rank 0.

An exit is an event, never found by polling. How a generation ends is in termination.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.agent.config import AgentConfig, substitute
from elastic_etcd.agent.directories import LOOK
from elastic_etcd.agent.environment import common_env, worker_env
from elastic_etcd.agent.failures import failure_message
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.output.logs import Logs, WorkerLog
from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.agent.store import StoreServer, check_store
from elastic_etcd.agent.termination import Asked, Termination
from elastic_etcd.agent.worker import Worker, WorkerSpec, execute, through_run_script
from elastic_etcd.core.lifecycle import (
    WorkerEnded,
    WorkersDiverged,
    WorkersElastic,
    WorkersFinished,
    WorkersHang,
)
from elastic_etcd.core.peers import LOST, blames_peers, ends_with_lost_peer, was_left
from elastic_etcd.core.schema import Failure, Limits, Master, Participant, Round, TrainingPlace
from elastic_etcd.core.words import signal_name
from elastic_etcd.errors import UsageError
from elastic_etcd.protocol import messages
from elastic_etcd.protocol.activity import Activity, ActivityPage, ActivityPages
from elastic_etcd.system.child_process import Process
from elastic_etcd.system.leftovers import (
    Mark,
    end_former_agents_leftovers,
    end_late,
    end_leftovers,
    kill_marked,
)
from elastic_etcd.system.limits import oom_kills
from elastic_etcd.system.processes import kill_members, wait_until_gone
from elastic_etcd.system.threads import begin, in_thread
from elastic_etcd.times import ERROR_FILE, GOODBYE, KILLED, LEFTOVERS, PARKED_PATIENCE

if TYPE_CHECKING:
    from elastic_etcd.agent.file_timers import Expired, FileTimers

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # a shell's exit codes
_ENDING = 1.0  # from the end of a worker's connection to its own, if it ends

log = logging.getLogger(__name__)


class Workers:
    """Starts, watches and stops the workers of one generation at a time.

    `start` (or `launch`), then a WorkerEnded in the inbox for each worker that ends, and last
    WorkersGone, exactly once; `stop` may be called at any time. The rest of a worker's
    process group is killed as soon as it is dead. Workers that parked live on to the next `start`.
    The guardian is told of every process group.
    """

    def __init__(
        self,
        config: AgentConfig,
        logs: Logs,
        tasks: Tasks,
        membership: Membership,
        guardian: Guardian,
        folder: str = "",
        memory: str = "",
    ) -> None:
        self.generation = 0
        self._config = config
        self._logs = logs
        self._inbox = tasks.inbox
        self._tasks = tasks
        self._membership = membership
        self._folder, self._memory = folder, memory
        one_node = config.limits.max_nodes == 1
        self._stdin = 0 if one_node else subprocess.DEVNULL
        self._at_terminal = one_node and config.nproc == 1 and os.isatty(0) and os.isatty(1)
        self._starting = False
        self._early: list[tuple[WorkerChannel, messages.Heard]] = []  # while it starts
        self._running: dict[int, Worker] = {}  # by pid
        self._parked: dict[int, Worker] = {}
        self._parked_ended = asyncio.Event()
        self._ends: list[tuple[Worker, int]] = []  # and exit codes, in this generation
        self._elastic = False  # all of the generation's workers recover in process
        self._finished = False  # some of them have left their worlds
        self._in_order = asyncio.Lock()  # the failures whose cause is being read
        self._mark = Mark.own(config.node, config.job)
        self._termination = Termination(
            config.kill_timeout, tasks, guardian, self._mark, self._running, self._parked
        )
        self._channels = ChannelServer(self._take_message)
        self._channels.open()
        self._timers: FileTimers | None = None
        self._pages = ActivityPages()
        self._oom_kills = 0
        self._prefork: Prefork | None = None
        if config.prefork:
            env = common_env(os.environ, config.nproc, str(self._mark))
            size = config.nproc + 1  # and a store server
            self._prefork = Prefork(config.argv, env, config.preload, size, tasks.create)
            self._prefork.start()
        self._cpus: list[str] = []  # of each local rank, if not all
        self._store = StoreServer(tasks, self._prefork, self._store_lost)
        self._interface = ""  # which has this node's address for the others

    def activities(self) -> list[tuple[Worker, Activity]]:
        """The workers that run, with what they say that they do."""
        running = self._running.values()
        return [(worker, self._pages.read(worker.spec.local_rank)) for worker in running]

    @property
    def pages(self) -> tuple[ActivityPage, ...]:
        """On which the workers of this generation write what they do, also if they have ended."""
        return self._pages.all()

    @property
    def finished(self) -> bool:
        """Whether some that run have left their worlds: they do what comes after the training."""
        return any(worker.finished for worker in self._running.values())

    async def end_former_agents_leftovers(self) -> None:
        """Wait until they are gone. Raises ElasticEtcdError when the kernel takes too long."""
        await end_former_agents_leftovers(self._mark, self._config.kill_timeout)

    async def prestart(self) -> None:
        """Make everything ready that a start would otherwise wait for. Raises ElasticEtcdError."""
        if mode := self._config.numa_binding:
            from elastic_etcd.agent.devices import cpus_near_gpus  # noqa: PLC0415 - as above

            self._cpus = await begin(partial(cpus_near_gpus, mode, self._config.nproc))
        if self._prefork:
            await self._prefork.imported()
            if self._prefork.lacks_torch:  # which the script may not need, but the store does
                await check_store()
        if self._config.timer_file is not None:
            from elastic_etcd.agent import file_timers  # noqa: PLC0415 - only if they are asked for

            path = self._config.timer_file or f"{self._folder}/timers"
            self._timers = file_timers.FileTimers(path, self._timer_expired)
            await self._timers.serve(self._prefork)

    def offer(self, generation: int, reached: Reached) -> Master:
        """Bind a socket for the store of `generation`; gives its endpoint. Raises OSError."""
        self._interface = reached.interface
        return Master(reached.address, self._store.offer(generation, reached.address))

    def tell_leaving(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Answer from now on that this node leaves, when a worker asks.

        `number` is the signal on which it leaves: those that can't park get it, too.
        """
        self._channels.leaving = True
        self._termination.signal = number

    def start(self, now: Round, part: Participant, limits: Limits) -> None:
        """Start this node's workers of the final round `now`, or send on those that wait for it.

        The node is participant `part` of it; `limits` are the job's.
        """
        master = now.master
        assert master is not None
        self._store.begin(now.generation, here=part.group_rank == 0)
        log.debug("generation %d: master %s:%d", now.generation, master.addr, master.port)
        if part.nproc != self._config.nproc:
            wrong = (part.nproc, self._config.nproc)
            log.warning("the round says %d workers, this node has been given %d", *wrong)
        specs = [self._spec(now, part, limits, n) for n in range(self._config.nproc)]
        self.launch(now.generation, specs, now.reason)

    def launch(self, generation: int, specs: Sequence[WorkerSpec], reason: str = "") -> None:
        """Start every worker. A start that fails is reported as an exit, like any other."""
        self._termination.begin(generation)
        self.generation, self._channels.reason = generation, reason
        self._oom_kills = oom_kills()
        self._ends.clear()
        self._elastic = self._finished = False
        waiting = {worker.spec.local_rank: worker for worker in self._parked.values()}
        self._parked.clear()
        missing = []
        for spec in specs:
            worker = waiting.get(spec.local_rank)
            if worker is None or not self._resume(worker, spec, reason):
                missing.append(spec)
        self._starting = bool(missing)
        if missing:
            self._termination.wait_for(self._start_workers, missing)
        self._tell_elastic()
        self._termination.guard()
        self._termination.settle_soon()

    def stop(
        self,
        grace: float | None,
        notice: messages.Change | messages.Interrupt | None = None,
        park: float | None = None,
    ) -> None:
        """Send SIGTERM now, SIGKILL after `grace` seconds. The shorter grace of two calls counts.

        A node that leaves sends the signal of `tell_leaving` in place of SIGTERM. A worker that can
        park is given `notice`, if there is one, instead, and has `park` seconds, if they are given.
        Without a `grace` the others get nothing, and all of them have the time that they need.
        """
        self._termination.stop(grace, notice, park)

    def give_up(
        self, rank: int | None, hang: str, message: str, *, node: str = "", kill: bool = True
    ) -> None:
        """End the generation as hanging. The failure is that of `rank`; None: of no worker.

        Then it may be that of `node`, or nobody's.

        `hang` says what hangs, `message` is shown with it. That worker is killed at once, unless
        `kill` is false; all others get their grace, as after any failure.
        """
        worker = next((w for w in self._running.values() if w.spec.rank == rank), None)
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        uptime = max((w.uptime for w in self._running.values()), default=0.0)
        step = max((now.steps + 1 for _, now in self.activities() if now.steps), default=UNSET)
        failure = Failure(node, 0, 0, 0, 0, round(uptime, 3), message, at, hang, step)
        if worker:
            spec, node = worker.spec, self._config.node
            ids = {"rank": spec.rank, "local_rank": spec.local_rank, "pid": worker.pid}
            failure = replace(failure, node=node, place=self._place(spec.local_rank), **ids)
            if kill:
                worker.kill()
        self._inbox.put(WorkersHang(self.generation, failure))

    def _timer_expired(self, timer: "Expired") -> None:
        """By its own timer a script hangs, and is to end by the timer's signal."""
        worker = None
        with contextlib.suppress(OSError):  # it has ended
            worker = self._running.get(os.getsid(timer.pid))
        if worker is None or worker.killed:
            return
        rank = worker.spec.rank
        why = f"rank {rank} on {self._config.node}: timer {timer.scope!r} expired"
        if timer.signal <= 0:
            log.warning("%s; it has no signal, so nothing is ended", why)
            return
        log.warning("%s: %s to process %d", why, signal_name(timer.signal), timer.pid)
        kill = timer.signal == signal.SIGKILL
        if not kill:
            with contextlib.suppress(OSError):
                os.kill(timer.pid, timer.signal)
        self.give_up(rank, why, "", kill=kill)

    def _store_lost(self, generation: int, why: str) -> None:
        """End a world whose workers may not have come to it yet: they would try for half an hour.

        Those that have trained a step have all been there, and can do without it.
        """
        over = self._termination.gone or self._termination.stopping
        if generation != self.generation or over:
            return
        if not all(page.read().steps for page in self.pages):
            node = self._config.node
            self.give_up(None, f"the store server on {node} {why}", "", node=node)

    async def end(self, reason: str) -> None:
        """Say goodbye to parked workers, and wait a moment for them to end by themselves."""
        if not self._parked:
            return
        for worker in self._parked.values():
            if worker.channel is None or not worker.channel.send(messages.Bye(reason)):
                worker.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                while self._parked:
                    self._parked_ended.clear()
                    await self._parked_ended.wait()

    async def end_leftovers(self) -> None:
        """End all that any worker has left, when this agent has nothing else to do."""
        if not (self.generation and self._termination.gone):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.kill_timeout + LEFTOVERS):
                await self._termination.finish_sweeps()
                while others := await end_leftovers(self._mark, self.generation):
                    await end_late(self._mark, self.generation, others)

    async def kill_leftovers(self) -> None:
        """After `close`: SIGKILL to all that any worker has left, without a wait for its end."""
        killed = {*self._running, *self._parked}
        with contextlib.suppress(TimeoutError, OSError):  # /proc does not answer, or can't be read
            await in_thread(partial(_kill_left, killed, str(self._mark)), KILLED)

    def close(self) -> None:
        """Kill what is left. The ordinary end is `stop`, and then WorkersGone."""
        self._termination.kill()
        for worker in self._parked.values():
            worker.kill()
        if self._prefork:
            self._prefork.close()
        if self._timers:
            self._timers.close()
        self._channels.close()
        self._pages.close()
        self._store.close()

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
            socket=self._channels.name,
            activity=self._pages.begin(local_rank, measured=limits.seek_stragglers(now.nodes)),
            mark=str(self._mark),
            memory=self._memory,
            timer_file=self._timers.path if self._timers else "",
            cpus=self._cpus[local_rank] if self._cpus else "",
        )
        argv = tuple(substitute(self._config.argv, local_rank))
        is_script = not self._config.no_python
        return WorkerSpec(argv, env, rank, local_rank, error_file, hands_signals_on=is_script)

    def _resume(self, worker: Worker, spec: WorkerSpec, reason: str) -> bool:
        """Whether a parked worker could be sent on."""
        if worker.resume(spec, self.generation, reason):
            self._logs.move(worker.output, self.generation, spec.rank, spec.local_rank)
            self._running[worker.pid] = worker
            return True
        worker.kill()
        self._parked[worker.pid] = worker  # until it is reaped
        return False

    async def _start_workers(self, specs: Sequence[WorkerSpec]) -> None:
        if self._timers:
            await self._renew(self._timers)
        await asyncio.gather(*map(self._start_worker, specs))
        self._starting = False
        early, self._early = self._early, []
        for channel, message in early:
            self._take_message(channel, message)
        self._tell_elastic()

    async def _renew(self, timers: "FileTimers") -> None:
        """Make the pipe of timers anew if others have removed it: no worker is to fail for that."""
        make = partial(Path(self._folder).mkdir, 0o700, parents=True, exist_ok=True)
        try:
            await in_thread(make, LOOK)
            await timers.serve(self._prefork)
        except (OSError, RuntimeError, UsageError) as error:  # RuntimeError: no thread is to be had
            why = str(error) or "the disk stands still"
            log.warning("what others have removed in %s stays so: %s", self._folder, why)

    async def _start_worker(self, spec: WorkerSpec) -> None:
        local_rank, at_terminal = spec.local_rank, self._at_terminal
        try:
            output = self._logs.worker(
                self.generation, spec.rank, local_rank, at_terminal=at_terminal
            )
        except OSError as error:
            self._report_not_started(spec, error)
            return
        try:
            process = await self._fork_or_execute(spec, output)
        except OSError as error:
            output.begin()
            output.close()
            self._report_not_started(spec, error)
            return
        output.begin()
        worker = Worker(spec, output, process, self._ended)
        self._running[worker.pid] = worker
        self._termination.guard()
        if self._termination.stopping:  # asked for before it was there
            worker.kill()

    async def _fork_or_execute(self, spec: WorkerSpec, output: WorkerLog) -> Process:
        if self._prefork and self._prefork.ready:
            out, err = output.out.child_fd, output.err.child_fd
            try:
                return await self._prefork.fork(spec.argv, spec.env, out, err, self._stdin)
            except OSError as error:
                log.debug("no fork of rank %d: %s", spec.rank, error)
        scripted = not self._config.no_python and spec.argv[1:2] == ("-u",)  # as launch.py has it
        argv = through_run_script(spec.argv) if scripted else spec.argv
        return await execute(argv, spec.env, output, self._stdin)

    def _report_not_started(self, spec: WorkerSpec, error: OSError) -> None:
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        self._report(spec, 0, code, 0.0, f"can't start {spec.argv[0]}: {error.strerror}")

    # --- the ends of workers --------------------------------------------------------------

    def _ended(self, worker: Worker, code: int) -> None:
        at_barrier = self._parked.pop(worker.pid, None)
        self._running.pop(worker.pid, None)
        self._termination.bury(worker)
        if at_barrier:
            self._parked_ended.set()
            log.debug("worker %d ended at the barrier: %d", worker.spec.rank, code)
            return
        log.debug("worker %d exited %d after %.1f s", worker.spec.rank, code, worker.uptime)
        self._ends.append((worker, code))
        if code:
            self._termination.wait_for(self._explain, worker, code, worker.uptime)
        else:
            self._report(worker.spec, worker.pid, code, worker.uptime, "")

    async def _explain(self, worker: Worker, code: int, uptime: float) -> None:
        """Report a failure with its cause, which may lie on a disk that stands still.

        WorkersGone waits for it, so that it is still of this generation; I3 bears any delay of
        that. Failures are reported in their order, because the first one is the culprit's.
        """
        spec, tail = worker.spec, worker.output.err.tail()
        explain = partial(failure_message, code, stderr=tail, oom_kills_before=self._oom_kills)
        reading = begin(partial(explain, spec.error_file))
        async with self._in_order:
            await asyncio.wait({reading}, timeout=ERROR_FILE)
            known = reading.done()
            message = reading.result() if known else explain("")
            if not known:
                reading.cancel()
                log.warning("rank %d: no answer from the disk of %s", spec.rank, spec.error_file)
            by_peer = ends_with_lost_peer(message)
            self._report(spec, worker.pid, code, uptime, message, by_peer=by_peer)

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
        steps = self._pages.read(spec.local_rank).steps
        failure = Failure(
            node=self._config.node,
            rank=spec.rank,
            local_rank=spec.local_rank,
            pid=pid,
            code=code,
            uptime=round(uptime, 3),
            message=message,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            step=steps + 1 if steps else UNSET,
            place=self._place(spec.local_rank),
        )
        if blames_peers(failure) and (left := self._left()):
            failure = was_left(failure, left)
        self._inbox.put(WorkerEnded(self.generation, failure if code else None, by_peer))

    def _place(self, local_rank: int) -> TrainingPlace | UnsetType:
        reached = self._pages.reached(local_rank)
        if reached is None:
            return UNSET
        commit = UNSET if reached.commit is None else reached.commit
        epoch, batch = reached.batch or (UNSET, UNSET)
        return TrainingPlace(reached.step, commit, epoch, batch, reached.indices)

    def _left(self) -> str:
        """A worker of this node that has left the others, and how; "" if none has."""
        exited = [worker for worker, code in self._ends if code == 0]
        finished = (worker for worker in self._running.values() if worker.finished)
        worker = next(chain(exited, finished), None)
        if worker is None:
            return ""
        how = "left ee.run" if worker.finished else "ended"
        return f"rank {worker.spec.rank} on {self._config.node} {how}"

    # --- what workers say -----------------------------------------------------------------

    def _take_message(self, channel: WorkerChannel, message: messages.Heard) -> None:
        """Take a message of a worker; one of an older generation is ignored.

        Its end may be known before its last words are read.
        """
        if isinstance(message, messages.AskCurrent):
            self._tasks.create(self._answer_current(channel, message.id))
            return
        worker = self._find(channel)
        if worker is None and self._starting and channel.generation == self.generation:
            self._early.append((channel, message))  # who has started it has not said so yet
            return
        if worker is None:
            log.debug("process %d is no worker of this node", channel.pid)
            return
        match message:
            case messages.Elastic():
                worker.channel, worker.finished = channel, False
                self._tell_elastic()
            case messages.TrainingDone():
                worker.finished = True
                self._tell_elastic()
                if self._termination.asked is Asked.FIRMLY and worker.pid in self._running:
                    worker.terminate(self._termination.signal)  # it has not heard what it was told
            case messages.Disconnected() if worker.channel is channel:
                worker.channel = None
                # It may be at its end, which says more.
                asyncio.get_running_loop().call_later(_ENDING, self._tell_elastic)
            case messages.Parked(generation, error) if generation == self.generation:
                self._park(worker, error)
            case messages.Diverged(generation, line, named, alone) if generation == self.generation:
                rank = worker.spec.rank
                self._inbox.put(WorkersDiverged(generation, rank, line, named, alone))

    def _find(self, channel: WorkerChannel) -> Worker | None:
        """The worker at the other end: the process itself, or one that it has started."""
        ended = (worker for worker, _ in self._ends)
        known = [*self._running.values(), *self._parked.values(), *ended]
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
            self._inbox.put(WorkersFinished(self.generation, self._finished, self._left()))
        elastic = not self._starting and bool(parks) and all(parks)
        if elastic != self._elastic:
            self._elastic = elastic
            self._inbox.put(WorkersElastic(self.generation, elastic))

    def _park(self, worker: Worker, error: str) -> None:
        """`worker` waits at the barrier; `error` is why, if nobody has asked it to."""
        if self._running.pop(worker.pid, None) is None:
            return
        self._parked[worker.pid] = worker
        if not self._termination.stopping:
            why = error or "it left its generation without being asked to"
            patience = self._config.lease_ttl + PARKED_PATIENCE
            loop = asyncio.get_running_loop()
            loop.call_later(patience, self._waited, worker, self.generation, why)
        self._termination.settle_soon()

    def _waited(self, worker: Worker, generation: int, why: str) -> None:
        """Nobody else had a reason for a new generation: what the worker met is the failure."""
        of_now = generation == self.generation and not self._termination.stopping
        if of_now and worker.pid in self._parked:
            self._report(worker.spec, worker.pid, 1, worker.uptime, LOST + why)

    async def _answer_current(self, channel: WorkerChannel, number: int) -> None:
        current, why = await self._membership.current(channel.generation)
        channel.send(messages.Current(number, current, why))


def _kill_left(groups: Collection[int], mark: str) -> None:
    """In a thread. Leftovers are known as such when their worker is dead."""
    for pidfd in chain.from_iterable(kill_members(groups).values()):
        wait_until_gone(pidfd, KILLED)
        os.close(pidfd)
    for pidfd in kill_marked(mark):
        os.close(pidfd)
