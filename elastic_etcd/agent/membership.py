"""This agent's side of etcd: its lease and member key, its mirror, and what it writes."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Never, Self, TypeVar

from msgspec import UNSET

from elastic_etcd.agent.address import own_address
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import FatalError, Inbox, MirrorChanged, Tasks
from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import (
    Answered,
    Fatal,
    Joined,
    LeaseLost,
    Outdated,
    Over,
    Silent,
    State,
    Write,
    WriteDone,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Keys, Labels, Master, Member, Outcome, Phase, Spec
from elastic_etcd.core.txn import Get, KeyValue, Snapshot, Txn
from elastic_etcd.core.view import Coverage, Everything, Narrow, View, covered, view_of
from elastic_etcd.errors import (
    ElasticEtcdError,
    EtcdDenied,
    EtcdError,
    EtcdRefused,
    EtcdUnreachable,
    UsageError,
)
from elastic_etcd.etcd.client import Client, TxnResult
from elastic_etcd.etcd.faults import LeaseNotFound
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.retry import Attempts
from elastic_etcd.etcd.session import Session
from elastic_etcd.times import (
    ATTEMPT_TIMEOUT,
    CONTACT_TIMEOUT,
    CURRENT_TIMEOUT,
    LEAVE_TIMEOUT,
    REFUSED_PAUSE,
)
from elastic_etcd.version import __version__

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Membership:
    """This agent's lease, mirror and writes. What comes of them is put into the inbox."""

    def __init__(self, client: Client, config: AgentConfig, inbox: Inbox, tasks: Tasks) -> None:
        self.keys = Keys(f"{config.prefix}/{config.job}")
        self._client = client
        self._config = config
        self._inbox = inbox
        self._tasks = tasks
        self._member = Member(0, config.node, config.nproc)
        self._session: Session | None = None
        self._session_scope = AsyncExitStack()
        self._mirror: Mirror | None = None
        self._mirror_scope = AsyncExitStack()
        self._coverage: Coverage = Narrow()
        self._first = Narrow()
        self._looked: Snapshot | None = None
        self._task: asyncio.Task[None] | None = None
        self._silence = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._mirror_scope.aclose()
        await self._session_scope.aclose()

    @property
    def address(self) -> str:
        """Where the other nodes reach this one: --advertise, or its address on the way to etcd."""
        return self._member.address

    async def look(self) -> None:
        """Read what joining starts from. Raises EtcdError where no etcd answers."""
        self._looked = await self._client.range(*writes.look(self.keys), timeout=CONTACT_TIMEOUT)

    async def current(self, generation: int) -> tuple[bool | None, str]:
        """Whether `generation` is the job's current world, or None without etcd; and why not."""
        gets = (Get(self.keys.round), Get(self.keys.member(self._member.lease)))
        try:
            seen = await self._client.range(*gets, timeout=CURRENT_TIMEOUT)
        except EtcdError as error:
            return None, str(error)
        view = view_of(seen, self.keys, Narrow())
        now = view.round
        if not view.members:
            return False, "this node has lost its lease"
        if now is None or now.generation != generation or now.phase is not Phase.FINAL:
            return False, f"the job has left generation {generation}"
        return True, ""

    def join(self, run: str, last: int) -> None:
        """Become a member, of `run` if this agent was in one; answered by Joined or FatalError.

        `last` is the last generation whose workers this agent started. A write of the member
        before that is still on its way is given up: without its key the fence refuses it.
        """
        if self._task:
            self._task.cancel()
        work = partial(self._join, run, last)
        self._run(_waiting_out(work, EtcdRefused) if run else work())

    def write(self, state: State, write: Write, master: Master | None) -> None:
        """Put `write` into etcd, however long that takes; answered by WriteDone or FatalError."""
        txn = writes.build(self.keys, state, write, self._member, master, _now())
        self._run(self._commit(txn))

    async def cover(self, coverage: Coverage) -> None:
        """Mirror what `coverage` asks for; the list comes before the events that follow it."""
        if self._mirror is None and coverage == Narrow():
            coverage = self._first  # its coordinator was seen at joining: no need to list twice
        if self._mirror and coverage == self._coverage:
            return
        await self._mirror_scope.aclose()
        self._coverage = coverage
        mirror = Mirror(self._client, self._covered(coverage), self._mirror_changed)
        mirror.failed.add_done_callback(self._mirror_failed)
        self._mirror = await self._mirror_scope.enter_async_context(mirror)

    def _covered(self, coverage: Coverage) -> tuple[Get, ...]:
        return covered(self.keys, coverage, self._member.lease)

    def view(self) -> View | None:
        """The newest view, None before the first list."""
        snapshot = self._mirror.snapshot() if self._mirror else None
        return view_of(snapshot, self.keys, self._coverage) if snapshot else None

    async def outcome(self, run: str) -> Outcome | None:
        """How `run` ended; None if that is nowhere to be found."""
        snapshot = await self._client.range(Get(self.keys.outcome), timeout=CONTACT_TIMEOUT)
        outcome = view_of(snapshot, self.keys, Narrow()).outcome
        return outcome if outcome and outcome.run == run else None

    async def leave(self, local: Local) -> None:
        """Leave for good; the last one that does so stops the job."""
        keys = self.keys
        gets = (Get(keys.ledger), Get(keys.history(), prefix=True))
        try:
            await self._client.txn(writes.leave(keys, local), LEAVE_TIMEOUT)
            look = await self._client.txn(Txn(writes.nobody(keys), gets), LEAVE_TIMEOUT)
            if look.succeeded:
                view = view_of(_read(look), keys, Everything())
                if not view.newer:
                    await self._client.txn(writes.stop(keys, view, local, _now()), LEAVE_TIMEOUT)
        except EtcdError as error:
            log.warning("left to its lease, which ends by itself: %s", error)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        """One thing at a time is asked of etcd; the lifecycle sees to that."""
        self._task = self._tasks.create(self._or_fatal(work))

    async def _or_fatal(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except ElasticEtcdError as error:
            self._inbox.put(FatalError(error))

    def _mirror_changed(self) -> None:
        self._inbox.put(MirrorChanged())

    def _mirror_failed(self, future: asyncio.Future[Never]) -> None:
        if not future.cancelled() and (error := future.exception()):
            self._inbox.put(FatalError(_ordinary(error)))

    async def _join(self, run: str, last: int) -> None:
        """Join with a lease of its own; again, it may take as long as etcd may be away."""
        try:
            await self._join_within(self._again_timeout if run else CONTACT_TIMEOUT, run, last)
        except EtcdUnreachable as error:
            if run:
                raise EtcdUnreachable(f"{error}\nIt was given up by --etcd-timeout.") from error
            raise

    @property
    def _again_timeout(self) -> float | None:
        limit = self._config.etcd_timeout
        return None if limit is None else max(limit, ATTEMPT_TIMEOUT[1])

    async def _join_within(self, timeout: float | None, run: str, last: int) -> None:
        await self._mirror_scope.aclose()
        self._mirror = None
        await self._session_scope.aclose()
        self._silence = False
        config = self._config
        address = await own_address(config, self._client.endpoint, self._member.address)
        session = Session(
            self._client,
            config.lease_ttl,
            timeout=timeout,
            on_silence=self._silent,
            on_answer=self._answered,
        )
        session.lost.add_done_callback(lambda lost: self._lost(session, lost))
        self._session = await self._session_scope.enter_async_context(session)
        self._member = Member(
            lease=session.lease,
            node=config.node,
            nproc=config.nproc,
            address=address,
            labels=Labels(config.topology_label or UNSET),
            version=__version__,
        )
        by = f"{config.node} (pid {os.getpid()})"
        limits = config.limits
        spec = Spec(run or os.urandom(6).hex(), limits.min_nodes, limits.max_nodes, by)
        try:
            await self._enter(spec, again=bool(run), last=last, timeout=timeout)
        except LeaseNotFound:
            self._inbox.put(LeaseLost("it ended before it was used: this machine stood still"))

    async def _enter(self, spec: Spec, *, again: bool, last: int, timeout: float | None) -> None:
        """Write the member key; whenever somebody else was faster, by what is there now."""
        own = self.keys.member(self._member.lease)
        after, look = (Get(self.keys.spec), Get(self.keys.round), Get(own)), writes.look(self.keys)
        early, self._looked = self._looked, None
        seen = early or await self._client.range(*look, timeout=timeout)
        while True:
            txn = writes.join(self.keys, seen, self._member, spec, again=again, last=last)
            if isinstance(txn, Outdated):
                self._inbox.put(Fatal(txn))
                return
            if isinstance(txn, str) and seen is early:  # it may have changed since
                seen = await self._client.range(*look, timeout=timeout)
                continue
            if isinstance(txn, str) and again:
                self._inbox.put(Fatal(Over(txn)))
                return
            if isinstance(txn, str):
                raise UsageError(f"job {self._config.job}: {txn}")
            reading = replace(txn, then=(*txn.then, *after), otherwise=look)
            result = await self._client.txn(reading, timeout)
            seen = _read(result)
            if result.succeeded or result.ambiguous:
                break
        entered = seen if result.succeeded else await self._client.range(*after, timeout=timeout)
        self._take(entered)

    def _take(self, entered: Snapshot) -> None:
        """The member key is written, if it is there still; `entered` was read after that."""
        key = entered.kvs.get(self.keys.member(self._member.lease))
        run = entered.kvs.get(self.keys.spec)
        if key is None or run is None:  # the lease is lost already, or the job over
            self._inbox.put(LeaseLost("its keys were gone at once"))
            return
        view = view_of(entered, self.keys, Narrow())
        if not view.members or view.spec is None:
            self._inbox.put(LeaseLost(f"somebody wrote over its keys: {', '.join(view.malformed)}"))
            return
        self._member = view.members[0]  # with its run, for the mark of leaving
        self._first = Narrow(view.round.coordinator if view.round else None)
        self._inbox.put(_joined(key, run, view, self._member.lease))

    async def _commit(self, txn: Txn) -> None:
        result = await _waiting_out(partial(self._client.txn, txn), EtcdRefused, EtcdDenied)
        self._inbox.put(WriteDone(result.succeeded))

    def _lost(self, session: Session, lost: asyncio.Future[str]) -> None:
        if session is not self._session or lost.cancelled():
            return
        error = lost.exception()
        self._inbox.put(FatalError(_ordinary(error)) if error else LeaseLost(lost.result()))

    def _silent(self, seconds: float) -> None:
        limit = self._config.etcd_timeout
        if not self._silence:
            self._silence = True
            self._inbox.put(Silent(seconds))
            log.warning("etcd does not answer at %s; training goes on", self._client.endpoint)
        if limit is not None and seconds > limit:
            late = f"etcd at {self._client.endpoint} has not answered for {seconds:.0f} s"
            self._inbox.put(FatalError(EtcdUnreachable(f"{late} (--etcd-timeout)")))

    def _answered(self) -> None:
        self._silence = False
        self._inbox.put(Answered())
        log.info("etcd answers again at %s", self._client.endpoint)


async def _waiting_out(work: Callable[[], Awaitable[Result]], *refusals: type[EtcdError]) -> Result:
    """Repeat `work` that is refused (no space, no permission), with a warning: training goes on."""

    async def ask() -> Result:
        try:
            return await work()
        except refusals as refusal:
            log.warning("%s", refusal)
            raise

    return await Attempts(on=refusals, pause=_refused_pause).run(ask)


def _refused_pause(number: int) -> float:
    return min(2.0 ** min(number - 1, 3), REFUSED_PAUSE)


def _read(result: TxnResult) -> Snapshot:
    return Snapshot(result.revision, {kv.key: kv for got in result.gets for kv in got})


def _joined(key: KeyValue, spec: KeyValue, view: View, lease: int) -> Joined:
    assert view.spec is not None
    return Joined(view.spec.run, spec.create, lease, key.create)


def _ordinary(error: BaseException) -> Exception:
    if not isinstance(error, Exception):
        raise error
    return error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
