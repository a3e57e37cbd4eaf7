"""TLS in both directions, and what a user is told when trust is missing."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Get
from elastic_etcd.errors import EtcdDenied, EtcdUnreachable, UsageError
from elastic_etcd.etcd._grpc import WATCH
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.faults import canceled
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, put
from tests.support.etcd import FAST, EtcdServer
from tests.support.tls import Authority, Files, asking, showing, shows


@dataclass
class World:
    """A server that shows a certificate, one that asks for one too, and one at a wrong name."""

    authority: Authority
    stranger: Authority
    client: Files
    tls: EtcdServer
    mutual: EtcdServer
    misnamed: EtcdServer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = Authority(folder, "authority"), Authority(folder, "stranger")
    server, misnamed = authority.issue("server"), authority.issue("misnamed", "10.1.2.3")
    asks = asking(authority)
    it = World(
        authority,
        stranger,
        authority.issue("client"),
        EtcdServer(folder, "tls", (*FAST, *shows(server)), "https"),
        EtcdServer(folder, "mutual", (*FAST, *shows(server), *asks), "https"),
        EtcdServer(folder, "misnamed", (*FAST, *shows(misnamed)), "https"),
    )
    servers = it.tls, it.mutual, it.misnamed
    for each in servers:
        each.start()
    yield it
    for each in servers:
        each.kill()


async def refusal(config: EtcdConfig, timeout: float = 5) -> str:
    """The message of EtcdDenied."""
    async with Client(config) as client:
        with pytest.raises(EtcdDenied) as error:
            await client.range(Get("/"), timeout=timeout)
    message = str(error.value)
    assert config.endpoints[0] in message
    assert message.count("\n") <= 2
    return message


@asynchronous
async def test_tls(world: World, prefix: str) -> None:
    config = EtcdConfig((world.tls.endpoint,), True, world.authority.cacert)
    async with (
        Client(config) as client,
        Session(client, 2) as session,
        Copy(client, Get(prefix)) as copy,
    ):
        await put(client, prefix, "", session.lease)
        await copy.until(lambda values: prefix in values)


@asynchronous
async def test_tls_at_several_endpoints(world: World, prefix: str) -> None:
    """One channel with many addresses fails the check of the host name."""
    port = world.tls.endpoint.rpartition(":")[2]
    endpoints = world.tls.endpoint, f"localhost:{port}"
    for at in range(2):
        async with Client(EtcdConfig(endpoints, True, world.authority.cacert)) as client:
            client._at = at
            await put(client, prefix)
            assert client.endpoint == endpoints[at]


@asynchronous
async def test_mutual_tls(world: World, prefix: str) -> None:
    files = world.authority.cacert, world.client.cert, world.client.key
    async with Client(EtcdConfig((world.mutual.endpoint,), True, *files)) as client:
        await put(client, prefix)


@asynchronous
async def test_a_certificate_names_the_user(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """Its permission is what is missing, not a user or a password."""
    authority = Authority(tmp_path, "authority")
    me, root = authority.issue("me"), authority.issue("root")
    ours = authority.cacert, me.cert, me.key
    own_etcd.scheme = "https"
    own_etcd.arguments = (*FAST, *shows(authority.issue("server")), *asking(authority))
    own_etcd.identity = showing(authority, root)
    own_etcd.start()
    own_etcd.guard("/mine/")
    async with Client(EtcdConfig((own_etcd.endpoint,), True, *ours)) as client:
        await put(client, "/mine/a")
        for access in (put, watch_for):
            with pytest.raises(EtcdDenied) as error:
                await access(client, "/yours/a")
            assert "denies the user that --cert names access to /yours/a" in str(error.value)
            assert "grant-permission" in str(error.value)


async def watch_for(client: Client, key: str) -> None:
    """Raises what becomes of etcd's answer, which is a refusal."""
    async with client.stream(WATCH, key) as stream:
        create = pb.WatchCreateRequest(key=key.encode())
        await stream.write(pb.WatchRequest(create=create))
        answer = await stream.read()
        raise canceled(answer.cancel_reason, answer.compact_revision)


@asynchronous
async def test_r19_certificates_on_a_disk_that_stands_still_stop_nobody(
    world: World, prefix: str, tmp_path: Path
) -> None:
    """Whoever opens a FIFO waits in the kernel for its writer, as for a file server."""
    cert = tmp_path / "client.crt"
    shutil.copy(world.client.cert, cert)
    files = world.authority.cacert, str(cert), world.client.key
    async with Client(EtcdConfig((world.mutual.endpoint,), True, *files)) as client:
        await put(client, prefix)
        cert.unlink()
        os.mkfifo(cert)
        for _ in range(2):  # one thread waits for it, and no request
            client.give_up(await client.connected())
            await put(client, prefix)
        assert [thread.name for thread in threading.enumerate()].count("offloaded") == 1
        await asyncio.to_thread(cert.write_bytes, Path(world.client.cert).read_bytes())
        await client.connected()
        client.give_up(await client.connected())
        await put(client, prefix)


@asynchronous
async def test_the_server_is_not_trusted(world: World) -> None:
    message = await refusal(EtcdConfig((world.tls.endpoint,), True, world.stranger.cacert))
    assert "CERTIFICATE_VERIFY_FAILED" in message
    assert "--cacert" in message


@asynchronous
async def test_the_system_s_authorities_do_not_know_the_server(world: World) -> None:
    assert "--cacert" in await refusal(EtcdConfig((world.tls.endpoint,), True))


@asynchronous
async def test_the_client_is_not_trusted(world: World) -> None:
    bad = world.stranger.issue("bad")
    files = world.authority.cacert, bad.cert, bad.key
    message = await refusal(EtcdConfig((world.mutual.endpoint,), True, *files))
    assert "check --cert and --key" in message


@asynchronous
async def test_the_client_shows_no_certificate(world: World) -> None:
    message = await refusal(EtcdConfig((world.mutual.endpoint,), True, world.authority.cacert))
    assert "check --cert and --key" in message


@asynchronous
async def test_the_certificate_is_for_another_host(world: World) -> None:
    message = await refusal(EtcdConfig((world.misnamed.endpoint,), True, world.authority.cacert))
    assert "another host" in message


@asynchronous
async def test_trust_that_ends_later_is_told_with_its_cause(
    own_etcd: EtcdServer, tmp_path: Path
) -> None:
    """Not as a stream's end, nor as an etcd that may not run."""
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    own_etcd.scheme = "https"
    own_etcd.arguments = (*FAST, *shows(authority.issue("server")))
    own_etcd.start()
    told: asyncio.Queue[str] = asyncio.Queue()
    async with (
        Client(EtcdConfig((own_etcd.endpoint,), True, authority.cacert)) as client,
        Session(client, 2, on_silence=lambda _, error: told.put_nowait(str(error))),
    ):
        await put(client, "/a")
        own_etcd.kill()
        own_etcd.arguments = (*FAST, *shows(stranger.issue("server")))
        await own_etcd.start_async()
        async with asyncio.timeout(60):
            while not (await told.get()).startswith(f"{own_etcd.endpoint}: CERTIFICATE_VERIFY_"):
                pass  # it is not up yet, or a busy machine late
        with pytest.raises(EtcdUnreachable, match=r"CERTIFICATE_VERIFY_FAILED(.|\n)*--cacert"):
            await client.range(Get("/"), timeout=5)


@asynchronous
async def test_a_trusted_endpoint_is_found_behind_an_untrusted_one(
    world: World, prefix: str
) -> None:
    endpoints = world.misnamed.endpoint, world.tls.endpoint
    async with Client(EtcdConfig(endpoints, True, world.authority.cacert)) as client:
        client._at = 0
        await put(client, prefix)
        assert client.endpoint == world.tls.endpoint


@asynchronous
async def test_tls_to_a_server_without(etcd: EtcdServer, world: World) -> None:
    async with Client(EtcdConfig((etcd.endpoint,), True, world.authority.cacert)) as client:
        with pytest.raises(EtcdUnreachable, match=r"try http://"):
            await client.range(Get("/"), timeout=1)


@asynchronous
async def test_no_tls_to_a_server_with(world: World) -> None:
    async with Client(EtcdConfig((world.tls.endpoint,))) as client:
        with pytest.raises(EtcdUnreachable, match=r"write https://"):
            await client.range(Get("/"), timeout=1)


def test_files_that_are_none(world: World, etcd: EtcdServer) -> None:
    with pytest.raises(UsageError, match="--cacert /nowhere: No such file"):
        Client(EtcdConfig(("a:1",), True, "/nowhere"))
    with pytest.raises(UsageError, match="not a PEM file"):
        Client(EtcdConfig(("a:1",), True, str(etcd.log)))


@asynchronous
async def test_grpc_keeps_its_log_to_itself(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    await refusal(EtcdConfig((world.tls.endpoint,), True, world.stranger.cacert))
    assert capfd.readouterr().err == ""
