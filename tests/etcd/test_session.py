"""Rule 3: one lease, kept alive through every fault that is shorter than its TTL."""

import asyncio
import time
from typing import cast

import pytest

from elastic_etcd.core.txn import Get
from elastic_etcd.errors import EtcdUnreachable
from elastic_etcd.etcd import _grpc
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, elapse, put
from tests.support.etcd import EtcdCluster, EtcdServer
from tests.support.proxy import proxy

TTL = 3


class Silence:
    """What a session tells about etcd's silence."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.begun = asyncio.Event()
        self.over = asyncio.Event()

    def on_silence(self, seconds: float, error: Exception) -> None:
        self.seconds.append(seconds)
        self.errors.append(str(error))
        self.begun.set()

    def session(self, client: Client, ttl: int = TTL) -> Session:
        return Session(client, ttl, on_silence=self.on_silence, on_answer=self.over.set)


@asynchronous
async def test_a_lease_outlives_its_ttl(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client, Session(client, 1) as session:
        assert session.ttl == 1
        await put(client, prefix, "here", session.lease)
        await elapse(2.5)
        assert not session.lost.done()
        assert session.silent_since is None
        assert (await client.range(Get(prefix))).kvs


@asynchronous
async def test_the_pace_follows_the_granted_ttl(own_etcd: EtcdServer) -> None:
    own_etcd.arguments = ("--heartbeat-interval=200", "--election-timeout=2000")
    own_etcd.start()
    async with Client(own_etcd.config) as client, Session(client, 1) as session:
        assert session.ttl == 3  # 1.5 x the election timeout
        before = own_etcd.metric(keepalives := METRIC.format("LeaseKeepAlive"))
        await elapse(2.5)
        assert own_etcd.metric(keepalives) - before in (2, 3)


METRIC = 'grpc_server_msg_received_total{{grpc_method="{}"'


@asynchronous
async def test_leaving_is_seen_at_once(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client, Copy(client, Get(prefix)) as copy:
        async with Session(client, 60) as session:
            await put(client, prefix, "here", session.lease)
            await copy.until(lambda values: prefix in values)
        await copy.until(lambda values: prefix not in values, timeout=10)


@asynchronous
async def test_an_orphan_stays_until_its_ttl(etcd: EtcdServer, prefix: str) -> None:
    async with Client(etcd.config) as client, Copy(client, Get(prefix)) as copy:
        async with Session(client, 2) as session:
            await put(client, prefix, "here", session.lease)
            session.orphan()
        left = time.monotonic()
        await copy.until(lambda values: prefix in values)
        await copy.until(lambda values: prefix not in values)
        assert 1 < time.monotonic() - left < 10


@asynchronous
async def test_lease_revoked_under_its_live_holder(etcd: EtcdServer) -> None:
    """etcd#15247"""
    async with Client(etcd.config) as client, Session(client, TTL) as session:
        etcd.ctl("lease", "revoke", f"{session.lease:x}")
        reason = await asyncio.wait_for(session.lost, TTL / 3 + 1)
        assert etcd.endpoint in reason
        assert "expired" in reason


@asynchronous
async def test_transient_error_in_keepalive(etcd: EtcdServer) -> None:
    """pytorch#194870: one exception ended the renewals, and with them the job.

    It is no news either: the next attempt is answered long before another renewal is due.
    """
    silence, renewed = Silence(), asyncio.Event()
    async with (
        proxy(etcd.endpoint) as way,
        Client(EtcdConfig((way.endpoint,))) as client,
        Session(
            client,
            60,
            often=20,
            on_silence=silence.on_silence,
            on_renewed=lambda _: renewed.set(),
        ) as session,
    ):
        for _ in range(2):
            renewed.clear()
            await asyncio.wait_for(renewed.wait(), 60)
            accepted = way.accepted
            way.cut()
            renewed.clear()
            await asyncio.wait_for(renewed.wait(), 60)
            assert way.accepted == accepted + 1
        assert not session.lost.done()
        assert silence.errors == []


@asynchronous
async def test_a_silent_endpoint_loses_everything_to_the_next(
    etcd: EtcdServer, prefix: str
) -> None:
    """Requests, keepalive and watch move within the TTL; gRPC would notice after 65 s."""
    async with proxy(etcd.endpoint) as first, proxy(etcd.endpoint) as second:
        config = EtcdConfig((first.endpoint, second.endpoint))
        async with Client(config) as client, Client(etcd.config) as writer:
            client._at = 0
            silence, renewed = Silence(), asyncio.Event()
            told = silence.on_silence
            session = Session(client, TTL, on_silence=told, on_renewed=lambda _: renewed.set())
            async with session, Copy(client, Get(prefix)) as copy:
                await copy.until(lambda _: True)
                await asyncio.wait_for(renewed.wait(), 60)
                await put(writer, prefix, "before")
                await copy.until(lambda values: prefix in values)  # the watch is established
                first.freeze()
                renewed.clear()
                start = time.monotonic()
                await put(writer, prefix, "after")
                await copy.until(lambda values: values.get(prefix) == "after", timeout=TTL)
                await asyncio.wait_for(renewed.wait(), TTL)
                assert time.monotonic() - start < TTL  # with a margin for one more endpoint
                assert client.endpoint == second.endpoint
                assert not session.lost.done()
                assert all(each.startswith(f"{first.endpoint}: ") for each in silence.errors)


@asynchronous
async def test_two_silent_endpoints_of_three(etcd: EtcdServer) -> None:
    """A third of the TTL for each, also while the stream is being opened."""
    async with proxy(etcd.endpoint) as one, proxy(etcd.endpoint) as two:
        config = EtcdConfig((one.endpoint, two.endpoint, etcd.endpoint))
        async with Client(config) as client:
            client._at = 0
            renewed = asyncio.Event()
            async with Session(client, 6, on_renewed=lambda _: renewed.set()) as session:
                one.freeze()
                two.freeze()
                renewed.clear()
                await asyncio.wait_for(renewed.wait(), 60)
                assert client.endpoint == etcd.endpoint
                assert not session.lost.done()


class SlowNames(asyncio.DatagramProtocol):
    """A name server that gives 127.0.0.1 to each name, and takes as long as a dead first one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        is_address = b"\0\1\0\1" in data  # of type A
        head = data[:2] + b"\x81\x80" + data[4:6] + bytes([0, is_address, 0, 0, 0, 0])
        question = data[12 : data.index(b"\0", 12) + 5]
        found = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes([127, 0, 0, 1])
        answer = head + question + found * is_address
        asyncio.get_running_loop().call_later(2.5, self.transport.sendto, answer, addr)


@asynchronous
async def test_a_name_that_takes_longer_than_a_renewal_is_looked_up(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt began with the lookup, and had the time of one renewal."""
    loop = asyncio.get_running_loop()
    names, _ = await loop.create_datagram_endpoint(SlowNames, ("127.0.0.1", 0))
    host, port = names.get_extra_info("sockname")
    monkeypatch.setattr(_grpc, "target", lambda endpoint: f"dns://{host}:{port}/{endpoint}")
    renewed = asyncio.Event()
    try:
        async with (
            Client(EtcdConfig((f"etcd.test:{etcd.port}",))) as client,
            Session(client, 60, often=60, on_renewed=lambda _: renewed.set()),
        ):
            await asyncio.wait_for(renewed.wait(), 60)
            client.give_up(await client.connected())
            renewed.clear()
            await asyncio.wait_for(renewed.wait(), 30)
    finally:
        names.close()


@asynchronous
async def test_cut_off_for_longer_than_the_ttl(etcd: EtcdServer) -> None:
    async with proxy(etcd.endpoint) as way, Client(EtcdConfig((way.endpoint,))) as client:
        silence = Silence()
        async with silence.session(client, 1) as session:
            begun = time.monotonic()
            way.freeze()
            await asyncio.wait_for(silence.begun.wait(), 60)
            assert session.silent_since is not None
            assert session.silent_since <= begun + 0.5
            await elapse(2)
            assert not session.lost.done()  # only etcd can say so
            way.thaw()
            await asyncio.wait_for(session.lost, 60)
            assert silence.seconds == sorted(silence.seconds)


@asynchronous
async def test_all_of_etcd_down_for_longer_than_the_ttl(own_etcd: EtcdServer, prefix: str) -> None:
    """Leases survive in the data and start anew: nobody has to leave."""
    own_etcd.start()
    async with Client(own_etcd.config) as client, Copy(client, Get(prefix)) as copy:
        silence = Silence()
        async with silence.session(client, 1) as session:
            await put(client, prefix, "here", session.lease)
            await copy.until(lambda values: prefix in values)
            own_etcd.kill()
            await asyncio.wait_for(silence.begun.wait(), 60)
            await elapse(2.5)
            await own_etcd.start_async()
            await asyncio.wait_for(silence.over.wait(), 60)
            assert not session.lost.done()
            assert session.silent_since is None
            await elapse(1.5)
            assert not session.lost.done()
            assert copy.values == {prefix: "here"}


@asynchronous
async def test_etcd_that_comes_back_empty(own_etcd: EtcdServer, prefix: str) -> None:
    own_etcd.start()
    async with (
        Client(own_etcd.config) as client,
        Copy(client, Get(prefix)) as copy,
        Session(client, TTL) as session,
    ):
        await put(client, prefix, "here", session.lease)
        await copy.until(lambda values: prefix in values)
        own_etcd.kill()
        own_etcd.wipe()
        await own_etcd.start_async()
        await asyncio.wait_for(session.lost, 60)
        await copy.until(lambda values: not values)


@asynchronous
async def test_leader_change_that_re_arms_leases(cluster: EtcdCluster, prefix: str) -> None:
    """etcd#9395: a death around an election is seen after at most 2 x TTL + 2.5 s."""
    ttl = 2
    async with Client(cluster.config) as client, Copy(client, Get(prefix)) as copy:
        async with Session(client, ttl) as session:
            await put(client, prefix, "here", session.lease)
            await copy.until(lambda values: prefix in values)
            session.orphan()
        died = time.monotonic()
        await elapse(ttl / 2)
        cluster.leader().kill()
        await copy.until(lambda values: prefix not in values, timeout=2 * ttl + 2.5)
        assert time.monotonic() - died > ttl  # it was re-armed: this is that case


@asynchronous
async def test_a_session_through_member_after_member(cluster: EtcdCluster, prefix: str) -> None:
    async with Client(cluster.config) as client:
        renewed = asyncio.Event()
        async with Session(client, TTL, on_renewed=lambda _: renewed.set()) as session:
            await put(client, prefix, "here", session.lease)
            for _ in cluster.members:
                member = cluster.at(client.endpoint)
                member.freeze()
                async with asyncio.timeout(60):
                    while client.endpoint == member.endpoint:
                        renewed.clear()
                        await renewed.wait()
                member.thaw()
            assert not session.lost.done()
            assert (await client.range(Get(prefix), timeout=5)).kvs


@asynchronous
async def test_leaving_without_etcd_is_bounded(own_etcd: EtcdServer) -> None:
    own_etcd.start()
    async with Client(own_etcd.config) as client:
        async with Session(client, TTL):
            own_etcd.kill()
            left = time.monotonic()
        assert time.monotonic() - left < 10


@asynchronous
async def test_no_etcd_for_a_new_session(own_etcd: EtcdServer) -> None:
    async with Client(own_etcd.config) as client:
        with pytest.raises(EtcdUnreachable):
            async with Session(client, TTL, timeout=0.5):
                raise AssertionError("there is no lease")


@asynchronous
async def test_r8_a_loop_that_stands_still_renews_nothing(etcd: EtcdServer) -> None:
    """gRPC's own threads go on, but whoever writes the renewals is the loop."""
    async with Client(etcd.config) as client, Session(client, 1) as session:
        await elapse(1.5)
        assert not session.lost.done()
        deadline = time.monotonic() + 30
        while f"{session.lease:x}" in etcd.ctl("lease", "list"):  # nothing else turns the loop
            assert time.monotonic() < deadline
        reason = await asyncio.wait_for(session.lost, 60)
        assert "expired" in reason
