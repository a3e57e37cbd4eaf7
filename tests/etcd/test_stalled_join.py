"""A lease that ends while its holder is busy: still joining, or slow to see what has changed."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import FatalError, MirrorChanged
from elastic_etcd.core import lifecycle
from elastic_etcd.core.lifecycle import (
    Answered,
    Joined,
    LeaseLost,
    Life,
    Rejoin,
    Relist,
    Silent,
    State,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Limits, Master, Phase, Round, encode
from elastic_etcd.core.txn import Get, Put, Snapshot, Txn
from elastic_etcd.core.view import Narrow
from elastic_etcd.errors import EtcdUnreachable
from elastic_etcd.etcd._grpc import WATCH
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client, LeaseGrant, TxnResult
from elastic_etcd.etcd.faults import Unanswered
from elastic_etcd.etcd.retry import boottime
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer
from tests.support.membership import joining
from tests.support.proxy import proxy


class Stalled(Client):
    """Its leases end before the answer is heard, the first so many times."""

    times = 1

    async def grant(self, ttl: int, timeout: float | None = None, lease: int = 0) -> LeaseGrant:
        granted = await super().grant(ttl, timeout, lease)
        if self.times:
            self.times -= 1
            await self.revoke(granted.id)
        return granted


@asynchronous
async def test_lease_ends_before_the_member_key_is_written(etcd: EtcdServer, prefix: str) -> None:
    one = Limits(1, 1)
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, one, prefix=prefix, lease_ttl=2)
    async with joining(Stalled(etcd.config), config) as (inbox, membership):
        assert isinstance(await asyncio.wait_for(inbox.get(), 60), LeaseLost)
        membership.join("", 0)
        while not isinstance(event := await asyncio.wait_for(inbox.get(), 60), Joined):
            assert isinstance(event, LeaseLost)


@asynchronous
async def test_what_is_given_up_before_it_began_is_no_warning(
    etcd: EtcdServer, prefix: str
) -> None:
    """Of Python, about a coroutine that was never awaited, in the user's output."""
    one = Limits(1, 1)
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, one, prefix=prefix, lease_ttl=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async with joining(Client(etcd.config), config) as (inbox, membership):
            membership.join("", 0)
            assert isinstance(await asyncio.wait_for(inbox.get(), 60), Joined)
        gc.collect()
    assert not [each for each in told if "never awaited" in str(each.message)]


@asynchronous
async def test_r16_an_etcd_that_is_away_while_a_node_joins_again_is_given_up(
    own_etcd: EtcdServer, prefix: str
) -> None:
    own_etcd.start()
    one = Limits(1, 1)
    etcd, argv = own_etcd.config, ("true",)
    config = AgentConfig(etcd, "j", argv, "n1", 1, one, prefix=prefix, lease_ttl=2, etcd_timeout=3)
    async with joining(Client(etcd), config) as (inbox, membership):
        joined = await asyncio.wait_for(inbox.get(), 60)
        assert isinstance(joined, Joined)
        own_etcd.kill()
        membership.join(joined.run, 0)  # as one that has slept longer than its lease
        failed = await asyncio.wait_for(inbox.get(), 40)
        assert isinstance(failed, FatalError)
        assert isinstance(failed.error, EtcdUnreachable)
        assert "--etcd-timeout" in str(failed.error)


class Busy(Client):
    """It learns of the end of its lease at once, and of what a watch tells only later.

    So also of what it has read, while it is `busy`.
    """

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self.late, self.has_read = asyncio.Event(), asyncio.Event()
        self.busy = False
        self.on_txn: list[Callable[[], None]] = []  # before the next

    async def range(self, *gets: Get, timeout: float | None = None) -> Snapshot:
        found = await super().range(*gets, timeout=timeout)
        if self.busy:
            self.has_read.set()
            await self.late.wait()
        return found

    async def txn(self, txn: Txn, timeout: float | None = None) -> TxnResult:
        while self.on_txn:
            self.on_txn.pop()()
        return await super().txn(txn, timeout)

    @asynccontextmanager
    async def stream(self, rpc: Any, *args: Any, **more: Any) -> AsyncIterator[Any]:
        async with super().stream(rpc, *args, **more) as stream:
            if rpc is WATCH:
                read = stream.read

                async def read_later() -> Any:
                    answer = await read()
                    if answer.events:
                        await self.late.wait()
                    return answer

                stream.read = read_later  # type: ignore[method-assign]
            yield stream


@asynchronous
async def test_e2_a_member_whose_answer_was_lost_as_it_put_its_key_back_is_a_member(
    etcd: EtcdServer, prefix: str
) -> None:
    """Its own first attempt is in the way of the second."""
    async with proxy(etcd.endpoint) as way:
        client = Busy(EtcdConfig((way.endpoint,)))
        await puts_its_key_back(client, prefix, way.lose_answers)


@asynchronous
async def test_e2_a_member_that_is_told_of_its_lease_first_puts_its_key_back(
    etcd: EtcdServer, prefix: str
) -> None:
    """Its world stands, which no view shows: the watch is late, or refused as the lease was."""
    await puts_its_key_back(Busy(etcd.config), prefix)


async def puts_its_key_back(client: Busy, prefix: str, *on_txn: Callable[[], None]) -> None:
    one = Limits(1, 1)
    config = AgentConfig(client._config, "j", ("true",), "n1", 1, one, prefix=prefix, lease_ttl=20)
    async with joining(client, config) as (inbox, membership):

        async def heard() -> Any:
            while isinstance(event := await asyncio.wait_for(inbox.get(), 60), Silent | Answered):
                pass
            return event

        joined = await heard()
        own, run, keys = joined.lease, joined.run, membership.keys
        stands = Round(1, Phase.FINAL, own, "it begins", run, "n1", 1, 1, Master("h", 1))
        await client.txn(Txn((), (Put(keys.round, encode(stands)),)))
        await membership.cover(Narrow(own))
        assert await heard() == MirrorChanged()
        local = Local(run, own, joined.created, joined.spec, acked=1, running=1, ran=1)
        state = State(local, 1, Life.MEMBER, view=membership.view(), limits=joined.limits, alive=1)
        assert await membership.current(1) == (True, "")
        await client.revoke(own)
        lost = await heard()
        assert isinstance(lost, LeaseLost), "the watch has not told it"
        assert await membership.current(1) == (False, "this node has lost its lease")
        state, actions = lifecycle.step(state, lost, 0.0)
        assert Relist() in actions
        client.busy = True
        before = asyncio.create_task(membership.current(1))
        await client.has_read.wait()
        client.busy = False
        client.on_txn += on_txn
        membership.relist(state)
        ended = "this node's lease has ended, and its key is not back yet"
        assert await membership.current(1) == (None, ended)
        assert await membership.current(2) == (False, "the job has left generation 2")
        relisted = await heard()
        assert relisted.created > joined.created
        client.late.set()
        assert await before == (None, ended), "it is back since"
        await membership.cover(Narrow(own))
        assert await heard() == MirrorChanged()
        view = membership.view()
        assert view is not None
        assert [member.lease for member in view.members] == [own], "nothing older is seen"
        assert await membership.current(1) == (True, "")


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As if this process had been stopped, for so long in all."""
    for module in ("agent.membership", "etcd.session"):
        clock = f"elastic_etcd.{module}.boottime"
        monkeypatch.setattr(clock, lambda: boottime() + seconds)


@asynchronous
async def test_r7_an_agent_that_stood_still_knows_it_before_all_else(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guardian has killed its workers; it must not take that for a failure of theirs."""
    limits = Limits(1, 1, cut_off=30.0)
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, limits, prefix=prefix, lease_ttl=30)
    async with joining(Client(etcd.config), config) as (inbox, membership):
        assert isinstance(await asyncio.wait_for(inbox.get(), 60), Joined)
        assert membership.stood_still() is None
        jump(monkeypatch, 20)
        silent = membership.stood_still()
        assert silent is not None
        assert silent.seconds >= 20
        assert membership.stood_still() is None, "it is told once"
        assert await asyncio.wait_for(inbox.get(), 60) == Answered(), "of the next renewal"
        jump(monkeypatch, 40)  # and where nothing happens before that
        told = await asyncio.wait_for(inbox.get(), 60)
        assert isinstance(told, Silent)
        assert told.seconds >= 20
        assert await asyncio.wait_for(inbox.get(), 60) == Answered()


class Unrenewed(Client):
    """Nothing of it comes through but requests, and no Txn until `told`."""

    def __init__(self, config: EtcdConfig) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    def stream(self, *_: Any, **__: Any) -> Any:
        raise Unanswered("no stream")

    async def txn(self, txn: Txn, timeout: float | None = None) -> TxnResult:
        await self.told.wait()
        return await super().txn(txn, timeout)


@asynchronous
async def test_r7_a_silence_that_begins_before_the_node_has_joined_goes_on(
    etcd: EtcdServer, prefix: str
) -> None:
    """A member begins with an etcd that answers; else its workers would outlive its lease."""
    strict = Limits(1, 1, cut_off=20)
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, strict, prefix=prefix, lease_ttl=10)
    client = Unrenewed(etcd.config)
    async with joining(client, config) as (inbox, _):
        assert isinstance(await asyncio.wait_for(inbox.get(), 60), Silent)
        client.told.set()
        assert isinstance(await asyncio.wait_for(inbox.get(), 60), Joined)
        silent = await asyncio.wait_for(inbox.get(), 60)
        assert isinstance(silent, Silent)
        assert silent.seconds > 0.5


def test_lease_lost_twice_before_the_node_has_joined_again() -> None:
    state = State(Local("r", 0xA, 1, 1), 1, Life.MEMBER)
    for _ in range(3):
        state, actions = lifecycle.step(state, LeaseLost("gone"), 0.0)
        assert actions == [Rejoin()]
