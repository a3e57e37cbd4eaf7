"""One node of a job: an inbox of events, and a loop that does what core/lifecycle.py says.

Nothing is decided here. Views, worker exits, a lost lease, signals and timers are put into one
inbox; each is stepped through the lifecycle, and the actions that come out are done.
"""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import TYPE_CHECKING, Never, Protocol

from elastic_etcd.agent.address import Reached
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.directories import memory_directory, own_directory
from elastic_etcd.agent.environment import check_devices
from elastic_etcd.agent.followers.hang_watch import HangWatch
from elastic_etcd.agent.followers.recorder import FlightRecorder
from elastic_etcd.agent.followers.straggler_watch import StragglerWatch
from elastic_etcd.agent.followers.throughput import PaceTeller
from elastic_etcd.agent.followers.time_accounting import Measure
from elastic_etcd.agent.followers.watchdog import Watchdog
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import (
    FatalError,
    Inbox,
    Incoming,
    LeaveAtOnce,
    MirrorChanged,
    Tasks,
    Unkillable,
)
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.output.logs import LogHandler, Logs
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import lifecycle, requests
from elastic_etcd.core.lifecycle import (
    Action,
    Ending,
    Error,
    Event,
    Exit,
    Fatal,
    Grace,
    LeaseLost,
    Left,
    Life,
    Log,
    Outdated,
    Over,
    Rejoin,
    SetTimer,
    Signalled,
    StartWorkers,
    State,
    StopWorkers,
    Tick,
    ViewChanged,
    Write,
)
from elastic_etcd.core.rules import Ack, Decision, Freeze, Local, Stop, Verdict, Wait
from elastic_etcd.core.schema import (
    Failure,
    Limits,
    Master,
    Outcome,
    Participant,
    Phase,
    Round,
    Spent,
)
from elastic_etcd.errors import (
    BudgetUsedUp,
    ElasticEtcdError,
    RendezvousTimeout,
    TrainingFailed,
    UsageError,
)
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd
from elastic_etcd.protocol.messages import Change, Interrupt
from elastic_etcd.system.leftovers import Mark
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import (
    APPROVE_TIMEOUT,
    GRACE_CHANGE,
    GRACE_FAILURE,
    LEAVE_TIMEOUT,
    SIGTERM_TWICE,
)

if TYPE_CHECKING:
    from elastic_etcd.agent.followers.metrics import Metrics
    from elastic_etcd.agent.followers.notices import Notice, Watch
    from elastic_etcd.agent.followers.run_writer import Account

_CUT_OFF = "this node is cut off from etcd"

_SUCCEEDED, _STOPPED = Verdict.SUCCEEDED.state, Verdict.STOPPED.state
_RECORD_TIMEOUT = 10.0

log = logging.getLogger(__name__)


def run(config: AgentConfig, account: "Account | None" = None) -> int:
    """Be this node's agent until the job is over here; gives the exit code.

    An `account` is kept of it, where somebody wants one. Raises ElasticEtcdError for what the user
    is to be told: what failed, where, what to do.
    """
    check_devices(config)
    with _metrics(config) as metrics:
        return asyncio.run(_run_agent(config, metrics, account))


def _metrics(config: AgentConfig) -> "AbstractContextManager[Metrics | None]":
    """They are served while this is open, where that was asked for. Raises UsageError."""
    if config.metrics_addr is None:
        return nullcontext()
    try:
        from elastic_etcd.agent.followers.metrics_server import serving  # noqa: PLC0415 - only if it is asked for
    except ModuleNotFoundError as error:
        needs = "pip install 'elastic_etcd[metrics]'"
        raise UsageError(f"--metrics-addr: {error}; {needs}") from error
    return serving(config)


async def _run_agent(
    config: AgentConfig, metrics: "Metrics | None", account: "Account | None"
) -> int:
    async with AsyncExitStack() as scope:
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        names = {"job": config.job, "node": config.node, "role": config.role}
        logs = await scope.enter_async_context(Logs.open(config.log, template=template, **names))
        scope.enter_context(_logging_through(logs))
        watchdog = await scope.enter_async_context(Watchdog(config.lease_ttl))
        if metrics:
            metrics.watch(watchdog)
        folder, remove_folder = own_directory()
        scope.callback(remove_folder)
        etcd, embedded = config.etcd, None
        if etcd is None:
            embedded = await scope.enter_async_context(EmbeddedEtcd(parent=folder))
            etcd = EtcdConfig((embedded.endpoint,))
            _tell_embedded(config, embedded.endpoint)
        memory, remove = memory_directory(config.memory_dir)
        guardian = Guardian(etcd, str(Mark.own(config.node, config.job)), memory, folder)
        guardian.start()
        scope.callback(guardian.dismiss)
        scope.callback(remove)  # before that: else nobody would, if this were killed now
        on_answer = metrics.requests.observe if metrics else None
        client = await scope.enter_async_context(Client(etcd, on_answer))
        told = (metrics, account)
        return await run_agent(config, client, guardian, logs, embedded, memory, folder, *told)


async def run_agent(
    config: AgentConfig,
    client: Client,
    guardian: Guardian,
    logs: Logs,
    embedded: EmbeddedEtcd | None = None,
    memory: str = "",
    folder: str = "",
    metrics: "Metrics | None" = None,
    account: "Account | None" = None,
) -> int:
    """As `run`, on a client, a guardian, logs and perhaps an etcd that have been started.

    `memory` is the node's directory for checkpoints, if it has one, and `folder` for its socket;
    `metrics` if they are served.
    """

    def build(inbox: Inbox, tasks: Tasks) -> Agent:
        if embedded:
            embedded.failed.add_done_callback(lambda failed: _put_error(inbox, failed))
        membership = Membership(client, config, inbox, tasks, guardian)
        workers = Workers(config, logs, inbox, tasks, membership, guardian, memory, folder)
        hangs = HangWatch(config.hang_timeout, membership, workers, logs)
        tasks.create(hangs.watch())
        tasks.create(hangs.answer())
        measure = Measure(workers)
        pace = PaceTeller(membership, workers)
        tasks.create(pace.tell())
        stragglers = StragglerWatch(membership, workers)
        tasks.create(stragglers.tell())
        tasks.create(stragglers.compare())
        if metrics:
            metrics.follow(membership, workers, measure)
        if account:
            account.follow(logs)
        observers: tuple[Observer, ...] = (hangs, pace, stragglers)
        if metrics:
            observers = (*observers, metrics)
        own = (measure, observers, account)
        return Agent(config, inbox, tasks, membership, workers, guardian, *own)

    return await live(build)


async def live(build: Callable[[Inbox, Tasks], "Agent"]) -> int:
    """Live the life of the agent that is built; gives the exit code. Raises ElasticEtcdError."""
    agent: Agent | None = None
    try:
        async with Tasks() as tasks:
            agent = build(Inbox(), tasks)
            return await agent.live()
    except BaseExceptionGroup as errors:  # of the loop, or of tasks that crashed
        error = errors.exceptions[0]
        if agent and not isinstance(error, ElasticEtcdError):
            await agent.write_record(f"internal error: {type(error).__name__}: {error}")
        raise error from None


def _put_error(inbox: Inbox, failed: asyncio.Future[Never]) -> None:
    error = None if failed.cancelled() else failed.exception()
    if isinstance(error, Exception):
        inbox.put(FatalError(error))


class LocalWorkers(Protocol):
    """What an agent asks of those who run this node's workers; agent/workers.py says what it means.

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

    def tell_leaving(self) -> None: ...

    async def end(self, reason: str) -> None: ...

    def close(self) -> None: ...


class Observer(Protocol):
    """Who is told of every state of the agent."""

    def see(self, state: State) -> None: ...


class Agent:
    """The inbox and its loop."""

    def __init__(
        self,
        config: AgentConfig,
        inbox: Inbox,
        tasks: Tasks,
        membership: Membership,
        workers: LocalWorkers,
        guardian: Guardian | None = None,
        measure: Measure | None = None,
        observers: Sequence[Observer] = (),
        account: "Account | None" = None,
    ) -> None:
        self._config = config
        self._guardian = guardian
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._inbox = inbox
        self._membership = membership
        self._workers = workers
        self._measure = measure
        self._observers = observers
        self._account = account
        self._malformed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._state = State(Local(run=""), config.nproc)
        self._shown = 0, ""  # the last reason that a user was shown, and in which generation
        self._recorder = FlightRecorder()
        self._error: Exception | None = None  # the first one
        self._exit: Exit | LeaveAtOnce | None = None
        self._first = False  # its workers of the last world had rank 0
        self._asked = False  # to leave, by a signal
        self._asked_at = 0.0
        self._signal = signal.SIGTERM  # the one on which this node leaves
        self._watch: Watch | None = None
        self._goes_at: float | None = None  # this machine, as a notice says

    async def live(self) -> int:
        """Join, take part, leave. Raises ElasticEtcdError."""
        # Under nohup the terminal's end is ignored, so it stays ignored.
        hup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [n for n in self._config.signals if n is not signal.SIGHUP or not hup]
        for number in handled:
            self._loop.add_signal_handler(number, self._signalled, number)
        others = {signal.SIGUSR1: self._asked_for_record, signal.SIGUSR2: self._asked_to_drain}
        for number in others.keys() - set(handled):
            self._loop.add_signal_handler(number, others[number])
            handled.append(number)
        if self._config.preemption_watch:
            from elastic_etcd.agent.followers.notices import Watch  # noqa: PLC0415 - only if it is asked for

            self._watch = Watch(self._config.preemption_watch, self._hear_notice)
        try:
            async with self._membership:
                joining = self._tasks.create(self._join())
                try:
                    while self._exit is None:
                        await self._take_event(await self._inbox.get())
                    return await self._leave(self._exit)
                finally:
                    joining.cancel()
        finally:
            self._workers.close()
            if self._watch:
                self._watch.end()
            for number in handled:
                self._loop.remove_signal_handler(number)

    def leave(self, why: str) -> None:
        """Leave the job, as on SIGTERM."""
        log.info("%s: leaving", why)
        self._begin_to_leave()

    def _asked_for_record(self) -> None:
        self._tasks.create(self.write_record("SIGUSR1"))

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
                    self._tell_malformed(set(view.malformed))
                    await self._step(ViewChanged(view))
                self._inbox.rest(time.thread_time() - began)
            case LeaveAtOnce():
                self._exit = incoming
            case FatalError(error):
                self._error = self._error or error
                await self._step(Fatal(Error(str(error))))
            case Unkillable():
                self._exit = Exit(self._give_up_waiting())
            case _:
                await self._step(incoming)

    def _give_up_waiting(self) -> Ending:
        """How this node ends beside processes that don't; a job that is over stays what it was."""
        text = "workers are still there long after SIGKILL (a hung driver or file system?)"
        if isinstance(self._state.ending, Over):
            log.warning("%s; this node ends without them", text)
            return self._state.ending
        self._error = ElasticEtcdError(f"{text}; this node leaves the job")
        return Error(str(self._error))

    async def _step(self, event: Event) -> None:
        if isinstance(event, LeaseLost):
            log.warning("the lease is lost: %s", event.reason)
        now = self._loop.time()
        step = self._recorder.record(self._state, now, event)
        before = self._state
        self._state, step.actions = lifecycle.step(self._state, event, now)
        if self._account:
            self._account.see(before, event, self._state)
        if self._state.local.leaving and not before.local.leaving:
            self._tell_order()
        if self._measure:
            self._measure.see(self._state)
        for action in step.actions:
            self._do(action)
        if self._state.local.lease and self._state.life is not Life.ENDED:
            await self._membership.cover(lifecycle.coverage(self._state))
        self._membership.follow(self._state)
        for observer in self._observers:
            observer.see(self._state)
        if self._guardian:  # an etcd of one's own ends with the agent
            self._guardian.guard(lease=self._state.local.lease if self._config.etcd else 0)

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

    def _do(self, action: Action) -> None:
        match action:
            case Write():
                self._begin_write(action)
            case StartWorkers(now, part):
                self._first = part.group_rank == 0
                self._workers.start(now, part, self._limits)
            case StopWorkers():
                self._stop(action)
            case Rejoin():
                log.info("joining again as another member")
                self._membership.join(self._state.local.run, self._state.local.ran)
            case Exit():
                self._exit = action
            case SetTimer(at):
                if self._timer:
                    self._timer.cancel()
                self._timer = None
                if at is not None:
                    self._timer = self._loop.call_at(at, self._inbox.put, Tick())
            case Log(decision):
                self._log_reason(decision)

    def _log_reason(self, decision: Decision) -> None:
        """Log its reason; one that comes again after others for debugging only is for that, too."""
        level, now = self._level(decision), self._state.view and self._state.view.round
        reason = now.generation if now else 0, decision.reason
        if level > logging.DEBUG:
            level = logging.DEBUG if reason == self._shown else level
            self._shown = reason
        log.log(level, "%s", decision.reason)

    def _begin_write(self, write: Write) -> None:
        now = self._state.view.round if self._state.view else None
        master = None
        if now and now.phase is Phase.JOINABLE and isinstance(write.what, Ack):
            master = self._workers.offer(now.generation, self._membership.reached)
        self._membership.write(self._state, write, master, self._spent())

    def _spent(self) -> Spent | None:
        """Where the seconds of the last world went, if this node knows."""
        view = self._state.view
        last = view.ledger.final if view else self._state.local.ran
        return self._measure.of(last) if self._measure else None

    def _stop(self, stop: StopWorkers) -> None:
        grace, by = stop.grace, stop.by
        seconds = self._seconds(grace) if stop.seconds is None else stop.seconds
        if grace is Grace.FAILURE and self._workers.finished:  # what they do is not spoilt
            seconds = self._seconds(Grace.CHANGE)
        if grace is Grace.LEAVE and seconds is not None:
            seconds = min(seconds, self._time_left())
        if by is not None:
            assert seconds is not None
            log.warning("%s: the workers are stopped (--when-cut-off stop)", _CUT_OFF)
            seconds = max(0.0, min(seconds, by - self._loop.time()))
        park = self._config.park_timeout if grace is Grace.FAILURE else None
        self._workers.stop(seconds, self._notice(grace), park)

    @property
    def _limits(self) -> Limits:
        """The job's, and this node's own before it has joined."""
        return self._state.limits or self._config.limits

    def _seconds(self, grace: Grace) -> float | None:
        """How long workers have; None: as long as they need."""
        given = self._config.shutdown_timeout
        match grace:
            case Grace.LEAVE:
                return self._limits.leave_deadline
            case Grace.JOIN:
                return None
            case Grace.CHANGE | Grace.CUT_OFF:
                return GRACE_CHANGE if given is None else given
            case Grace.FAILURE:
                return GRACE_FAILURE if given is None else given

    def _time_left(self) -> float:
        """Until this machine goes, but for what telling the others takes."""
        if self._goes_at is None:
            return math.inf
        return max(0.0, self._goes_at - LEAVE_TIMEOUT - self._loop.time())

    def _notice(self, grace: Grace) -> Change | Interrupt:
        """Only a world that is whole can stop at a step that all its ranks agree on."""
        generation = self._workers.generation
        if grace is Grace.CUT_OFF:
            return Interrupt(generation, _CUT_OFF)
        if self._state.local.leaving and grace is Grace.LEAVE:
            return Change(generation, "this node is leaving", leaving=True)
        if self._state.local.leaving and grace is Grace.CHANGE:
            return Change(generation, "the job is to stop", leaving=False)
        if grace in (Grace.CHANGE, Grace.JOIN) and self._state.life is not Life.LEAVING:
            return Change(generation, self._state.logged, leaving=False)
        return Interrupt(generation, self._state.logged)

    def _level(self, decision: Decision) -> int:
        """What a user waits for or has to know is told; the rest is for debugging."""
        view = self._state.view
        now = view.round if view else None
        if isinstance(decision, Stop):
            return logging.INFO
        if isinstance(decision, Freeze) and decision.without:
            return logging.WARNING
        if not isinstance(decision, Wait) or view is None or now is None:
            return logging.DEBUG
        if now.phase is Phase.JOINABLE:
            return logging.INFO
        spare = now.phase is Phase.FINAL and not view.part(self._state.local.lease)
        return logging.INFO if spare else logging.DEBUG

    def _tell_malformed(self, malformed: set[str]) -> None:
        for text in malformed - self._malformed:
            log.warning("ignored, not written by this program: %s", text)
        self._malformed = malformed

    def _tell_order(self) -> None:
        """Why this node goes, if people want it; its workers know before they get SIGTERM."""
        local, view = self._state.local, self._state.view
        departure = requests.departure(view, local.run, local.lease) if view else None
        if departure is None:
            return
        log.info("%s: leaving; a signal does not hurry it, a second one does", departure.reason)
        if departure.save:
            self._workers.tell_leaving()

    def _asked_to_drain(self) -> None:
        """By a scheduler that is about to end this node's job; its SIGTERM is no second signal."""
        if not self._state.local.leaving:
            log.info("SIGUSR2: leaving; a signal does not hurry it, a second one does")
        self._begin_to_leave()

    def _signalled(self, number: signal.Signals) -> None:
        if self._asked:
            since = self._loop.time() - self._asked_at
            if number == self._signal == signal.SIGTERM and since < SIGTERM_TWICE:
                return
            log.warning("leaving at once")
            self._inbox.put(LeaveAtOnce(128 + number))
            return
        log.info("%s: leaving; once more to leave at once", signal.Signals(number).name)
        self._asked, self._asked_at = True, self._loop.time()
        self._signal = number
        self._begin_to_leave()

    def _begin_to_leave(self) -> None:
        if not self._state.local.leaving:
            self._workers.tell_leaving()  # before they get SIGTERM
            self._inbox.put(Signalled())

    def _hear_notice(self, notice: "Notice") -> None:
        """From the thread that looks for notices."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take_notice, notice)

    def _take_notice(self, notice: "Notice") -> None:
        """Leave; the signal that often follows a notice is no second one."""
        left = "" if notice.seconds is None else f", in {notice.seconds:.0f} s"
        log.warning("%s%s: leaving", notice.what, left)
        if notice.seconds is not None:
            self._goes_at = self._loop.time() + notice.seconds
            if self._state.local.leaving and self._state.local.stopping:
                self._workers.stop(self._time_left())  # of two words the shorter counts
        self._begin_to_leave()

    async def _leave(self, end: Exit | LeaveAtOnce) -> int:
        """What the agent's end means: an exit code, or an error for the user."""
        if isinstance(end, LeaveAtOnce):
            return end.exit_code
        local = self._state.local
        match end.why:
            case Left():
                await self._workers.end("this node is leaving")
                if local.lease:
                    await self._membership.leave(local, self._spent())
                await self._approve()
                return self._left(local.run)
            case Error(reason):
                await self._workers.end(reason)
                raise self._error or ElasticEtcdError(reason)
            case Outdated() as outdated:
                await self._workers.end(outdated.reason)
                raise self._error or UsageError(f"job {self._config.job}: {outdated.reason}")
            case Over(reason, run):
                await self._workers.end(reason)
                return await self._over(local.run or run, reason)

    async def _approve(self) -> None:
        """The machine may go."""
        if self._watch:
            with suppress(TimeoutError):
                await in_thread(self._watch.approve, APPROVE_TIMEOUT)

    def _left(self, run: str) -> int:
        """The exit code of a node that left: 0 would tell a scheduler that its work is done."""
        outcome = self._state.view.outcome if self._state.view else None
        succeeded = outcome and (outcome.run, outcome.state) == (run, _SUCCEEDED)
        return 0 if succeeded else self._unfinished(run)

    def _unfinished(self, run: str) -> int:
        config, view = self._config, self._state.view
        stopped = view is not None and requests.halted(view, run) is not None
        code = config.stop_exit_code if stopped else None
        code = config.leave_exit_code if code is None else code
        return 128 + self._signal if code is None else code

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
        if self._account:
            self._account.end(outcome)
        if self._first:
            await self._report()
        code = _exit_code(outcome)
        return self._unfinished(run) if outcome.state == _STOPPED else code

    async def _report(self) -> None:
        """Say where the time of the run went, if etcd answers soon."""
        from elastic_etcd.agent.goodput import at_end  # noqa: PLC0415 - once, at the end

        entry = await self._membership.history(self._state.local.ran)
        for line in at_end(entry) if entry else ():
            log.info("%s", line)


def _tell_embedded(config: AgentConfig, endpoint: str) -> None:
    root = f"{config.prefix}/{config.job}"
    log.info("no --etcd: one of its own at %s, for this run only", endpoint)
    log.info("  etcdctl --endpoints=%s get --prefix %s/", endpoint, root)
    if config.limits.max_nodes > 1:
        where = f"--etcd {endpoint} --job {config.job}"
        log.warning("only agents on this host can join, with %s", where)


def _exit_code(outcome: Outcome) -> int:
    """The exit code of a job that ended well, else the error with the root cause."""
    if not outcome.exit_code:
        log.info("%s: %s", outcome.state, outcome.reason)
        return 0
    kinds = (TrainingFailed, BudgetUsedUp, RendezvousTimeout)
    kind = next((k for k in kinds if k.exit_code == outcome.exit_code), TrainingFailed)
    cause = f"\n{_root_cause(outcome.failure)}" if outcome.failure else ""
    raise kind(f"{outcome.reason}{cause}")


def _root_cause(failure: Failure) -> str:
    if not failure.node:
        return f"root cause: {failure}, after {failure.uptime:.1f} s, {failure.at}"
    code = failure.code
    how = failure.hang or f"exit code {code}"
    if code < 0:
        known = -code in set(signal.Signals)
        how = signal.Signals(-code).name if known else f"signal {-code}"
    where = f"rank {failure.rank} (local rank {failure.local_rank}, pid {failure.pid})"
    head = f"root cause: {where} on {failure.node}: {how} after {failure.uptime:.1f} s"
    text = failure.message or "(it left no traceback)"
    return "\n".join([f"{head}, {failure.at}", *(f"  {line}" for line in text.splitlines())])


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
