"""Rules 1 and 2: requests outlive frozen members, cut connections and elections."""

import asyncio
import socket
import time
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Compare, Get, Put, Txn
from elastic_etcd.errors import EtcdUnreachable
from elastic_etcd.etcd._grpc import WATCH, target
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.connection import Connection
from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.etcd.faults import RpcFailed, Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.session import Session
from elastic_etcd.times import ATTEMPT_TIMEOUT
from tests.support.aio import asynchronous, attached, put
from tests.support.etcd import FAST, EtcdCluster, EtcdServer
from tests.support.etcd_versions import newest_or_skip
from tests.support.proxy import proxy


@asynchronous
async def test_etcd_member_frozen_with_sigstop(cluster: EtcdCluster, prefix: str) -> None:
    """etcd#8980: a channel with all the addresses would stay with the frozen member for ever."""
    frozen = cluster.members[0]
    async with await attached(cluster.config, frozen.endpoint) as client:
        frozen.freeze()
        start = time.monotonic()
        await put(client, f"{prefix}/a")
        assert time.monotonic() - start < 6  # one attempt, and an election if it led
        chosen = client.endpoint
        assert chosen != frozen.endpoint
        await put(client, f"{prefix}/b")
        assert client.endpoint == chosen  # it stays away from the frozen one


def test_one_address_per_channel() -> None:
    assert target("127.0.0.1:1") == "ipv4:127.0.0.1:1"
    assert target("[::1]:1") == "ipv6:[::1]:1"
    assert target("host:1") == "dns:///host:1"


@asynchronous
async def test_member_killed(cluster: EtcdCluster, prefix: str) -> None:
    victim = cluster.members[1]
    async with await attached(cluster.config, victim.endpoint) as client:
        victim.kill()
        start = time.monotonic()
        await put(client, f"{prefix}/a")
        assert time.monotonic() - start < 6


@asynchronous
async def test_member_frozen_before_the_first_request(cluster: EtcdCluster) -> None:
    frozen = cluster.members[2]
    frozen.freeze()  # its kernel still accepts connections
    first = (frozen.endpoint, cluster.members[0].endpoint)
    async with Client(EtcdConfig(first)) as client:
        client._at = 0
        start = time.monotonic()
        await client.range(Get("/"), timeout=10)
        assert time.monotonic() - start < 6


@asynchronous
async def test_every_channel_has_its_own_connection(etcd: EtcdServer) -> None:
    """A given-up connection must not come back through gRPC's pool of subchannels."""
    async with proxy(etcd.endpoint) as way, Client(EtcdConfig((way.endpoint,))) as client:
        await client.range(Get("/"), timeout=5)
        way.freeze(new=False)
        start = time.monotonic()
        await client.range(Get("/"), timeout=10)  # the only endpoint, dialled anew
        assert time.monotonic() - start < ATTEMPT_TIMEOUT[1] + 1
        assert way.accepted == 2


@asynchronous
async def test_two_clients_have_two_connections(etcd: EtcdServer) -> None:
    """gRPC's common pool would give both the same one, frozen or not."""
    async with proxy(etcd.endpoint) as way:
        config = EtcdConfig((way.endpoint,))
        async with Client(config) as one, Client(config) as two:
            await one.range(Get("/"), timeout=5)
            way.freeze(new=False)
            await two.range(Get("/"), timeout=5)
            assert way.accepted == 2
            assert not two._retired, "its first one was not the frozen one"


@asynchronous
async def test_a_txn_that_timed_out_but_was_applied(etcd: EtcdServer, prefix: str) -> None:
    create = Txn((Compare(prefix, "create", 0),), (Put(prefix, "mine"),), (Get(prefix),))
    async with proxy(etcd.endpoint) as way, Client(EtcdConfig((way.endpoint,))) as client:
        await client.range(Get("/"), timeout=5)
        way.lose_answers()
        result = await client.txn(create, timeout=10)
        assert not result.succeeded
        assert result.ambiguous
        assert result.gets[0][0].value == "mine"  # so it was this very Txn
        again = await client.txn(create, timeout=10)
        assert not again.succeeded
        assert not again.ambiguous


@asynchronous
async def test_what_cannot_have_been_applied_is_not_ambiguous(
    etcd: EtcdServer, prefix: str
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    async with Client(EtcdConfig((nobody, etcd.endpoint))) as client:
        client._at = 0
        result = await client.txn(Txn((), (Put(prefix, ""),)), timeout=10)
        assert client.endpoint == etcd.endpoint
        assert not result.ambiguous  # the connection was refused, nothing was sent


@asynchronous
async def test_reading_twice_is_not_ambiguous(etcd: EtcdServer, prefix: str) -> None:
    async with proxy(etcd.endpoint) as way, Client(EtcdConfig((way.endpoint,))) as client:
        await client.range(Get("/"), timeout=5)
        way.lose_answers()
        assert not (await client.txn(Txn((), (Get(prefix),)), timeout=10)).ambiguous


@asynchronous
async def test_no_etcd_there() -> None:
    endpoints = tuple(f"127.0.0.1:{port}" for port in free_ports(2))
    async with Client(EtcdConfig(endpoints)) as client:
        start = time.monotonic()
        with pytest.raises(EtcdUnreachable) as error:
            await client.range(Get("/"), timeout=1.5)
        assert 1.4 < time.monotonic() - start < 6
    message = str(error.value)
    assert all(endpoint in message for endpoint in endpoints)
    assert "Connection refused" in message
    assert "Check --etcd" in message
    assert message.count("\n") <= 2


@asynchronous
async def test_a_host_name_that_does_not_exist() -> None:
    async with Client(EtcdConfig(("nobody.invalid:2379",))) as client:
        hint = r"nobody\.invalid(.|\n)*Check the host name.*GRPC_DNS_RESOLVER=native"
        with pytest.raises(EtcdUnreachable, match=hint):
            await client.range(Get("/"), timeout=1)


@asynchronous
async def test_a_server_that_is_not_etcd() -> None:
    async def web(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(web, "127.0.0.1", 0, family=socket.AF_INET)
    endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Client(EtcdConfig((endpoint,))) as client:
        with pytest.raises(EtcdUnreachable, match=endpoint):
            await client.range(Get("/"), timeout=1)


@asynchronous
async def test_a_closed_client_connects_no_more() -> None:
    """gRPC's channels go on connecting while anything, such as a traceback, holds a call."""
    connected = asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, family=socket.AF_INET)
    endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        kept = []
        for _ in range(3):
            async with Client(EtcdConfig((endpoint,))) as client:
                try:
                    await client.range(Get("/"), timeout=0.3)
                except EtcdUnreachable as error:
                    kept.append(error)
        connected.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connected.wait(), 2.5)
        assert len(kept) == 3


@asynchronous
async def test_the_budget_of_a_hurried_caller_condemns_nobody(etcd: EtcdServer) -> None:
    async with proxy(etcd.endpoint) as way, Client(EtcdConfig((way.endpoint,))) as client:
        await client.range(Get("/"), timeout=5)
        way.freeze(new=False)
        with pytest.raises(EtcdUnreachable):
            await client.range(Get("/"), timeout=0.2)
        way.thaw()
        await client.range(Get("/"), timeout=5)
        assert way.accepted == 1


@asynchronous
async def test_a_learner_is_passed_over(tmp_path: Path) -> None:
    """Whoever replaces a member has one under the same --etcd, until it is promoted."""
    program = newest_or_skip()
    voter, learner = (EtcdServer(tmp_path, name, program=program) for name in ("m0", "m1"))
    try:
        await voter.start_async()
        voter.ctl("member", "add", learner.name, "--learner", f"--peer-urls={learner.peer_url}")
        learner.cluster = f"m0={voter.peer_url},m1={learner.peer_url}"
        learner.arguments = (*FAST, "--initial-cluster-state=existing")
        await learner.start_async()
        async with Client(EtcdConfig((learner.endpoint, voter.endpoint))) as client:
            client._at = 0
            result = await client.txn(Txn((), (Put("/a", ""),)), timeout=20)
            assert not result.ambiguous
            renewed = asyncio.Event()
            async with Session(client, 9, on_renewed=lambda _: renewed.set()):
                await asyncio.wait_for(renewed.wait(), 20)
                renewed.clear()
                client.give_up(await client.connected())
                assert client.endpoint == learner.endpoint
                await asyncio.wait_for(renewed.wait(), 20)
            assert client.endpoint == voter.endpoint
    finally:
        voter.kill()
        learner.kill()


@asynchronous
async def test_quorum_lost_and_back(cluster: EtcdCluster, prefix: str) -> None:
    async with Client(cluster.config) as client:
        await put(client, f"{prefix}/a")
        for member in cluster.members[:2]:
            member.freeze()
        with pytest.raises(EtcdUnreachable):
            await client.txn(Txn((), (Put(f"{prefix}/b", ""),)), timeout=3)
        waiting = asyncio.create_task(client.txn(Txn((), (Put(f"{prefix}/c", ""),))))
        for member in cluster.members[:2]:
            member.thaw()
        assert (await asyncio.wait_for(waiting, 60)).succeeded


@asynchronous
async def test_a_request_without_a_deadline_waits_for_etcd(
    own_etcd: EtcdServer, prefix: str
) -> None:
    async with Client(own_etcd.config) as client:
        waiting = asyncio.create_task(client.txn(Txn((), (Put(prefix, ""),))))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 1)
        await own_etcd.start_async()
        assert (await asyncio.wait_for(waiting, 60)).succeeded


@pytest.mark.parametrize("moments", range(8))
@asynchronous
async def test_a_stream_ends_with_its_connection_before_it_has_begun(moments: int) -> None:
    connection = Connection(f"127.0.0.1:{free_ports(1)[0]}", None)
    stream = connection.open(WATCH, (), began=0)

    async def use() -> None:
        await stream.write(pb.WatchRequest())
        await stream.read()

    user = asyncio.create_task(use())
    for _ in range(moments):
        await asyncio.sleep(0)
    connection.retire()
    async with asyncio.timeout(10):
        with pytest.raises((Unanswered, RpcFailed)):
            await user
    stream.close()
    await connection.close()


@asynchronous
async def test_m12_no_request_is_refused_while_the_lead_is_handed_on(
    cluster: EtcdCluster, prefix: str
) -> None:
    """As each member of a rolling restart does before it stops.

    etcd then answers UNKNOWN "raft proposal dropped" to some; how many is the cluster's affair.
    """
    handed_on = asyncio.Event()

    async def write(number: int) -> None:
        start = cluster.members[number % 3].endpoint
        async with await attached(cluster.config, start) as client:
            while not handed_on.is_set():
                lease = await client.grant(10, 20)
                await put(client, f"{prefix}/{number}")
                await client.revoke(lease.id, 20)

    async def hand_on() -> None:
        for turn in range(12):
            await asyncio.to_thread(cluster.lead, cluster.members[turn % 3])
        handed_on.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(hand_on())
        for number in range(12):
            group.create_task(write(number))
