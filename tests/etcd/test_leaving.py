"""What a leaving node writes last, and until when what it saves is its world's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import Inbox
from elastic_etcd.agent.membership import Membership
from elastic_etcd.core.lifecycle import Joined, Life, MarkLeaving, State, Write, WriteDone
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Keys, Ledger, Limits, Master, Phase, Round, encode
from elastic_etcd.core.txn import Compare, Put, Txn
from elastic_etcd.core.view import Narrow
from elastic_etcd.etcd.client import Client
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer
from tests.support.membership import joining

LIMITS = Limits(1, 2)


class Node(NamedTuple):
    """One that has joined, and hears what comes into its inbox."""

    client: Client
    inbox: Inbox
    membership: Membership
    joined: Joined

    @property
    def keys(self) -> Keys:
        return self.membership.keys

    def local(self, ran: int = 0) -> Local:
        """What it knows of itself when it leaves."""
        it = self.joined
        return Local(it.run, it.lease, it.created, it.spec, ran=ran, leaving=True)

    def state(self, ran: int = 0) -> State:
        return State(self.local(ran), 1, Life.LEAVING)

    def mark(self) -> None:
        """Begin to write that it leaves."""
        self.membership.write(self.state(), Write(MarkLeaving(), self.joined.lease, 0), None)

    async def written(self) -> None:
        assert await asyncio.wait_for(self.inbox.get(), 60) == WriteDone(ok=True)


@asynccontextmanager
async def node(etcd: EtcdServer, prefix: str) -> AsyncIterator[Node]:
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, LIMITS, prefix=prefix, lease_ttl=5)
    client = Client(etcd.config)
    async with joining(client, config) as (inbox, membership):
        joined = await asyncio.wait_for(inbox.get(), 60)
        assert isinstance(joined, Joined)
        yield Node(client, inbox, membership, joined)


@asynchronous
async def test_r5_the_mark_is_seen_before_the_key_goes(etcd: EtcdServer, prefix: str) -> None:
    """Else the node looks like one that is lost."""
    async with node(etcd, prefix) as it:
        it.mark()
        await it.membership.leave(it.state())  # its workers have ended at once
        await it.written()
        assert not etcd.ctl("get", it.keys.member(it.joined.lease))


@asynchronous
async def test_r5_a_key_goes_when_the_others_have_begun_anew(
    etcd: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy agent would see mark and end at once, and take the node for lost."""
    monkeypatch.setattr("elastic_etcd.times.LEAVE_TIMEOUT", 60.0)  # a busy machine
    async with node(etcd, prefix) as it:
        keys, run, lease = it.keys, it.joined.run, it.joined.lease
        world = Round(1, Phase.FINAL, 7, "the job begins", run, "n2", 2, 2, Master("n2", 1))
        await it.client.txn(Txn((), (Put(keys.round, encode(world)),)), 10)
        await it.membership.cover(Narrow(7))
        while it.membership.view() is None:
            await asyncio.wait_for(it.inbox.get(), 60)
        leaving = asyncio.create_task(it.membership.leave(it.state(ran=1)))
        await asyncio.wait({leaving}, timeout=0.3)
        anew = Round(2, Phase.SETUP, 7, "n1 is leaving", run)
        there = Compare(keys.member(lease), "create", it.joined.created)
        result = await it.client.txn(Txn((there,), (Put(keys.round, encode(anew)),)), 10)
        assert result.succeeded, "the key is there until the others have begun anew"
        await leaving
        assert not etcd.ctl("get", keys.member(lease))


@pytest.mark.parametrize(
    ("phase", "final", "may"),
    [
        (Phase.SETUP, 1, True),
        (Phase.JOINABLE, 1, True),
        (Phase.FROZEN, 1, False),
        (Phase.FINAL, 2, False),
        (Phase.JOINABLE, 2, False),
    ],
)
@asynchronous
async def test_r5_a_leaving_node_may_save_until_another_world_can_begin(
    etcd: EtcdServer, prefix: str, phase: Phase, final: int, *, may: bool
) -> None:
    async with node(etcd, prefix) as it:
        keys = it.keys
        world = Round(2, phase, 7, "n1 is leaving", it.joined.run, "n2", 1, 1, Master("n2", 1))
        ledger = Ledger(2, final)
        puts = (Put(keys.round, encode(world)), Put(keys.ledger, encode(ledger)))
        await it.client.txn(Txn((), puts), 10)
        assert (await it.membership.current(1))[0] is False, "it is not leaving"
        it.mark()
        await it.written()
        assert (await it.membership.current(1))[0] is may
