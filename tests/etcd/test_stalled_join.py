"""A lease that ends while its holder is still joining: a machine that stood still for the TTL."""

import asyncio

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import FatalError, Inbox, Tasks
from elastic_etcd.agent.membership import Membership
from elastic_etcd.core import lifecycle
from elastic_etcd.core.lifecycle import Joined, LeaseLost, Life, Rejoin, State
from elastic_etcd.core.rules import Limits, Local
from elastic_etcd.errors import EtcdUnreachable
from elastic_etcd.etcd.client import Client, Lease
from tests.support.aio import asynchronous
from tests.support.etcd import EtcdServer


class Stalled(Client):
    """Its leases end before the answer is heard, the first so many times."""

    times = 1

    async def grant(self, ttl: int, timeout: float | None = None) -> Lease:
        lease = await super().grant(ttl, timeout)
        if self.times:
            self.times -= 1
            await self.revoke(lease.id)
        return lease


@asynchronous
async def test_lease_ends_before_the_member_key_is_written(etcd: EtcdServer, prefix: str) -> None:
    one = Limits(1, 1)
    config = AgentConfig(etcd.config, "j", ("true",), "n1", 1, one, prefix=prefix, lease_ttl=2)
    inbox = Inbox()
    async with (
        Stalled(etcd.config) as client,
        Tasks() as tasks,
        Membership(client, config, inbox, tasks) as membership,
    ):
        membership.join("", 0)
        assert isinstance(await asyncio.wait_for(inbox.get(), 20), LeaseLost)
        membership.join("", 0)
        while not isinstance(event := await asyncio.wait_for(inbox.get(), 20), Joined):
            assert isinstance(event, LeaseLost)


@asynchronous
async def test_r16_an_etcd_that_is_away_while_a_node_joins_again_is_given_up(
    own_etcd: EtcdServer, prefix: str
) -> None:
    own_etcd.start()
    one = Limits(1, 1)
    etcd, argv = own_etcd.config, ("true",)
    config = AgentConfig(etcd, "j", argv, "n1", 1, one, prefix=prefix, lease_ttl=2, etcd_timeout=3)
    inbox = Inbox()
    async with (
        Client(etcd) as client,
        Tasks() as tasks,
        Membership(client, config, inbox, tasks) as membership,
    ):
        membership.join("", 0)
        joined = await asyncio.wait_for(inbox.get(), 20)
        assert isinstance(joined, Joined)
        own_etcd.kill()
        membership.join(joined.run, 0)  # as one that has slept longer than its lease
        failed = await asyncio.wait_for(inbox.get(), 40)
        assert isinstance(failed, FatalError)
        assert isinstance(failed.error, EtcdUnreachable)
        assert "--etcd-timeout" in str(failed.error)


def test_lease_lost_twice_before_the_node_has_joined_again() -> None:
    limits = Limits(1, 2)
    state = State(Local("r", 0xA, 1, 1), 1, Life.MEMBER)
    for _ in range(3):
        state, actions = lifecycle.step(state, LeaseLost("gone"), 0.0, limits)
        assert actions == [Rejoin()]
