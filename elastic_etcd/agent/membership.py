"""This agent's side of etcd: its lease and member key, its mirror, and what it writes."""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Self

from msgspec import UNSET, structs

from elastic_etcd import times
from elastic_etcd.agent.address import Reached, own_address
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.agent.inbox import FatalError, MirrorChanged, Tasks
from elastic_etcd.core import lifecycle, requests, schema, writes
from elastic_etcd.core.rules import may_still_save
from elastic_etcd.core.txn import Get, Snapshot, Txn
from elastic_etcd.core.view import Coverage, Everything, Narrow, View, covered, view_of
from elastic_etcd.errors import ElasticEtcdError, EtcdError, EtcdUnreachable, UsageError
from elastic_etcd.etcd import faults
from elastic_etcd.etcd.client import Client, TxnResult
from elastic_etcd.etcd.faults import LeaseNotFound
from elastic_etcd.etcd.mirror import Mirror, first
from elastic_etcd.etcd.retry import boottime, now
from elastic_etcd.etcd.session import Session
from elastic_etcd.system.kernel import NO_DESCRIPTOR, OPEN_AGAIN
from elastic_etcd.version import __version__

if TYPE_CHECKING:
    from elastic_etcd.agent.peer_links import PeerLinks

# In each TTL. Where workers have to be gone with the lease, silence has to be known sooner: half of
# the time until they are stopped is left for another endpoint.
RENEWALS, RENEWALS_STRICT = 3, 6

log = logging.getLogger(__name__)


class Membership:
    """This agent's lease, mirror and writes. All that comes of them is put into the inbox.

    The guardian, if there is one, is told the lease, and until when workers may run without another
    renewal.
    """

    def __init__(
        self, client: Client, config: AgentConfig, tasks: Tasks, guardian: Guardian | None = None
    ) -> None:
        self.keys = schema.Keys(f"{config.prefix}/{config.job}")
        self.reached = Reached()  # --advertise, or this node's address on the way to etcd
        # On a world, as its accounting says.
        self.spent_on: Callable[[int], schema.Spent | None] = lambda _: None
        self._client = client
        self._config = config
        self._inbox = tasks.inbox
        self._tasks = tasks
        self._guardian = guardian
        self._member = schema.Member(0, config.node, config.nproc)
        self.stays_out = False  # it is drained, and waits
        self.other_command = False  # the job was begun with another than this node's
        self._limits = config.limits  # the job's, as soon as they are known
        self._links: PeerLinks | None = None
        if config.has_peers:
            from elastic_etcd.agent import peer_links  # noqa: PLC0415 - not for one node alone

            revoke = partial(client.revoke, timeout=times.REVOKE_TIMEOUT)
            self._links = peer_links.PeerLinks(tasks, revoke)
        self._session: Session | None = None
        self._session_scope = AsyncExitStack()
        self._mirror: Mirror | None = None
        self._mirror_scope = AsyncExitStack()
        self._coverage: Coverage = Narrow()
        self._first = Narrow()
        self._early: Snapshot | None = None
        self._malformed: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._silence = False
        self._refused = False  # the renewal of its lease, and that has been told
        self._changed = asyncio.Event()  # the mirror, since it was last looked at

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._links:
            self._links.close()
        await self._mirror_scope.aclose()
        await self._session_scope.aclose()

    @property
    def lease_left(self) -> float:
        """Seconds until the lease ends if nothing renews it, 0 without one."""
        session = self._session
        if session is None or not session.lease or session.lost.done():
            return 0.0
        return max(0.0, session.renewed + session.ttl - boottime())

    async def look(self) -> None:
        """Read what joining starts from. Raises EtcdError where no etcd answers.

        A job that has succeeded needs nothing that takes long to be loaded.
        """
        self._early = await self._client.range(
            *writes.look(self.keys), timeout=times.CONTACT_TIMEOUT
        )
        command = self._config.command
        over = None if self._config.rerun else writes.succeeded(self.keys, self._early, command)
        if over:
            self._inbox.put(self._why_not(over, again=False))

    async def current(self, generation: int) -> tuple[bool | None, str]:
        """Whether `generation` is the job's current world, or None without etcd; and why not."""
        keys, session = self.keys, self._session
        gets = (Get(keys.round), Get(keys.ledger), Get(keys.member(self._member.lease)))
        try:
            seen = await self._client.range(*gets, timeout=times.CURRENT_TIMEOUT)
        except EtcdError as error:
            return None, str(error)
        view = view_of(seen, self.keys, Narrow())
        now = view.round
        if view.members and view.members[0].leaving and may_still_save(view, generation):
            return True, ""
        if now is None or now.generation != generation or now.phase is not schema.Phase.FINAL:
            return False, f"the job has left generation {generation}"
        if view.members:
            return True, ""
        if session is None or session is not self._session:  # it may be back since it was read
            return None, "this node's lease has ended, and its key is not back yet"
        return False, "this node has lost its lease"

    def join(self, run: str, last: int) -> None:
        """Become a member, of `run` if this agent was in one; answered by Joined or FatalError.

        `last` is the last generation whose workers this agent started. A write of the member
        before that is still on its way is given up: without its key the fence refuses it.
        """
        if self._task:
            self._task.cancel()
        self._begin_task(partial(self._client.refusals.wait_out, partial(self._join, run, last)))

    def relist(self, state: lifecycle.State) -> None:
        """Put the key of the member back under its lease; answered by Relisted or FatalError.

        A write that is still on its way is given up, as by `join`.
        """
        if self._task:
            self._task.cancel()
        if self._session:
            self._session.orphan()
        self._session = None  # its news are no news
        self._begin_task(partial(self._client.refusals.wait_out, partial(self._relist, state)))

    def write(
        self,
        state: lifecycle.State,
        write: lifecycle.Write,
        offer: Callable[[], schema.Master] | None = None,
    ) -> None:
        """Put `write` into etcd, however long that takes; answered by WriteDone or FatalError.

        For an ack `offer` gives where this agent would serve the store. While the system has no
        socket or no port for it, it is tried again.
        """
        at, spent = _timestamp(), self._spent(state)
        build = partial(writes.build, self.keys, state, write, self._member, now=at, spent=spent)
        self._begin_task(partial(self._write, build, offer))

    def _spent(self, state: lifecycle.State) -> schema.Spent | None:
        """The time spent on the last world, if this node knows it."""
        return self.spent_on(state.view.ledger.final if state.view else state.local.ran)

    async def publish(self, txn: Txn) -> bool:
        """Whether `txn`, which nobody waits for, was done, as far as is known."""
        try:
            return (await self._client.txn(txn, times.PUBLISH_TIMEOUT)).succeeded
        except EtcdError as error:
            log.debug("not published: %s", error)
            return False

    async def cover(self, coverage: Coverage) -> None:
        """Mirror what `coverage` asks for; the list comes before the events that follow it."""
        if self._mirror is None and coverage == Narrow():
            coverage = self._first  # its coordinator was seen at joining: no need to list twice
        if self._mirror and coverage == self._coverage:
            return
        await self._mirror_scope.aclose()
        self._coverage = coverage
        ranges = covered(self.keys, coverage, self._member.lease)
        mirror = Mirror(self._client, ranges, self._mirror_changed)
        mirror.failed.add_done_callback(self._inbox.put_error)
        self._mirror = await self._mirror_scope.enter_async_context(mirror)

    def see(self, before: lifecycle.State, event: lifecycle.Event, state: lifecycle.State) -> None:
        """Keep the link to the coordinator that this agent sees, and the lease in safe hands."""
        del before, event
        if self._links:
            self._links.follow(state.view, state.local.lease)
        if self._guardian and self._config.etcd:  # an etcd of one's own ends with the agent
            self._guardian.guard(lease=state.local.lease)

    def view(self) -> View | None:
        """The newest view, None before the first list."""
        snapshot = self._mirror.snapshot() if self._mirror else None
        if snapshot is None:
            return None
        view = view_of(snapshot, self.keys, self._coverage)
        malformed = set(view.malformed)
        for text in malformed - self._malformed:
            log.warning("ignored, not written by this program: %s", text)
        self._malformed = malformed
        return view

    async def outcome(self, run: str) -> schema.Outcome | None:
        """How `run` ended; None if that is nowhere to be found."""
        snapshot = await self._client.range(Get(self.keys.outcome), timeout=times.CONTACT_TIMEOUT)
        outcome = view_of(snapshot, self.keys, Narrow()).outcome
        return outcome if outcome and outcome.run == run else None

    async def history(self, generation: int) -> schema.History | None:
        """The history of a world, None if that can't be had soon."""
        key = self.keys.history(generation)
        try:
            seen = await self._client.range(Get(key), timeout=times.LEAVE_TIMEOUT)
            return schema.decode(schema.History, seen.kvs[key].value) if key in seen.kvs else None
        except (EtcdError, ValueError) as error:
            log.debug("%s: %s", key, error)
            return None

    async def leave(self, state: lifecycle.State) -> None:
        """Leave for good; the last one that does so stops the job."""
        keys, local, spent = self.keys, state.local, self._spent(state)
        once = (keys.ledger, keys.wanted, keys.divergence)
        gets = (*map(Get, once), Get(keys.history(), prefix=True))
        await self._until_known(local.ran)
        try:
            await self._client.txn(writes.leave(keys, local), times.LEAVE_TIMEOUT)
            look = await self._client.txn(Txn(writes.nobody(keys), gets), times.LEAVE_TIMEOUT)
            if look.succeeded:
                view = view_of(_snapshot_of(look), keys, Everything())
                if not view.newer:
                    stop = writes.stop(keys, view, local, _timestamp(), spent)
                    await self._client.txn(stop, times.LEAVE_TIMEOUT)
        except EtcdError as error:
            log.warning("left to its lease, which ends by itself: %s", error)

    async def _until_known(self, generation: int) -> None:
        """Until the mark of leaving is written and the others have begun anew, but not for long.

        A key that goes without it, or too soon for a busy agent, looks like a lost node's.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(times.LEAVE_TIMEOUT):
                if self._task:
                    await asyncio.wait({self._task})
                while self._others_train(generation):
                    self._changed.clear()
                    await self._changed.wait()

    def _others_train(self, generation: int) -> bool:
        view = self.view()
        now = view.round if view else None
        if now is None or (now.phase, now.generation) != (schema.Phase.FINAL, generation):
            return False
        return now.nodes > 1

    def _begin_task(self, work: Callable[[], Awaitable[None]]) -> None:
        """The lifecycle sees to it that etcd is asked for one thing at a time."""
        self._task = self._tasks.create(self._or_fatal(work))

    async def _or_fatal(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ElasticEtcdError as error:
            self._inbox.put(FatalError(error))

    def _mirror_changed(self) -> None:
        self._changed.set()
        self._inbox.put(MirrorChanged())

    async def _join(self, run: str, last: int) -> None:
        """Join with a lease of its own; again, it may take as long as etcd may be away."""
        limit = self._config.etcd_timeout
        again = None if limit is None else max(limit, times.ATTEMPT_TIMEOUT[1])
        try:
            await self._join_within(again if run else times.CONTACT_TIMEOUT, run, last)
        except EtcdUnreachable as error:
            if run:
                raise _given_up(error) from error
            raise

    async def _join_within(self, timeout: float | None, run: str, last: int) -> None:
        await self._mirror_scope.aclose()
        self._mirror = None
        before = self._session
        await self._session_scope.aclose()
        self._silence = self._refused = False
        config = self._config
        self.reached = await own_address(config, self._client.endpoint, self.reached)
        address = self.reached.address
        called = config.proof_of_death and config.limits.max_nodes > 1
        contact = await self._links.open(address) if self._links and called else None
        session = self._new_session(timeout)
        self._session = await self._session_scope.enter_async_context(session)
        if before and not before.lost.done():  # it was given up while etcd did not answer
            with suppress(EtcdError):  # it ends by itself
                await self._client.revoke(before.lease, times.REVOKE_TIMEOUT)
        self._member = schema.Member(
            lease=session.lease,
            node=config.node,
            nproc=config.nproc,
            address=address,
            contact=contact,
            labels=schema.Labels(
                config.topology_label or UNSET,
                config.role if config.role != AgentConfig.role else UNSET,
            ),
            version=__version__,
        )
        by = f"{config.node} (pid {os.getpid()})"
        spec = schema.Spec(run or os.urandom(6).hex(), self._limits, by, command=config.command)
        try:
            await self._enter(spec, again=bool(run), last=last, timeout=timeout)
        except LeaseNotFound:
            self._inbox.put(
                lifecycle.LeaseLost("it ended before it was used: this machine stood still")
            )

    def _new_session(self, timeout: float | None, lease: int = 0) -> Session:
        config = self._config
        session = Session(
            self._client,
            config.lease_ttl,
            often=RENEWALS if config.limits.cut_off is None else RENEWALS_STRICT,
            lease=lease,
            timeout=timeout,
            on_silence=self._silent,
            on_answer=self._answered,
            on_renewed=self._renewed,
        )
        session.lost.add_done_callback(lambda lost: self._lease_lost(session, lost))
        return session

    async def _relist(self, state: lifecycle.State) -> None:
        """Have the lease granted once more, and put the key back where its world stands.

        Others who are refused as well try again after REFUSED_PAUSE at the latest.
        """
        assert state.view
        await self._session_scope.aclose()
        self._silence = self._refused = False
        limit = self._config.etcd_timeout
        timeout = None if limit is None else max(limit, times.ATTEMPT_TIMEOUT[1])
        session = self._new_session(timeout, state.local.lease)
        await self._session_scope.enter_async_context(session)
        txn = writes.relist(self.keys, state.view, state.local, self._member)
        try:
            result = await self._client.txn(txn, timeout)
        except EtcdError:
            session.orphan()
            raise
        self._session = session
        # After a lost answer the first attempt's key is in the way of the next one's fence.
        put_back = result.succeeded or result.ambiguous
        created = next((kv.create for kv in result.gets[0] if put_back), 0)
        await self._mirror_scope.aclose()  # it may be behind, and show that the key is gone
        self._mirror = None
        self._inbox.put(lifecycle.Relisted(created, self._config.lease_ttl + times.REFUSED_PAUSE))

    async def _enter(
        self, spec: schema.Spec, *, again: bool, last: int, timeout: float | None
    ) -> None:
        """Write the member key; whenever somebody else was faster, by what is there now."""
        own = self.keys.member(self._member.lease)
        after = tuple(map(Get, (self.keys.spec, self.keys.round, self.keys.ledger, own)))
        look = writes.look(self.keys)
        early, self._early = self._early, None
        seen = early or await self._client.range(*look, timeout=timeout)
        while True:
            if writes.look_again(self.keys, seen):
                many = writes.look(self.keys, writes.MANY)
                seen = await self._client.range(*many, timeout=timeout)
            rerun = self._config.rerun
            asked = writes.join(
                self.keys, seen, self._member, spec, again=again, rerun=rerun, last=last
            )
            # It may have changed since.
            if isinstance(asked, str | schema.Drain | lifecycle.Over) and seen is early:
                seen = await self._client.range(*look, timeout=timeout)
                continue
            txn = await self._stay_out(seen) if isinstance(asked, schema.Drain) else asked
            if txn is None:
                seen = await self._client.range(*look, timeout=timeout)
                continue
            if not isinstance(txn, Txn):
                self._inbox.put(self._why_not(txn, again=again))
                return
            reading = structs.replace(txn, then=(*txn.then, *after), otherwise=look)
            result = await self._client.txn(reading, timeout)
            seen = _snapshot_of(result)
            if result.succeeded or result.ambiguous:
                break
        entered = seen if result.succeeded else await self._client.range(*after, timeout=timeout)
        self._become_member(entered)

    def _why_not(
        self, why: str | lifecycle.Outdated | lifecycle.Over, *, again: bool
    ) -> lifecycle.Fatal | FatalError:
        """That this node is in no job, or not any more."""
        if isinstance(why, str):
            over = lifecycle.Fatal(lifecycle.Over(why))
            return over if again else FatalError(UsageError(f"job {self._config.job}: {why}"))
        return lifecycle.Fatal(why)

    async def _stay_out(self, seen: Snapshot) -> lifecycle.Over | None:
        """Wait until this node is drained no more, or until the run ends, which is then over."""
        keys, node = self.keys, self._config.node
        before = view_of(seen, keys, Narrow()).outcome
        ask = f"elastic-etcd undrain {self._config.job} {node}"
        log.warning("this node is drained: it waits, without workers, for `%s`", ask)

        def change(snapshot: Snapshot) -> View | None:
            view = view_of(snapshot, keys, Narrow())
            over = view.outcome not in (None, before)
            return view if over or not requests.drained(view, node) else None

        self.stays_out = True
        view = await first(self._client, (Get(keys.wanted), Get(keys.outcome)), change)
        self.stays_out = False
        if view.outcome is None or not requests.drained(view, node):
            return None
        return lifecycle.Over(f"{view.outcome.state}: {view.outcome.reason}", view.outcome.run)

    def _become_member(self, entered: Snapshot) -> None:
        """The member key is written, if it is there still; `entered` was read after that."""
        key = entered.kvs.get(self.keys.member(self._member.lease))
        run = entered.kvs.get(self.keys.spec)
        if key is None or run is None:  # the lease is lost already, or the job over
            self._inbox.put(lifecycle.LeaseLost("its keys were gone at once"))
            return
        view = view_of(entered, self.keys, Narrow())
        if not view.members or view.spec is None:
            self._inbox.put(
                lifecycle.LeaseLost(f"somebody wrote over its keys: {', '.join(view.malformed)}")
            )
            return
        self._member = view.members[0]  # with its run, for the mark of leaving
        self._client.refusals.succeeded()
        self._take_limits(view.spec.limits)
        self._compare_command(view.spec)
        coordinator = view.round.coordinator if view.round else None
        self._first = Narrow(coordinator, self._member.lease % view.spec.limits.pages)
        limits = view.spec.limits
        if limits.cut_off is not None:  # the job says that who is cut off stops, this lease when
            limits = structs.replace(limits, cut_off=float(self._config.lease_ttl))
        joined = lifecycle.Joined(view.spec.run, run.create, self._member.lease, key.create, limits)
        self._inbox.put(joined)
        if self._silence and (since := self._session and self._session.silent_since):
            self._inbox.put(lifecycle.Silent(now() - since))  # to the member that it has become

    def _take_limits(self, jobs: schema.Limits) -> None:
        """From here on the job's count, also when this agent joins again."""
        known, self._limits = self._limits, jobs
        self._set_deadline()
        if jobs != known and (differing := jobs.differing(self._config.limits)):
            log.warning("the job's limits count, not this node's: %s", differing)

    def _compare_command(self, spec: schema.Spec) -> None:
        """Say once that the job trains something else."""
        differs = writes.differ(spec.command, self._config.command)
        if differs and not self.other_command:
            log.warning(
                "%s has begun job %s with another script or other arguments than this node's; "
                "two trainings need two --job ids",
                spec.created_by.partition(" (")[0] or "another node",
                self._config.job,
            )
        self.other_command = differs

    def _set_deadline(self) -> None:
        """An agent that is stopped can't stop its workers before its lease may end."""
        if self._guardian is None or self._session is None:
            return
        until = 0.0
        if self._limits.cut_off is not None:
            ends = self._session.renewed + self._config.lease_ttl
            until = ends - times.KILLED + times.GUARD_LATER
        self._guardian.guard(until=until)

    def _renewed(self, seconds: float) -> None:
        if silent := self._stood_still_for(seconds):
            self._inbox.put(silent)
        self._set_deadline()

    def stood_still(self) -> lifecycle.Silent | None:
        """That this agent has renewed nothing for as long as one that is cut off may run workers.

        It has been stopped, or the machine was. All that is in the inbox is older than that.
        """
        if self._session is None:
            return None
        return self._stood_still_for(boottime() - self._session.renewed)

    def _stood_still_for(self, seconds: float) -> lifecycle.Silent | None:
        """Once each time; Answered follows."""
        session = self._session
        if self._silence or session is None or self._limits.cut_off is None:
            return None
        if seconds < lifecycle.CUT_OFF * self._config.lease_ttl:
            return None
        log.warning("this node stood still: its lease was not renewed for %.1f s", seconds)
        self._silence = True
        session.fall_silent()
        return lifecycle.Silent(seconds)

    async def _write(
        self,
        build: Callable[[schema.Master | None], Txn],
        offer: Callable[[], schema.Master] | None,
    ) -> None:
        txn = build(await _offered(offer) if offer else None)
        result = await self._client.refusals.wait_out(partial(self._client.txn, txn))
        self._inbox.put(lifecycle.WriteDone(result.succeeded))

    def _lease_lost(self, session: Session, lost: asyncio.Future[str]) -> None:
        if session is not self._session or lost.cancelled():
            return
        if lost.exception():
            self._inbox.put_error(lost)
        else:
            self._inbox.put(lifecycle.LeaseLost(lost.result()))

    def _silent(self, seconds: float, error: Exception) -> None:
        train_on = self._limits.cut_off is None
        if isinstance(error, EtcdError):  # it answers, but not as it should
            if not self._refused:
                self._refused = True
                then = "and its key with it" if train_on else "its workers before"
                text = "this node's lease is not renewed and ends in %.0f s, %s: %s"
                log.warning(text, self.lease_left, then, error)
        elif not self._silence:
            then = "training goes on" if train_on else "workers are stopped before the lease ends"
            log.warning("etcd does not answer at %s; %s", error, then)
        if not self._silence:
            self._silence = True
            self._inbox.put(lifecycle.Silent(seconds))
        limit = self._config.etcd_timeout
        if limit is not None and seconds > limit and not isinstance(error, EtcdError):
            why = faults.unreachable(self._client.endpoints, str(error), seconds)
            self._inbox.put(FatalError(_given_up(why)))

    def _answered(self) -> None:
        refused, self._silence, self._refused = self._refused, False, False
        self._inbox.put(lifecycle.Answered())
        then = "renews this node's lease" if refused else "answers"
        log.info("etcd %s again at %s", then, self._client.endpoint)


async def _offered(offer: Callable[[], schema.Master]) -> schema.Master:
    """Raises OSError if the system has nothing to give for long."""
    until = boottime() + times.NOTHING_FREE
    told = False
    while True:
        try:
            return offer()
        except OSError as error:
            if error.errno not in (*NO_DESCRIPTOR, errno.EADDRINUSE) or boottime() > until:
                raise
            if not told:
                text = "no socket for the store: %s: this node is ready when there is one"
                log.warning(text, error.strerror)
            told = True
        await asyncio.sleep(OPEN_AGAIN)


def _given_up(error: EtcdUnreachable) -> EtcdUnreachable:
    return EtcdUnreachable(f"{error}\nIt was given up by --etcd-timeout.")


def _snapshot_of(result: TxnResult) -> Snapshot:
    return Snapshot(result.revision, {kv.key: kv for got in result.gets for kv in got})


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
