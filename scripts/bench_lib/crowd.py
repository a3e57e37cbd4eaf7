"""Members of a job by the thousand, in one process and on one connection.

Each has a lease, a member key and a mirror of its own: it joins and acks by the Txns of an agent
and watches what an agent watches, on a stream of its own. It is no agent: it coordinates nothing,
starts nothing, and its lease is renewed on a stream that all of them share.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Never

from msgspec import structs

from elastic_etcd import __version__
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import State, Write, coverage
from elastic_etcd.core.rules import Ack, Local
from elastic_etcd.core.schema import Keys, Master, Member, Phase, Spec
from elastic_etcd.core.txn import Get, Snapshot, Txn
from elastic_etcd.core.view import Coverage, Narrow, View, covered, view_of
from elastic_etcd.etcd._grpc import LEASE_KEEP_ALIVE, Answer, Request, Rpc
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.connection import Stream
from elastic_etcd.etcd.mirror import Mirror
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import Attempts

AT_ONCE = 50  # requests under way on the connection: more would only wait in this process
NEVER = 3600.0

Changed = Callable[[], None]
Tell = Callable[..., None]  # what, detail, generation


class CrowdClient(Client):
    """A client of many members, whose requests take turns."""

    def __init__(self, etcd: EtcdConfig) -> None:
        super().__init__(etcd)
        self.turns = asyncio.Semaphore(AT_ONCE)

    async def call(
        self, rpc: Rpc[Request, Answer], request: Request, what: str, deadline: float
    ) -> tuple[Answer, bool]:
        """As a client's."""
        async with self.turns:
            return await super().call(rpc, request, what, deadline)


class Unhurried(Attempts):
    """Attempts of one among many in a process: it may take long until it is served."""

    def growing(self, patience: float) -> float:
        """For ever: the server is there."""
        return NEVER + patience


class CrowdMirror(Mirror):
    """A mirror that takes its turn to open its watches."""

    def __init__(self, client: CrowdClient, ranges: tuple[Get, ...], changed: Changed) -> None:
        super().__init__(client, ranges, changed, NEVER)
        self._attempts = Unhurried()
        self._turns = client.turns

    async def _open_watches(self, stream: Stream[pb.WatchRequest, pb.WatchResponse]) -> None:
        async with self._turns:
            await super()._open_watches(stream)


class Crowd:
    """What the members of one job in this process share: the connection and the renewals."""

    def __init__(self, etcd: EtcdConfig, ttl: int) -> None:
        self.client = CrowdClient(etcd)
        self._pace = ttl / 3
        self._leases: list[int] = []
        self._renewing = asyncio.create_task(self._renew())

    async def live(self, config: AgentConfig, tell: Tell) -> None:
        """Be a member until this is cancelled. The lease stays to its end."""
        lease = await self.client.grant(config.lease_ttl)
        self._leases.append(lease.id)
        await CrowdMember(self.client, config, lease.id, tell).live()

    async def close(self) -> None:
        """Close the connection."""
        self._renewing.cancel()
        await asyncio.wait({self._renewing})
        async with self.client:
            """Nothing is under way."""

    async def _renew(self) -> Never:
        async with self.client.stream(LEASE_KEEP_ALIVE, "the leases") as stream:
            while True:
                for lease in tuple(self._leases):
                    await stream.write(pb.LeaseKeepAliveRequest(id=lease))
                    assert (await stream.read()).ttl > 0, f"lease {lease:x} has ended"
                    await asyncio.sleep(self._pace / len(self._leases))
                await asyncio.sleep(0 if self._leases else 1)


@dataclass
class CrowdMember:
    """One of them."""

    client: CrowdClient
    config: AgentConfig
    lease: int
    tell: Tell

    def __post_init__(self) -> None:
        self._keys = Keys(f"{self.config.prefix}/{self.config.job}")
        local, limits = Local("", self.lease), self.config.limits
        self._state = State(local, self.config.nproc, limits=limits)
        self._news = asyncio.Event()
        self._seen = (0, False)  # the newest generation, and whether its world is known
        self._member = Member(
            lease=self.lease,
            node=self.config.node,
            nproc=self.config.nproc,
            address="127.0.0.1",
            version=__version__,
        )

    async def live(self) -> Never:
        """Join, then mirror what an agent would, and ack each generation."""
        await self._join()
        self.tell("member", f"{self.lease:x}")
        while True:
            await self._follow(coverage(self._state))

    async def _join(self) -> None:
        """By a look and a Txn, as an agent does."""
        keys, client = self._keys, self.client
        seen = await client.range(*writes.look(keys))
        spec = Spec("", self.config.limits, self.config.node)
        txn = writes.join(keys, seen, self._member, spec, again=False)
        assert isinstance(txn, Txn), txn
        own = keys.member(self.lease)
        after = tuple(map(Get, (keys.spec, keys.round, keys.ledger, own)))
        result = await client.txn(structs.replace(txn, then=(*txn.then, *after)))
        assert result.succeeded, "an agent has to have begun the job before there is a crowd"
        entered = {kv.key: kv for got in result.gets for kv in got}
        local = Local("", self.lease, created=entered[own].create)
        view = view_of(Snapshot(result.revision, entered), keys, Narrow())
        self._state = structs.replace(self._state, local=local, view=view)

    async def _follow(self, wanted: Coverage) -> None:
        """Mirror `wanted` for as long as that is what an agent would."""
        ranges = covered(self._keys, wanted, self.lease)
        async with CrowdMirror(self.client, ranges, self._news.set) as mirror:
            while coverage(self._state) == wanted:
                await self._news.wait()
                self._news.clear()
                if snapshot := mirror.snapshot():
                    await self._look(view_of(snapshot, self._keys, wanted))

    async def _look(self, view: View) -> None:
        """Tell what is new, and ack what is joinable."""
        self._state = structs.replace(self._state, view=view)
        now, local = view.round, self._state.local
        if now is None:
            return
        known = now.phase is Phase.FINAL and view.part(self.lease) is not None
        if now.generation > self._seen[0] or (known and not self._seen[1]):
            self._seen = now.generation, known
            self.tell(now.phase.value, "", now.generation)
        wanted = now.phase is Phase.JOINABLE and local.acked != now.generation
        if wanted and await self._ack(now.generation):
            acked = structs.replace(local, acked=now.generation)
            self._state = structs.replace(self._state, local=acked)

    async def _ack(self, generation: int) -> bool:
        write = Write(Ack("", generation), self.lease, generation)
        master = Master("127.0.0.1", 1024)
        txn = writes.build(self._keys, self._state, write, self._member, master, "")
        return (await self.client.txn(txn)).succeeded
