"""What an agent reads of a job before it joins, however many are there."""

import asyncio

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import Joined
from elastic_etcd.core.schema import Keys, Limits, Member, Spec, encode
from elastic_etcd.core.txn import Delete, Get, Put, Txn
from elastic_etcd.etcd.client import Client
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer
from tests.support.membership import joining

THERE = 40
LIMITS = Limits(1, 64)


async def begin(client: Client, keys: Keys) -> None:
    """A job of many members."""
    puts = [Put(keys.spec, encode(Spec("run", LIMITS, "n0 (pid 1)")))]
    for number in range(THERE):
        lease = await client.grant(60)
        member = Member(lease.id, f"n{number}", 1, run="run")
        puts.append(Put(keys.member(lease.id), encode(member), lease.id))
    assert (await client.txn(Txn((), tuple(puts)))).succeeded


async def join(etcd: EtcdServer, prefix: str) -> None:
    config = AgentConfig(etcd.config, "j", ("true",), "new", 1, LIMITS, prefix=prefix)
    async with joining(Client(etcd.config), config) as (inbox, _):
        assert isinstance(await asyncio.wait_for(inbox.get(), 60), Joined)


async def names(client: Client, keys: Keys) -> int:
    return len((await client.range(Get(keys.members, prefix=True))).kvs)


@asynchronous
async def test_an_agent_reads_a_few_of_many_members(etcd: EtcdServer, prefix: str) -> None:
    keys = Keys(f"{prefix}/j")
    async with Client(etcd.config) as client:
        await begin(client, keys)
        seen = await client.range(*writes.look(keys))
        assert sum(key.startswith(keys.members) for key in seen.kvs) == writes.SOME < THERE
        await join(etcd, prefix)
        assert await names(client, keys) == THERE


@asynchronous
async def test_all_members_go_whose_spec_was_removed_by_hand(etcd: EtcdServer, prefix: str) -> None:
    """They join again: a fence on the spec that is gone would let them do nothing."""
    keys = Keys(f"{prefix}/j")
    async with Client(etcd.config) as client:
        await begin(client, keys)
        await client.txn(Txn((), (Delete(keys.spec),)))
        await join(etcd, prefix)
        assert await names(client, keys) == 0
