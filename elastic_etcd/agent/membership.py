"""This agent's side of etcd: its lease and member key, its mirror, and what it writes."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Never, Self

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core import joining, writes
from elastic_etcd.core.events import (
    Broken,
    Event,
    Joined,
    LeaseLost,
    Write,
    Wrote,
)
from elastic_etcd.core.keys import Keys
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.rules import Me
from elastic_etcd.core.txn import Get, KeyValue, Snapshot, Txn
from elastic_etcd.core.values import Master, Member, Outcome, Phase, Spec
from elastic_etcd.core.view import EVERYTHING, Coverage, View, covered, view_of
from elastic_etcd.errors import EtcdDenied, EtcdError, EtcdRefused, EtcdUnreachable, UsageError
from elastic_etcd.etcd.client import Client, TxnResult
from elastic_etcd.etcd.faults import LEASE_NOT_FOUND
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.session import Session
from elastic_etcd.version import __version__

START_TIMEOUT = 10.0  # for an etcd that was never seen; one that was is waited for
LEAVE_TIMEOUT = 2.0
CURRENT_TIMEOUT = 5.0
REFUSED_PAUSE = 5.0  # at most, between two tries of what an administrator has to make possible

log = logging.getLogger(__name__)


class Membership:
    """What ties this agent to its job. Events go to `post`; `changed` says that the view did."""

    def __init__(
        self,
        client: Client,
        config: AgentConfig,
        post: Callable[[Event], None],
        changed: Callable[[], None],
    ) -> None:
        self.keys = Keys(f"{config.prefix}/{config.job}")
        self._client = client
        self._config = config
        self._post = post
        self._changed = changed
        self._member = Member(0, config.node, config.nproc)
        self._session: Session | None = None
        self._session_scope = AsyncExitStack()
        self._mirror: Mirror | None = None
        self._mirror_scope = AsyncExitStack()
        self._coverage: Coverage = None
        self._first: Coverage = None
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
        """Where the other nodes reach this one: the address of the socket to etcd."""
        return self._member.address

    async def look(self) -> None:
        """Raises EtcdError where no etcd answers, so that a user need not wait for that."""
        self._looked = await self._client.range(*joining.look(self.keys), timeout=START_TIMEOUT)

    async def current(self, generation: int) -> tuple[bool | None, str]:
        """Whether `generation` is the job's present world, and why not; None: it can't be known."""
        gets = (Get(self.keys.round), Get(self.keys.member(self._member.lease)))
        try:
            seen = await self._client.range(*gets, timeout=CURRENT_TIMEOUT)
        except EtcdError as error:
            return None, str(error)
        view = view_of(seen, self.keys, None)
        now = view.round
        if not view.members:
            return False, "this node has lost its lease"
        if now is None or now.generation != generation or now.phase is not Phase.FINAL:
            return False, f"the job has left generation {generation}"
        return True, ""

    def join(self, run: str, last: int) -> None:
        """Become a member, of `run` if this agent was in one; answered by Joined or Broken.

        `last` is the last generation whose workers this agent started. A write of the member
        before that is still on its way is given up: without its key the fence refuses it.
        """
        if self._task:
            self._task.cancel()
        work = self._join
        self._run(_waiting_out(EtcdRefused)(work, run, last) if run else work(run, last))

    def write(self, state: State, write: Write, master: Master | None) -> None:
        """Put `write` into etcd, however long that takes; answered by Wrote or Broken."""
        txn = writes.build(self.keys, state, write, self._member, master, _now())
        self._run(self._commit(txn))

    async def cover(self, coverage: Coverage) -> None:
        """Mirror what `coverage` asks for; the list comes before the events that follow it."""
        if self._mirror is None and coverage is None:
            coverage = self._first  # its coordinator was seen at joining: no need to list twice
        if self._mirror and coverage == self._coverage:
            return
        await self._mirror_scope.aclose()
        self._coverage = coverage
        mirror = Mirror(self._client, self._covered(coverage), self._changed)
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
        snapshot = await self._client.range(Get(self.keys.outcome), timeout=START_TIMEOUT)
        outcome = view_of(snapshot, self.keys, None).outcome
        return outcome if outcome and outcome.run == run else None

    async def leave(self, me: Me) -> None:
        """Leave for good; the last one that does so stops the job."""
        keys = self.keys
        gets = (Get(keys.generation), Get(keys.history(), prefix=True))
        try:
            await self._client.txn(writes.leave(keys, me), LEAVE_TIMEOUT)
            look = await self._client.txn(Txn(writes.nobody(keys), gets), LEAVE_TIMEOUT)
            if look.succeeded:
                view = view_of(_read(look), keys, EVERYTHING)
                await self._client.txn(writes.stop(keys, view, me, _now()), LEAVE_TIMEOUT)
        except EtcdError as error:
            log.warning("left to its lease, which ends by itself: %s", error)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        """One thing at a time is asked of etcd; the lifecycle sees to that."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._failed)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._post(Broken(_ordinary(error)))

    def _mirror_failed(self, future: asyncio.Future[Never]) -> None:
        if not future.cancelled() and (error := future.exception()):
            self._post(Broken(_ordinary(error)))

    async def _join(self, run: str, last: int) -> None:
        timeout = None if run else START_TIMEOUT
        await self._mirror_scope.aclose()
        self._mirror = None
        await self._session_scope.aclose()
        config = self._config
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
            address=config.advertise or self._client.local_address(),
            topology=config.topology_label,
            version=__version__,
        )
        by = f"{config.node} (pid {os.getpid()})"
        spec = Spec(run or os.urandom(6).hex(), config.min_nodes, config.max_nodes, by)
        try:
            await self._enter(spec, again=bool(run), last=last, timeout=timeout)
        except EtcdRefused as error:
            if LEASE_NOT_FOUND not in str(error):
                raise
            self._post(LeaseLost("it ended before it was used: this machine stood still"))

    async def _enter(self, spec: Spec, *, again: bool, last: int, timeout: float | None) -> None:
        """Write the member key; whenever somebody else was faster, by what is there now."""
        own = self.keys.member(self._member.lease)
        after, look = (Get(self.keys.spec), Get(self.keys.round), Get(own)), joining.look(self.keys)
        early, self._looked = self._looked, None
        seen = early or await self._client.range(*look, timeout=timeout)
        while True:
            txn = joining.join(self.keys, seen, self._member, spec, again=again, last=last)
            if isinstance(txn, str) and seen is early:  # it may have changed since
                seen = await self._client.range(*look, timeout=timeout)
                continue
            if isinstance(txn, str) and again:
                self._post(Broken(txn))
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
            self._post(LeaseLost("its keys were gone at once"))
            return
        view = view_of(entered, self.keys, None)
        if not view.members or view.spec is None:
            self._post(LeaseLost(f"somebody wrote over its keys: {', '.join(view.malformed)}"))
            return
        self._member = view.members[0]  # with its run, for the mark of leaving
        self._first = view.round.coordinator if view.round else None
        self._post(_joined(key, run, view, self._member.lease))

    async def _commit(self, txn: Txn) -> None:
        result: TxnResult = await _waiting_out(EtcdRefused, EtcdDenied)(self._client.txn, txn)
        self._post(Wrote(result.succeeded))

    def _lost(self, session: Session, lost: asyncio.Future[str]) -> None:
        if session is not self._session or lost.cancelled():
            return
        error = lost.exception()
        self._post(Broken(_ordinary(error)) if error else LeaseLost(lost.result()))

    def _silent(self, seconds: float) -> None:
        limit = self._config.etcd_timeout
        if not self._silence:
            self._silence = True
            log.warning("etcd does not answer at %s; training goes on", self._client.endpoint)
        if limit is not None and seconds > limit:
            late = f"etcd at {self._client.endpoint} has not answered for {seconds:.0f} s"
            self._post(Broken(EtcdUnreachable(f"{late} (--etcd-timeout)")))

    def _answered(self) -> None:
        self._silence = False
        log.info("etcd answers again at %s", self._client.endpoint)


def _waiting_out(*refusals: type[EtcdError]) -> AsyncRetrying:
    """Tells of a refusal (no space, no permission) and asks again: the training is not to end."""

    def tell(state: RetryCallState) -> None:
        assert state.outcome is not None
        log.warning("%s", state.outcome.exception())

    kinds = retry_if_exception_type(refusals)
    return AsyncRetrying(retry=kinds, wait=wait_exponential(max=REFUSED_PAUSE), before_sleep=tell)


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
