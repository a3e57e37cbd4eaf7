"""The agent of a node: an inbox of events, and a loop that does what core/lifecycle.py says.

Nothing is decided here. Views, worker exits, a lost lease, signals and timers are put into one
inbox. The loop steps each through the lifecycle, shows it to the followers and does the actions.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.directories import memory_directory, own_directory
from elastic_etcd.agent.environment import check_devices, forget_another_agents
from elastic_etcd.agent.followers.divergence_watch import DivergenceWatch
from elastic_etcd.agent.followers.hang_watch import HangWatch
from elastic_etcd.agent.followers.loop_watchdog import Watchdog
from elastic_etcd.agent.followers.recorder import FlightRecorder
from elastic_etcd.agent.followers.throughput import Throughput
from elastic_etcd.agent.followers.time_accounting import TimeAccounting, is_spare
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import (
    FatalError,
    Follower,
    Incoming,
    MirrorChanged,
    Notice,
    Tasks,
    Timer,
    Unkillable,
)
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.output.logs import LogHandler, Logs
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import invariants, lifecycle, requests
from elastic_etcd.core.peers import is_left
from elastic_etcd.core.rules import Ack, Decision, Freeze, Local, Verdict, Wait
from elastic_etcd.core.schema import (
    Failure,
    History,
    Limits,
    Master,
    Outcome,
    Participant,
    Phase,
    Round,
)
from elastic_etcd.core.words import counted, ended
from elastic_etcd.errors import (
    BudgetUsedUp,
    ElasticEtcdError,
    NewerFormat,
    NoProgress,
    RendezvousTimeout,
    TrainingFailed,
    UsageError,
)
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.protocol.messages import Change, Interrupt
from elastic_etcd.system.leftovers import Mark
from elastic_etcd.system.signals import taken
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import GRACE_CHANGE, GRACE_FAILURE, LEAVE_TIMEOUT, SIGTERM_TWICE
from elastic_etcd.version import __version__

if TYPE_CHECKING:
    from elastic_etcd.agent.followers.metrics import Metrics
    from elastic_etcd.agent.followers.periodic import PeriodicFollower
    from elastic_etcd.etcd.embedded import EmbeddedEtcd

_CUT_OFF = "this node is cut off from etcd"

_SUCCEEDED, _STOPPED = Verdict.SUCCEEDED.state, Verdict.STOPPED.state
_RECORD_TIMEOUT = 10.0
_WAITS, _STILL_WAITS = 5.0, 30.0  # seconds until a wait is told, and told again

Result = TypeVar("Result")

log = logging.getLogger(__name__)


def run(config: AgentConfig, follow: Callable[[Logs], Follower] | None = None) -> int:
    """Be this node's agent until the job is over here; gives the exit code.

    `follow` makes one more follower. Raises ElasticEtcdError for all that the user has to know:
    what failed, where, what to do.
    """
    forget_another_agents(os.environ)
    check_devices(config)
    with _metrics(config) as metrics:
        return asyncio.run(_run_agent(config, metrics, follow))


def _metrics(config: AgentConfig) -> "AbstractContextManager[Metrics | None]":
    """They are served while this is open, where that was asked for. Raises UsageError."""
    if config.metrics_addr is None:
        return nullcontext()
    try:
        from elastic_etcd.agent.followers.metrics import serving  # noqa: PLC0415 - only if it is asked for
    except ModuleNotFoundError as error:
        needs = "pip install 'elastic_etcd[metrics]'"
        raise UsageError(f"--metrics-addr: {error}; {needs}") from error
    return serving(config)


class Resources(NamedTuple):
    """All that is open before an agent's first event, and is closed after its last one."""

    logs: Logs
    client: Client
    guardian: Guardian
    embedded: "EmbeddedEtcd | None"  # where no other etcd was given
    memory: str  # the node's directory for checkpoints; "" if it has none
    folder: str  # one for a pipe of timers; "" likewise


async def _run_agent(
    config: AgentConfig,
    metrics: "Metrics | None",
    follow: Callable[[Logs], Follower] | None,
) -> int:
    async with AsyncExitStack() as scope:
        resources = await _open_resources(config, metrics, scope)
        logs, client, guardian, embedded, memory, folder = resources
        await _check_before_joining(client, config)

        def build(tasks: Tasks) -> Agent:
            membership = Membership(client, config, tasks, guardian)
            workers = Workers(config, logs, tasks, membership, guardian, folder, memory)
            accounting = TimeAccounting(workers)
            membership.spent_on = accounting.spent_on
            limits = config.hang_timeout, None if config.no_python else config.start_timeout
            looking: list[PeriodicFollower] = [
                HangWatch(limits, membership.keys, workers, logs, tasks),
                Throughput(membership.keys, workers, tasks),
                DivergenceWatch(config.node, membership.keys, workers, tasks),
            ]
            if config.has_peers:
                from elastic_etcd.agent.followers import straggler_watch  # noqa: PLC0415 - not for one node alone

                looking.append(straggler_watch.StragglerWatch(membership.keys, workers, tasks))
            for each in looking:
                tasks.create(each.run())
            followers: list[Follower] = [accounting, *looking]
            if metrics:
                metrics.follow(membership, workers, accounting)
                followers.append(metrics)
            if follow:
                followers.append(follow(logs))
            if config.preemption_watch:
                from elastic_etcd.agent.followers.notices import Watch  # noqa: PLC0415 - as above

                watch = Watch(config.preemption_watch, tasks.inbox.put_from_thread)
                scope.callback(watch.close)
            followers += _watch_fitness(client, config, tasks)
            if embedded:
                embedded.failed.add_done_callback(tasks.inbox.put_error)
            return Agent(config, tasks, membership, workers, followers)

        return await live(build)


async def _open_resources(
    config: AgentConfig, metrics: "Metrics | None", scope: AsyncExitStack
) -> Resources:
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    names = {"job": config.job, "node": config.node, "role": config.role}
    logs = await scope.enter_async_context(Logs.open(config.log, template=template, **names))
    scope.enter_context(_logging_through(logs))
    watchdog = await scope.enter_async_context(Watchdog(config.lease_ttl))
    if metrics:
        metrics.watch(watchdog)
    folder = own_directory() if config.etcd is None or config.timer_file == "" else None
    if folder:
        scope.callback(folder.remove)
    etcd, embedded = config.etcd, None
    if etcd is None:
        from elastic_etcd.etcd.embedded import EmbeddedEtcd  # noqa: PLC0415 - only without --etcd

        assert folder is not None
        private = config.limits.max_nodes == 1
        embedded = await scope.enter_async_context(EmbeddedEtcd(folder.path, private=private))
        etcd = EtcdConfig((embedded.endpoint,))
    _tell_start(config, etcd, embedded)
    memory = memory_directory(config.memory_dir)
    paths = [directory.path if directory else "" for directory in (memory, folder)]
    fields = {"job": config.job, "node": config.node} if config.log_format == "json" else None
    guardian = Guardian(
        etcd, str(Mark.own(config.node, config.job)), *paths, logs.to_be_removed, log_fields=fields
    )
    guardian.start()
    scope.callback(guardian.dismiss)
    if memory:  # before that: else nobody would, if this were killed now
        scope.callback(memory.remove)
    on_answer = metrics.requests.observe if metrics else None
    client = await scope.enter_async_context(Client(etcd, on_answer))
    return Resources(logs, client, guardian, embedded, *paths)


async def _check_before_joining(client: Client, config: AgentConfig) -> None:
    """Raise UnfitNode where this node is not fit to train, if somebody wants to know that."""
    if config.health_check:
        from elastic_etcd.agent.followers import health_check  # noqa: PLC0415 - only if it is asked for

        await health_check.check_before_joining(client, config, config.health_check)


def _watch_fitness(client: Client, config: AgentConfig, tasks: Tasks) -> Iterator[Follower]:
    """Have a node that is not fit any more leave, if somebody wants to know that."""
    if config.health_check:
        from elastic_etcd.agent.followers import health_check  # noqa: PLC0415 - as above

        yield health_check.HealthCheck(client, config, config.health_check, tasks)


async def live(build: Callable[[Tasks], "Agent"]) -> int:
    """Live the life of the agent that is built; gives the exit code. Raises ElasticEtcdError."""
    agent: Agent | None = None
    try:
        async with Tasks() as tasks:
            agent = build(tasks)
            return await agent.live()
    except BaseExceptionGroup as errors:  # of the loop, or of tasks that crashed
        error = errors.exceptions[0]
        if agent and not isinstance(error, ElasticEtcdError):
            await agent.write_record(f"internal error: {type(error).__name__}: {error}")
        raise error from None


class LocalWorkers(Protocol):
    """This node's workers, as an agent needs them; agent/workers.py says what each method means.

    Each start is answered by WorkerEnded of each worker that ends, each stop by WorkersGone.
    """

    generation: int

    @property
    def finished(self) -> bool: ...

    async def end_former_agents_leftovers(self) -> None: ...

    async def prestart(self) -> None: ...

    def offer(self, generation: int, reached: Reached) -> Master: ...

    def start(self, now: Round, part: Participant, limits: Limits) -> None: ...

    def stop(
        self,
        grace: float | None,
        notice: Change | Interrupt | None = None,
        park: float | None = None,
    ) -> None: ...

    def tell_leaving(self, number: signal.Signals = signal.SIGTERM) -> None: ...

    async def end(self, reason: str) -> None: ...

    async def end_leftovers(self) -> None: ...

    async def kill_leftovers(self) -> None: ...

    def close(self) -> None: ...


class Agent:
    """The inbox and its loop."""

    def __init__(
        self,
        config: AgentConfig,
        tasks: Tasks,
        membership: Membership,
        workers: LocalWorkers,
        followers: Sequence[Follower] = (),
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._inbox = tasks.inbox
        self._loop = asyncio.get_running_loop()
        self._membership = membership
        self._workers = workers
        self._followers = (membership, *followers)
        self._timer = Timer()
        self._state = lifecycle.State(Local(run=""), config.nproc)
        self._failed: lifecycle.Failed | None = None  # the failure that is logged
        self._told: lifecycle.Failed | None = None  # with its cause, although etcd is silent
        self._has_namesake = False  # as was told
        self._waits_since: float | None = None  # for a world to begin
        self._reminder = Timer()
        self._recorder = FlightRecorder()
        self._error: Exception | None = None  # the first one
        self._exit: lifecycle.Exit | None = None
        self._at_once = self._loop.create_future()  # the exit code for which a second signal asks
        self._first = False  # its workers of the last world had rank 0
        self._asked_at: float | None = None  # when a signal first told it to leave
        self._signal = signal.SIGTERM  # the one on which this node leaves
        self._goes_at: float | None = None  # when this machine goes, as a notice says
        self._noticed: int | None = None  # the exit code that a notice has

    async def live(self) -> int:
        """Join, take part, leave. Raises ElasticEtcdError."""
        # Under nohup the terminal's end is ignored, so it stays ignored.
        hup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [n for n in self._config.signals if n is not signal.SIGHUP or not hup]
        takers: dict[signal.Signals, Callable[[], object]] = {
            signal.SIGUSR1: lambda: self._tasks.create(self.write_record("SIGUSR1")),
            signal.SIGUSR2: self._drain,
        }
        with taken(takers | {number: partial(self._signalled, number) for number in handled}):
            try:
                async with self._membership:
                    joining = self._tasks.create(self._join())
                    try:
                        code = await self._unless_at_once(self._take_part())
                        return self._at_once.result() if code is None else code
                    finally:
                        joining.cancel()
            finally:
                self._reminder.cancel()
                if self._exit:
                    await self._unless_at_once(self._workers.end_leftovers())
                self._workers.close()
                if self._at_once.done():
                    await self._workers.kill_leftovers()

    async def _take_part(self) -> int:
        while self._exit is None:
            await self._take_event(await self._inbox.get())
        return await self._leave(self._exit)

    async def _unless_at_once(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Its result; a second signal cancels it, then None."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._at_once}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.wait({task})
        return None if task.cancelled() else task.result()

    def leave(self, why: str) -> None:
        """Leave the job, as on SIGTERM."""
        log.info("%s: leaving", why)
        self._begin_to_leave()

    async def write_record(self, why: str) -> None:
        """Write the flight record into a file of its own, and say so in the log."""
        try:
            path = await in_thread(self._recorder.write, _RECORD_TIMEOUT)
            log.warning("%s: the last events are in %s", why, path)
        except OSError as error:  # a TimeoutError is one
            log.warning("%s: the last events can't be written: %s", why, error)

    async def _take_event(self, incoming: Incoming) -> None:
        if self._state.local.lease and (silent := self._membership.stood_still()):
            await self._step(silent)
        match incoming:
            case MirrorChanged():
                began = time.thread_time()
                view = self._membership.view()
                if view is not None:
                    await self._step(lifecycle.ViewChanged(view))
                self._inbox.rest(time.thread_time() - began)
            case FatalError(error):
                self._error = self._error or error
                await self._step(lifecycle.Fatal(lifecycle.Error(str(error))))
            case Unkillable():
                self._exit = lifecycle.Exit(self._give_up_waiting())
            case Notice():
                self._take_notice(incoming)
            case _:
                await self._step(incoming)

    def _give_up_waiting(self) -> lifecycle.Ending:
        """End beside processes that don't; a job that is over stays as it was."""
        text = "workers are still there long after SIGKILL (a hung driver or file system?)"
        if isinstance(self._state.ending, lifecycle.Over):
            log.warning("%s; this node ends without them", text)
            return self._state.ending
        self._error = ElasticEtcdError(f"{text}; this node leaves the job")
        return lifecycle.Error(str(self._error))

    async def _step(self, event: lifecycle.Event) -> None:
        if isinstance(event, lifecycle.Relisted) and event.created:
            log.warning("this node's key is back; others have %.0f s for theirs", event.patience)
        before, now = self._state, self._loop.time()
        step = self._recorder.record(before, now, event)
        self._state, step.actions = lifecycle.step(before, event, now)
        if log.isEnabledFor(logging.DEBUG):
            broken = invariants.violated(self._state, step.actions)
            assert not broken, broken
        if (
            isinstance(event, lifecycle.LeaseLost)
            and self._state.life is not lifecycle.Life.UNLISTED
        ):
            log.warning("the lease is lost: %s", event.reason)
        if self._state.local.leaving and not before.local.leaving:
            self._note_departure()
        self._tell_failure()
        for follower in self._followers:
            follower.see(before, event, self._state)
        for action in step.actions:
            self._do(action)
        if self._state.local.lease and self._state.life is not lifecycle.Life.ENDED:
            await self._membership.cover(lifecycle.coverage(self._state))

    def _tell_failure(self) -> None:
        """Log it at once; with all of its cause while etcd is silent, as nobody else is told yet.

        Others have told a hang; one whose generation is over already is most likely its victim.
        """
        result = self._state.result
        if not isinstance(result, lifecycle.Failed):
            return
        silent = self._state.silent_since is not None
        new, self._failed = result is not self._failed, result
        if silent and result is not self._told:
            self._told = result
            cause = _root_cause(result.failure)
            log.warning("nothing trains on this node until etcd answers\n%s", cause)
        elif new and not silent and not result.failure.hang:
            last = result.failure.last_words or "(nothing on its stderr)"
            text = f"{_described(result.failure)}: {last}"
            log.log(logging.WARNING if self._world_stands else logging.DEBUG, "%s", text)

    def _tell_namesake(self, own: Participant) -> None:
        """Log once that another node has this one's name: both live, since both have acked."""
        known = self._state.view.participants if self._state.view else ()
        if self._has_namesake or all(p.node != own.node or p == own for p in known):
            return
        self._has_namesake = True
        log.warning(
            "another node of this job is called %s, too: give each node a --node-name of its own, "
            "else its log, `drain` and --suspect-after mean both",
            own.node,
        )

    async def _join(self) -> None:
        """Have everything ready before joining, so that nobody waits for this node."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._membership.look())  # a wrong address is told at once
                group.create_task(self._workers.prestart())
                group.create_task(self._workers.end_former_agents_leftovers())
        except* ElasticEtcdError as errors:
            self._inbox.put(FatalError(errors.exceptions[0]))
        else:
            self._membership.join(run="", last=0)

    def _do(self, action: lifecycle.Action) -> None:
        match action:
            case lifecycle.Write():
                self._begin_write(action)
            case lifecycle.Publish():
                self._tasks.create(self._publish(action))
            case lifecycle.StartWorkers(now, part):
                self._reminder.cancel()
                self._waits_since = None
                self._first = part.group_rank == 0
                self._tell_namesake(part)
                self._workers.start(now, part, self._limits)
            case lifecycle.StopWorkers():
                self._stop(action)
            case lifecycle.Rejoin():
                log.info("joining again as another member")
                self._membership.join(self._state.local.run, self._state.local.ran)
            case lifecycle.Relist():
                log.warning("this node's key is gone, its world is not: the key is put back")
                self._membership.relist(self._state)
            case lifecycle.Exit():
                self._exit = action
            case lifecycle.SetTimer(at):
                self._timer.cancel()
                if at is not None:
                    self._timer.start(at - self._loop.time(), self._inbox.put, lifecycle.Tick())
            case lifecycle.Log(decision):
                self._log_reason(decision)

    def _log_reason(self, decision: Decision) -> None:
        """Tell who is left out, and why this node is a spare; the rest is for debugging."""
        left_out = isinstance(decision, Freeze) and decision.without
        spare = isinstance(decision, Wait) and is_spare(self._state)
        level = logging.WARNING if left_out else logging.INFO if spare else logging.DEBUG
        log.log(level, "%s", decision.reason)
        if isinstance(decision, Wait) and self._waits_since is None and self._forms():
            self._waits_since = self._loop.time()
            self._reminder.start(_WAITS, self._remind)

    def _forms(self) -> bool:
        """Whether a world is about to begin, and this node waits for it."""
        now = self._state.view.round if self._state.view else None
        forming = now is not None and now.phase not in (Phase.FINAL, Phase.CLOSED)
        return forming and self._state.life is lifecycle.Life.MEMBER

    def _remind(self) -> None:
        """Say what it waits for, and that it still waits."""
        if self._waits_since is None or not self._forms():
            self._waits_since = None
            return
        if self._state.silent_since is None:
            seconds = self._loop.time() - self._waits_since
            log.info("waiting for %.0f s: %s", seconds, self._state.logged)
        self._reminder.start(_STILL_WAITS, self._remind)

    def _begin_write(self, write: lifecycle.Write) -> None:
        now = self._state.view.round if self._state.view else None
        offer = None
        if now and now.phase is Phase.JOINABLE and isinstance(write.what, Ack):
            offer = partial(self._workers.offer, now.generation, self._membership.reached)
        self._membership.write(self._state, write, offer)

    async def _publish(self, asked: lifecycle.Publish) -> None:
        ok = await self._membership.publish(asked.txn)
        self._inbox.put(lifecycle.Published(asked.by, ok))

    def _stop(self, stop: lifecycle.StopWorkers) -> None:
        grace, by = stop.grace, stop.by
        seconds = self._seconds(grace) if stop.seconds is None else stop.seconds
        if grace is lifecycle.Grace.FAILURE and self._workers.finished:
            seconds = self._seconds(lifecycle.Grace.CHANGE)  # what they do is not spoilt
        if grace is lifecycle.Grace.LEAVE and seconds is not None:
            seconds = min(seconds, self._time_left())
        if by is not None:
            assert seconds is not None
            log.warning("%s: the workers are stopped (--when-cut-off stop)", _CUT_OFF)
            seconds = max(0.0, min(seconds, by - self._loop.time()))
        park = self._config.park_timeout if grace is lifecycle.Grace.FAILURE else None
        self._workers.stop(seconds, self._notice(grace), park)

    @property
    def _limits(self) -> Limits:
        """The job's, and this node's own before it has joined."""
        return self._state.limits or self._config.limits

    def _seconds(self, grace: lifecycle.Grace) -> float | None:
        """How long workers have; None: as long as they need."""
        given = self._config.shutdown_timeout
        match grace:
            case lifecycle.Grace.LEAVE:
                return self._limits.leave_deadline
            case lifecycle.Grace.JOIN:
                return None
            case lifecycle.Grace.CHANGE | lifecycle.Grace.CUT_OFF:
                return GRACE_CHANGE if given is None else given
            case lifecycle.Grace.FAILURE:
                return GRACE_FAILURE if given is None else given

    def _time_left(self) -> float:
        """Seconds until this machine goes, but for those in which the others are told."""
        if self._goes_at is None:
            return math.inf
        return max(0.0, self._goes_at - LEAVE_TIMEOUT - self._loop.time())

    def _notice(self, grace: lifecycle.Grace) -> Change | Interrupt:
        """Only a world that is whole can stop at a step that all its ranks agree on."""
        generation = self._workers.generation
        if grace is lifecycle.Grace.CUT_OFF:
            return Interrupt(generation, _CUT_OFF)
        if self._state.local.leaving and grace is lifecycle.Grace.LEAVE:
            return Change(generation, "this node is leaving", leaving=True)
        if self._state.local.leaving and grace is lifecycle.Grace.CHANGE:
            return Change(generation, "the job is to stop", leaving=False)
        if (
            grace in (lifecycle.Grace.CHANGE, lifecycle.Grace.JOIN)
            and self._state.life is not lifecycle.Life.LEAVING
        ):
            return Change(generation, self._state.logged, leaving=False)
        return Interrupt(generation, self._why_broken())

    def _why_broken(self) -> str:
        """The cause for which workers are stopped; what is logged may be from before that."""
        state = self._state
        if isinstance(state.result, lifecycle.Failed) and self._world_stands:
            return str(state.result.failure)
        if isinstance(state.ending, lifecycle.Over | lifecycle.Error | lifecycle.Outdated):
            return state.ending.reason
        return "this node has lost its lease" if state.life is lifecycle.Life.LOST else state.logged

    @property
    def _world_stands(self) -> bool:
        """Whether the world that ran here last is the job's, as far as this node sees."""
        now = self._state.view.round if self._state.view else None
        return now is not None and now.generation == self._state.local.ran

    def _note_departure(self) -> None:
        """Log why people want this node to go; its workers know before they get SIGTERM."""
        local, view = self._state.local, self._state.view
        departure = requests.departure(view, local.run, local.lease) if view else None
        if departure is None:
            return
        log.info("%s: leaving; a signal does not hurry it, a second one does", departure.reason)
        if departure.save:
            self._workers.tell_leaving()

    def _drain(self) -> None:
        """Leave for a scheduler that is about to end the job; its SIGTERM is no second signal."""
        if not self._state.local.leaving:
            log.info("SIGUSR2: leaving; a signal does not hurry it, a second one does")
        self._begin_to_leave()

    def _signalled(self, number: signal.Signals) -> None:
        if self._asked_at is not None:
            since = self._loop.time() - self._asked_at
            if number == self._signal == signal.SIGTERM and since < SIGTERM_TWICE:
                return
            if not self._at_once.done():
                log.warning("leaving at once")
                self._at_once.set_result(128 + number)
            return
        self._asked_at, name = self._loop.time(), number.name
        if self._exit:
            log.info("%s: this node is about to end; once more to end at once", name)
            return
        log.info("%s: leaving; once more to leave at once", name)
        self._signal = number
        self._begin_to_leave()

    def _begin_to_leave(self) -> None:
        if not self._state.local.leaving:
            self._workers.tell_leaving(self._signal)  # before they get it
            self._inbox.put(lifecycle.Signalled())

    def _take_notice(self, notice: Notice) -> None:
        """Leave; the signal that often follows a notice is no second one."""
        left = "" if notice.seconds is None else f", in {notice.seconds:.0f} s"
        log.warning("%s%s: leaving", notice.what, left)
        self._noticed = notice.exit_code
        if notice.seconds is not None:
            self._goes_at = self._loop.time() + notice.seconds
            if self._state.local.leaving and self._state.local.stopping:
                self._workers.stop(self._time_left())  # of two words the shorter counts
        self._begin_to_leave()

    async def _leave(self, end: lifecycle.Exit) -> int:
        """End; gives the exit code. Raises the error that the user is to see."""
        local = self._state.local
        match end.why:
            case lifecycle.Left():
                await self._workers.end("this node is leaving")
                if local.lease:
                    await self._membership.leave(self._state)
                outcome = self._state.view.outcome if self._state.view else None
                succeeded = outcome and (outcome.run, outcome.state) == (local.run, _SUCCEEDED)
                return 0 if succeeded else self._unfinished(local.run)
            case lifecycle.Error(reason):
                await self._workers.end(reason)
                raise self._error or ElasticEtcdError(reason)
            case lifecycle.Outdated() as outdated:
                await self._workers.end(outdated.reason)
                raise self._error or NewerFormat(f"job {self._config.job}: {outdated.reason}")
            case lifecycle.Over(reason, run):
                await self._workers.end(reason)
                return await self._over(local.run or run, reason)

    def _unfinished(self, run: str) -> int:
        """The exit code of a node that left: 0 would tell a scheduler that its work is done."""
        config, view = self._config, self._state.view
        stopped = view is not None and requests.halted(view, run) is not None
        code = config.stop_exit_code if stopped else self._noticed
        code = config.leave_exit_code if code is None else code
        code = 128 + self._signal if code is None else code
        others = view is None or any(
            member.lease != self._state.local.lease and not member.leaving
            for member in view.members
        )
        again = "start it with the same command to go on"
        if stopped or not others or config.etcd is None:
            again = (
                "the same command, on all nodes, goes on from the files that the script has saved"
            )
        elif requests.drained(view, config.node) if view else self._membership.stays_out:
            again = f"`elastic-etcd undrain {config.job} {config.node}` lets it come back"
        log.info("job %s is not done, this node has left it (exit %d): %s", config.job, code, again)
        return code

    async def _over(self, run: str, reason: str) -> int:
        """The exit code of the job, which is over; if this node was in no run, it succeeded."""
        if not run:
            log.info("%s", reason)
            return 0
        outcome = self._state.view.outcome if self._state.view else None
        if outcome is None or outcome.run != run:
            outcome = await self._membership.outcome(run)
        if outcome is None:
            raise ElasticEtcdError(f"job {self._config.job}: {reason}, this node was cut off")
        await self._step(lifecycle.JobEnded(outcome))
        code = _exit_code(outcome, await self._report() if self._first else [])
        if (
            outcome.state == _SUCCEEDED
            and self._membership.other_command
            and not self._state.local.ran
        ):
            raise UsageError(
                f"job {self._config.job}: {reason}, with another command than this node's, which "
                "has not run.\nGive it a --job id of its own."
            )
        return self._unfinished(run) if outcome.state == _STOPPED else code

    async def _report(self) -> list[str]:
        """How the time of the run was spent, if etcd and this package's disk answer soon."""
        entry = await self._membership.history(self._state.local.ran)
        try:
            return await in_thread(partial(_lines_at_end, entry), LEAVE_TIMEOUT) if entry else []
        except (ImportError, OSError) as error:  # a TimeoutError is one
            log.debug("no report: %s", error)
            return []


def _lines_at_end(entry: History) -> list[str]:
    from elastic_etcd.agent.goodput import at_end  # noqa: PLC0415 - once, at the end

    return [*at_end(entry)]


def _tell_start(config: AgentConfig, etcd: EtcdConfig, embedded: "EmbeddedEtcd | None") -> None:
    endpoint, limits = ",".join(etcd.endpoints), config.limits
    whose = f"etcd at {endpoint}"
    if embedded:
        whose = f"an etcd of its own, for this run only ({embedded.version}), at {endpoint}"
    here = counted(config.nproc, "worker")
    if config.nproc > 1 and "OMP_NUM_THREADS" not in os.environ:  # see environment.py
        here += " with OMP_NUM_THREADS=1 each, as under torchrun,"
    fixed = limits.min_nodes == limits.max_nodes
    nodes = counted(limits.max_nodes, "node") if fixed else f"{limits.nnodes} nodes"
    text = "elastic_etcd %s, job %s: %s on this node, %s, %s"
    log.info(text, __version__, config.job, here, nodes, whose)
    if embedded and limits.max_nodes > 1:
        where = f"--etcd {endpoint} --job {config.job}"
        log.warning("only agents on this host can join, with %s", where)


def _exit_code(outcome: Outcome, report: Sequence[str]) -> int:
    """The exit code of a job that ended well, else the error with the root cause.

    `report` says how the time of the run was spent.
    """
    if not outcome.exit_code:
        log.info("%s", "\n".join((f"{outcome.state}: {outcome.reason}", *report)))
        return 0
    if report:
        log.info("%s", "\n".join(report))
    kinds = (TrainingFailed, UsageError, BudgetUsedUp, RendezvousTimeout, NoProgress)
    kind = next((k for k in kinds if k.exit_code == outcome.exit_code), TrainingFailed)
    failure = outcome.failure
    text = outcome.reason
    if kind is BudgetUsedUp:
        text += "\nThe same command, on all nodes, goes on from the script's checkpoint."
    if kind is NoProgress:
        text += "\nMend the script or its data before it is started again."
    error = kind(f"{text}\n{_root_cause(failure)}" if failure else text)
    if failure:
        said = failure.message or str(failure)
        error.cause = failure.hang or said.splitlines()[-1], said, failure.at, failure.code
    raise error


def _root_cause(failure: Failure) -> str:
    if failure.hang and not failure.pid:
        told = f"root cause: {failure}, after {failure.uptime:.1f} s, {failure.at}"
        advice = "\n  Let all ranks take equally many steps, and stop at the same one."
        return told + advice if is_left(failure) else told
    text = failure.message or "(nothing on its stderr)"
    head = f"root cause: {_described(failure)}, {failure.at}"
    return "\n".join([head, *(f"  {line}" for line in text.splitlines())])


def _described(failure: Failure) -> str:
    where = f"rank {failure.rank} on {failure.node}"
    ids = f"(local rank {failure.local_rank}, pid {failure.pid})"
    how = f": {failure.hang}," if failure.hang else f" {ended(failure.code)}"
    step = f", in step {failure.step} of its world" if failure.step else ""
    return f"{where} {ids}{how} after {failure.uptime:.1f} s{step}"


@contextmanager
def _logging_through(logs: Logs) -> Iterator[None]:
    """Log lines go the way of the workers' output: a stuck terminal must not stall the loop."""
    ours, asyncios = logging.getLogger("elastic_etcd"), logging.getLogger("asyncio")
    before = list(ours.handlers), list(asyncios.handlers)
    handler = LogHandler(logs.stderr)
    if ours.handlers:
        handler.setFormatter(ours.handlers[0].formatter)
    ours.handlers[:] = asyncios.handlers[:] = [handler]
    try:
        yield
    finally:
        ours.handlers[:], asyncios.handlers[:] = before
