"""A membership without an agent: what it hears stands in its inbox."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.inbox import Inbox, Tasks
from elastic_etcd.agent.membership import Membership
from elastic_etcd.etcd.client import Client


@asynccontextmanager
async def joining(client: Client, config: AgentConfig) -> AsyncIterator[tuple[Inbox, Membership]]:
    """One that has begun to join, with this client, which is its own."""
    async with client, Tasks() as tasks, Membership(client, config, tasks) as membership:
        membership.join("", 0)
        yield tasks.inbox, membership
