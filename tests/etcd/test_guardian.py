"""What the other nodes see when an agent is killed: its lease is revoked at once."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Get
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import free_ports
from tests.support.aio import Copy, asynchronous, put
from tests.support.etcd import FAST, EtcdCluster, EtcdServer
from tests.support.proxy import proxy
from tests.support.stand_in import Agent, agent, ended
from tests.support.tls import Authority

TTL = 300  # far beyond any deadline here: what goes was revoked
KEY = "/mine/members/1"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdConfig]:
    """The way into an etcd that asks for a client certificate, a user and a password.

    Beside the certificate lies another one, which names the user: that is enough, too.
    """
    folder = tmp_path_factory.mktemp("strict")
    authority = Authority(folder, "authority")
    server, client = authority.issue("server"), authority.issue("machine")
    authority.issue("me")
    arguments = (
        *FAST,
        f"--cert-file={server.cert}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.cacert}",
        "--client-cert-auth",
        "--bcrypt-cost=4",
    )
    it = EtcdServer(folder, arguments=arguments, scheme="https")
    it.start()
    files = {"cacert": authority.cacert, "cert": client.cert, "key": client.key}
    flags = [f"--{name}={path}" for name, path in files.items()]
    for command in (
        "user add root:secret",
        "user grant-role root root",
        "user add me:hidden-word",
        "role add training",
        "role grant-permission training --prefix=true readwrite /mine/",
        "user grant-role me training",
        "auth enable",
    ):
        it.ctl(*flags, *command.split())
    yield EtcdConfig((it.endpoint,), True, **files, user="me", password="hidden-word")
    it.kill()


async def revoked(config: EtcdConfig, given: EtcdConfig | None = None) -> Agent:
    """Kill an agent that reaches etcd by `config`; its key must go. `given`: to its guardian."""
    async with Client(config) as client, Copy(client, Get(KEY)) as copy:
        lease = await client.grant(TTL, timeout=10)
        await put(client, KEY, "", lease.id)
        await copy.until(lambda values: KEY in values)
        with agent(given or config, lease.id) as it:
            it.kill()
            await copy.until(lambda values: KEY not in values)
            assert ended(it.guardian, *(pid for pids in it.workers for pid in pids))
            what = f"killed what it ran, lease {lease.id:x} revoked"
            said = f"Z elastic_etcd: the agent (pid {it.pid}) is gone: {what}\n"
            assert it.words().endswith(said)
            return it


@asynchronous
async def test_the_member_key_goes_at_once(etcd: EtcdServer) -> None:
    await revoked(etcd.config)


@asynchronous
async def test_client_certificate_and_user_and_password(
    strict: EtcdConfig,
) -> None:
    await revoked(strict)


@asynchronous
async def test_the_common_name_of_the_certificate(strict: EtcdConfig) -> None:
    assert strict.cert
    named = str(Path(strict.cert).with_name("me"))
    alone = replace(strict, user=None, password=None)
    await revoked(replace(alone, cert=f"{named}.crt", key=f"{named}.key"))


@asynchronous
async def test_files_named_relative_to_the_working_directory(
    strict: EtcdConfig,
) -> None:
    files = {name: getattr(strict, name) for name in ("cacert", "cert", "key")}
    here = replace(strict, **{name: os.path.relpath(path) for name, path in files.items()})
    await revoked(strict, here)


@asynchronous
async def test_the_first_endpoint_is_dead(etcd: EtcdServer) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    await revoked(etcd.config, EtcdConfig((dead, etcd.endpoint)))


@asynchronous
async def test_the_first_endpoint_is_frozen(etcd: EtcdServer) -> None:
    async with proxy(etcd.endpoint) as way:
        way.freeze()
        await revoked(etcd.config, EtcdConfig((way.endpoint, etcd.endpoint)))


@asynchronous
async def test_a_member_of_the_cluster_is_frozen(cluster: EtcdCluster) -> None:
    cluster.members[0].freeze()
    await revoked(EtcdConfig(cluster.config.endpoints[1:]), cluster.config)


@asynchronous
async def test_a_lease_that_is_gone_already_is_fine(etcd: EtcdServer) -> None:
    async with Client(etcd.config) as client:
        lease = await client.grant(TTL, timeout=10)
        await client.revoke(lease.id, timeout=10)
    with agent(etcd.config, lease.id, workers=0) as it:
        it.kill()
        assert ended(it.guardian)
        assert it.words().endswith(f"is gone: lease {lease.id:x} revoked\n")


@asynchronous
async def test_a_refusal_is_said_without_the_password(
    strict: EtcdConfig,
) -> None:
    with agent(replace(strict, password="wrong-word"), 0x123, workers=0) as it:
        it.kill()
        assert ended(it.guardian)
        words = it.words()
    assert "is gone: lease 123 not revoked: etcd at" in words
    assert "refuses the password of user 'me'" in words
    assert "wrong-word" not in words
