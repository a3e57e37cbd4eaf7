"""One node of a job: a mailbox of events, and a loop that does what core/lifecycle.py says.

Nothing is decided here. Views, worker exits, a lost lease, signals and timers are put into
one mailbox; each is stepped through the lifecycle, and the actions that come out are done.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.console import ConsoleHandler
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.host import Current, Host, Post, check_devices
from elastic_etcd.agent.logs import Logs
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.workers import Notice
from elastic_etcd.core import lifecycle
from elastic_etcd.core.events import (
    Action,
    Arm,
    Broken,
    Emptied,
    Event,
    Exit,
    Grace,
    LeaseLost,
    Rejoin,
    Say,
    Signalled,
    Start,
    Stop,
    Ticked,
    Viewed,
    Write,
)
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Act, Decision, Limits, Me
from elastic_etcd.core.values import Failure, Outcome, Phase
from elastic_etcd.errors import (
    BudgetUsedUp,
    ElasticEtcdError,
    RendezvousTimeout,
    TrainingFailed,
)
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.embedded import EmbeddedEtcd

GRACE = {Grace.FAILURE: 3.0, Grace.CHANGE: 10.0, Grace.LEAVE: 30.0}
UNKILLABLE = 30.0  # seconds after SIGKILL

log = logging.getLogger(__name__)


def run(config: AgentConfig) -> int:
    """Be this node's agent until the job is over here; gives the exit code.

    Raises ElasticEtcdError for what the user is to be told: what failed, where, what to do.
    """
    check_devices(config)
    return asyncio.run(_run(config))


async def _run(config: AgentConfig) -> int:
    async with AsyncExitStack() as scope:
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        names = {"job": config.job, "node": config.node, "role": config.role}
        logs = await scope.enter_async_context(Logs.open(config.log, template=template, **names))
        scope.enter_context(_through(logs))
        etcd = config.etcd
        if etcd is None:
            embedded = await scope.enter_async_context(EmbeddedEtcd())
            etcd = EtcdConfig((embedded.endpoint,))
            root = f"{config.prefix}/{config.job}"
            log.info("no --etcd: one of its own at %s, for this run only", embedded.endpoint)
            log.info("  etcdctl --endpoints=%s get --prefix %s/", embedded.endpoint, root)
            if config.max_nodes > 1:
                where = f"--etcd {embedded.endpoint} --job {config.job}"
                log.warning("only agents on this host can join, with %s", where)
        guardian = Guardian(etcd, log.warning)
        guardian.start()
        scope.callback(guardian.dismiss)
        client = await scope.enter_async_context(Client(etcd))
        return await Agent(config, client, guardian, partial(Host, config, logs)).live()


class Agent:
    """The mailbox and its loop. `host` makes the Host, given its last three arguments."""

    def __init__(
        self,
        config: AgentConfig,
        client: Client,
        guardian: Guardian,
        host: Callable[[Post, Callable[[], None], Current], Host],
    ) -> None:
        self._config = config
        self._guardian = guardian
        self._limits = Limits(
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            max_restarts=config.max_restarts,
            restart_window=config.restart_window,
            min_uptime=config.min_uptime,
            settle=config.settle,
            join_timeout=config.join_timeout,
        )
        self._loop = asyncio.get_running_loop()
        self._mailbox: asyncio.Queue[Event | None] = asyncio.Queue()  # None: look at the mirror
        self._looking = False
        self._malformed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._state = State(Me(run=""), config.nproc)
        self._membership = Membership(client, config, self._mailbox.put_nowait, self._changed)
        current = self._membership.current
        self._host = host(self._mailbox.put_nowait, self._guard, current)
        self._exit: Exit | None = None
        self._at_once: int | None = None

    async def live(self) -> int:
        """Join, take part, leave. Raises ElasticEtcdError."""
        # Under nohup the terminal's end is ignored, so it stays ignored.
        hup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [n for n in self._config.signals if n is not signal.SIGHUP or not hup]
        for number in handled:
            self._loop.add_signal_handler(number, self._signalled, number)
        try:
            async with self._membership:
                joining = asyncio.create_task(self._join())
                try:
                    while self._exit is None and self._at_once is None:
                        await self._next()
                finally:
                    joining.cancel()
                return await self._leave()
        finally:
            self._host.close()
            for number in handled:
                self._loop.remove_signal_handler(number)

    async def _next(self) -> None:
        event = await self._mailbox.get()
        if event is None:
            self._looking = False
            view = self._membership.view()
            if view is None:
                return
            for text in set(view.malformed) - self._malformed:
                log.warning("ignored, not written by this program: %s", text)
            self._malformed = set(view.malformed)
            event = Viewed(view)
        if isinstance(event, Emptied) and self._stuck:
            self._stuck.cancel()
        if isinstance(event, LeaseLost):
            log.warning("the lease is lost: %s", event.reason)
        self._state, actions = lifecycle.step(self._state, event, self._loop.time(), self._limits)
        for action in actions:
            self._do(action)
        if self._state.me.lease and not self._state.over:
            await self._membership.cover(lifecycle.coverage(self._state))
        self._guard()

    async def _join(self) -> None:
        """Be warm before joining, so that nobody waits for this node's imports."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._membership.look())  # a wrong address is told at once
                group.create_task(self._host.warm())
        except* ElasticEtcdError as errors:
            self._mailbox.put_nowait(Broken(errors.exceptions[0]))
        else:
            self._membership.join(run="", last=0)

    def _guard(self) -> None:
        lease = self._state.me.lease if self._config.etcd else 0  # one of our own ends with us
        self._guardian.guard(lease, self._host.groups)

    def _do(self, action: Action) -> None:
        match action:
            case Write():
                self._write(action)
            case Start(now):
                self._host.start(self._state.me.lease, now)
            case Stop(grace):
                self._stop(grace)
            case Rejoin():
                log.info("joining again as another member")
                self._membership.join(self._state.me.run, self._state.me.ran)
            case Exit():
                self._exit = action
            case Arm(at):
                if self._timer:
                    self._timer.cancel()
                self._timer = None
                if at is not None:
                    self._timer = self._loop.call_at(at, self._mailbox.put_nowait, Ticked())
            case Say(decision):
                log.log(self._level(decision), "%s", decision.reason)

    def _write(self, write: Write) -> None:
        now = self._state.view.round if self._state.view else None
        master = None
        if now and isinstance(write.what, Decision) and write.what.act is Act.ACK:
            master = self._host.offer(now.generation, self._membership.address)
        self._membership.write(self._state, write, master)

    def _stop(self, grace: Grace) -> None:
        given, notice = self._config.shutdown_timeout, self._notice(grace)
        if grace is Grace.CHANGE and self._host.elastic:
            grace = Grace.LEAVE  # a whole step may have to end first, and nothing is lost then
        seconds = GRACE[grace] if given is None else given
        self._host.stop(seconds, notice)
        self._stuck = self._loop.call_later(seconds + UNKILLABLE, self._unkillable)

    def _notice(self, grace: Grace) -> Notice:
        """Only a world that is whole can stop at a step that all its ranks agree on."""
        if self._state.me.leaving and grace is Grace.LEAVE:
            return Notice("change", "this node is leaving", leaving=True)
        whole = grace is Grace.CHANGE and self._state.ending is None
        return Notice("change" if whole else "interrupt", self._state.said)

    def _level(self, decision: Decision) -> int:
        """What a user waits for or has to know is told; the rest is for debugging."""
        now = self._state.view.round if self._state.view else None
        if decision.act is Act.STOP:
            return logging.INFO
        if decision.act is not Act.WAIT or now is None:
            return logging.DEBUG
        if now.phase is Phase.JOINABLE:
            return logging.INFO
        spare = now.phase is Phase.FINAL and now.place(self._state.me.lease) is None
        return logging.INFO if spare else logging.DEBUG

    def _changed(self) -> None:
        """Many events may come before the next look; one look sees them all."""
        if not self._looking:
            self._looking = True
            self._mailbox.put_nowait(None)

    def _signalled(self, number: int) -> None:
        if self._state.me.leaving:
            log.warning("leaving at once")
            self._at_once = 128 + number
            self._mailbox.put_nowait(None)
            return
        log.info("%s: leaving; once more to leave at once", signal.Signals(number).name)
        self._mailbox.put_nowait(Signalled())

    def _unkillable(self) -> None:
        text = "workers are still there long after SIGKILL (a hung driver or file system?)"
        self._exit = Exit(ElasticEtcdError(f"{text}; this node leaves the job"))
        self._mailbox.put_nowait(None)

    async def _leave(self) -> int:
        """What the agent's end means: an exit code, or an error for the user."""
        if self._at_once is not None:
            return self._at_once
        assert self._exit is not None
        why, me = self._exit.why, self._state.me
        await self._host.end(str(why or "this node is leaving"))
        if isinstance(why, Exception):
            raise why
        if why is None:
            if me.lease:
                await self._membership.leave(me)
            return 0
        outcome = self._state.view.outcome if self._state.view else None
        if outcome is None or outcome.run != me.run:
            outcome = await self._membership.outcome(me.run)
        if outcome is None:
            raise ElasticEtcdError(f"job {self._config.job}: {why}, this node was cut off")
        return _told(outcome)


def _told(outcome: Outcome) -> int:
    """The exit code of a job that ended well, else the error with the root cause."""
    if not outcome.exit_code:
        log.info("%s: %s", outcome.state, outcome.reason)
        return 0
    kinds = (TrainingFailed, BudgetUsedUp, RendezvousTimeout)
    kind = next((k for k in kinds if k.exit_code == outcome.exit_code), TrainingFailed)
    cause = f"\n{_root_cause(outcome.failure)}" if outcome.failure else ""
    raise kind(f"{outcome.reason}{cause}")


def _root_cause(failure: Failure) -> str:
    code = failure.code
    how = f"exit code {code}"
    if code < 0:
        known = -code in set(signal.Signals)
        how = signal.Signals(-code).name if known else f"signal {-code}"
    where = f"rank {failure.rank} (local rank {failure.local_rank}, pid {failure.pid})"
    head = f"root cause: {where} on {failure.node}: {how} after {failure.uptime:.1f} s"
    text = failure.message or "(it left no traceback)"
    return "\n".join([f"{head}, {failure.at}", *(f"  {line}" for line in text.splitlines())])


@contextmanager
def _through(logs: Logs) -> Iterator[None]:
    """Log lines go the way of the workers' output: a stuck terminal must not stall the loop."""
    root = logging.getLogger("elastic_etcd")
    before = list(root.handlers)
    handler = ConsoleHandler(logs.stderr)
    if before:
        handler.setFormatter(before[0].formatter)
    root.handlers[:] = [handler]
    try:
        yield
    finally:
        root.handlers[:] = before
