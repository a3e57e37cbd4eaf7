"""Rule 5: users, passwords, tokens that expire, and permissions that end."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdDenied, EtcdError
from elastic_etcd.etcd._grpc import LEASE_KEEP_ALIVE, Rpc
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client, Login, Token
from elastic_etcd.etcd.faults import TokenRefused
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.session import Session
from tests.support.aio import Copy, asynchronous, elapse, put
from tests.support.etcd import FAST, EtcdServer
from tests.support.etcd_versions import newest_or_skip
from tests.support.proxy import proxy
from tests.support.tls import rsa_pair

LOGINS = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Authenticate"'
ROOT = {"ETCDCTL_USER": "root:secret"}


@pytest.fixture(scope="module")
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    arguments = (*FAST, "--auth-token-ttl=1", "--bcrypt-cost=4")
    server = EtcdServer(tmp_path_factory.mktemp("guarded"), arguments=arguments)
    server.start()
    server.guard("/mine/")
    server.user = "root:secret"
    yield server
    server.kill()


@pytest.fixture
def guarded(_guarded: EtcdServer) -> Iterator[EtcdServer]:
    """An etcd with users; `me` may use /mine/, and tokens live for a second after their use."""
    yield _guarded
    _guarded.heal()
    _guarded.ctl("user", "grant-role", "me", "training", env=ROOT)
    _guarded.password("me", "mine")


def me(server: EtcdServer) -> EtcdConfig:
    return replace(server.config, user="me", password="mine")


@asynchronous
async def test_user_and_password(guarded: EtcdServer) -> None:
    async with Client(me(guarded)) as client:
        await put(client, "/mine/a", "1")
        assert guarded.ctl("get", "/mine/a", "--print-value-only", env=ROOT) == "1\n"


@asynchronous
async def test_wrong_password(guarded: EtcdServer) -> None:
    async with Client(replace(me(guarded), password="wrong")) as client:
        with pytest.raises(EtcdDenied) as error:
            await client.range(Get("/mine/"), timeout=10)
    message = str(error.value)
    assert f"etcd at {guarded.endpoint} refuses the password of user 'me'" in message
    assert "ELASTIC_ETCD_PASSWORD" in message
    assert "wrong" not in message
    assert message.count("\n") <= 2


@asynchronous
async def test_no_user_where_one_is_asked_for(guarded: EtcdServer) -> None:
    async with Client(guarded.config) as client:
        with pytest.raises(
            EtcdDenied, match=f"{guarded.endpoint} asks for a user.*/mine/(.|\n)*--user"
        ):
            await client.range(Get("/mine/"), timeout=10)


@asynchronous
async def test_a_user_where_none_is_asked_for(etcd: EtcdServer, prefix: str) -> None:
    async with Client(replace(etcd.config, user="me", password="x")) as client:
        await put(client, prefix)


@asynchronous
async def test_a_prefix_without_permission(guarded: EtcdServer) -> None:
    async with Client(me(guarded)) as client:
        for _ in range(2):
            with pytest.raises(EtcdDenied) as error:
                await put(client, "/yours/a")
            message = str(error.value)
            assert f"etcd at {guarded.endpoint} denies user 'me' access to /yours/a" in message
            assert "grant-permission" in message
            assert message.count("\n") <= 2
        await put(client, "/mine/a")  # the denial did no harm
        async with Copy(client, Get("/yours/", prefix=True)) as copy:
            with pytest.raises(EtcdDenied, match="/yours/"):
                await copy.until(lambda _: True)


@asynchronous
async def test_authentication_token_expiry(guarded: EtcdServer) -> None:
    async with Client(me(guarded)) as client:
        await put(client, "/mine/a")
        before = guarded.metric(LOGINS)
        await elapse(2.5)
        await put(client, "/mine/a")
        assert guarded.metric(LOGINS) == before + 1


@asynchronous
async def test_a_watch_after_token_expiry(guarded: EtcdServer) -> None:
    """The etcd3 package hangs here (python-etcd3#1227); etcd 3.5 says `permission denied`."""
    async with proxy(guarded.endpoint) as way:
        config = replace(me(guarded), endpoints=(way.endpoint,))
        async with (
            Client(config) as client,
            Client(me(guarded)) as writer,
            Copy(client, Get("/mine/", prefix=True)) as copy,
        ):
            await copy.until(lambda _: True)
            await elapse(2.5)
            way.cut()
            await put(writer, "/mine/a", "after")
            await copy.until(lambda values: values.get("/mine/a") == "after", timeout=5)


@asynchronous
async def test_everybody_logs_in_once(guarded: EtcdServer) -> None:
    """A restart forgets the tokens: one login for all the requests under way."""
    async with Client(me(guarded)) as client:
        await put(client, "/mine/a")
        guarded.kill()
        await guarded.start_async()
        await client.range(Get("/mine/"), timeout=10)
        before = guarded.metric(LOGINS)
        await elapse(2.5)
        puts = (client.txn(Txn((), (Put(f"/mine/{i}", ""),)), timeout=10) for i in range(20))
        assert all(result.succeeded for result in await asyncio.gather(*puts))
        assert guarded.metric(LOGINS) == before + 1


@asynchronous
async def test_single_flight() -> None:
    calls = 0

    async def authenticate(request: pb.AuthenticateRequest) -> str:
        nonlocal calls
        assert (request.name, request.password) == ("me", "mine")
        calls += 1
        await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=0.05)
        return f"token {calls}"

    login = Login(EtcdConfig(("a:1",), user="me", password="mine"))
    tokens = await asyncio.gather(*(login.token(authenticate) for _ in range(10)))
    assert {token.value for token in tokens} == {"token 1"}
    for _ in range(3):
        login.forget(tokens[0])  # only the first has anything to forget
        assert (await login.token(authenticate)).value == "token 2"
    assert isinstance(tokens[0], Token)
    assert "mine" not in repr(login.__dict__["_token"])


@asynchronous
async def test_session_and_mirror_through_a_restart(guarded: EtcdServer) -> None:
    async with (
        Client(me(guarded)) as client,
        Session(client, 3) as session,
        Copy(client, Get("/mine/", prefix=True)) as copy,
    ):
        await copy.until(lambda _: True)
        guarded.kill()
        await guarded.start_async()
        await put(client, "/mine/restart", "after", session.lease)
        await copy.until(lambda values: values.get("/mine/restart") == "after")
        assert not session.lost.done()


class Renewals:
    """What a session tells of its renewals."""

    def __init__(self) -> None:
        self.failed: list[Exception] = []
        self.failing, self.renewed = asyncio.Event(), asyncio.Event()

    def session(self, client: Client, ttl: int, often: int = 3) -> Session:
        back = self.renewed.set
        return Session(client, ttl, often=often, on_silence=self._on_silence, on_answer=back)

    @property
    def refused(self) -> list[Exception]:
        """All but what a busy machine has not answered in time."""
        return [each for each in self.failed if isinstance(each, TokenRefused | EtcdError)]

    async def refusal(self, text: str) -> None:
        """Wait until such a one is told."""
        async with asyncio.timeout(60):
            while not (self.refused and text in str(self.refused[-1])):
                self.failing.clear()
                await self.failing.wait()

    def _on_silence(self, _: float, error: Exception) -> None:
        self.failed.append(error)
        self.failing.set()


def newest(folder: Path, *arguments: str) -> EtcdServer:
    """An etcd that asks for a name at each renewal of a lease, with users."""
    arguments = (*FAST, "--bcrypt-cost=4", *arguments)
    server = EtcdServer(folder, arguments=arguments, program=newest_or_skip())
    server.start()
    server.guard("/mine/")
    server.user = "root:secret"
    return server


@asynchronous
async def test_e1_a_token_that_ends_is_replaced_before_anything_is_said(tmp_path: Path) -> None:
    """A JSON Web Token ends at its time, and all end with any change of users."""
    keys = rsa_pair(tmp_path)
    token = f"jwt,pub-key={keys.cert},priv-key={keys.key},sign-method=RS256,ttl=2s"
    server, told = newest(tmp_path, f"--auth-token={token}"), Renewals()
    try:
        async with (
            Client(me(server)) as client,
            told.session(client, 6) as session,
            Copy(client, Get("/mine/", prefix=True)) as copy,
        ):
            await put(client, "/mine/member", "me", session.lease)
            seen = server.metric(LOGINS)
            for number in range(2):
                server.ctl("role", "add", f"another {number}")  # which logs in once, too
                for _ in range(3):
                    while server.metric(LOGINS) < seen + 1:
                        assert told.refused == []
                        assert not session.lost.done()
                        await elapse(0.2)
                    seen += 1
            await put(client, "/mine/member", "still me", session.lease)
            await copy.until(lambda values: values.get("/mine/member") == "still me")
    finally:
        server.kill()


class Hesitant(Client):
    """Between the first login for a renewal and the renewal a busy machine does something else."""

    hesitates = True

    @asynccontextmanager
    async def stream(self, rpc: Rpc[Any, Any], *args: Any, **options: Any) -> AsyncIterator[Any]:
        hesitates = rpc is LEASE_KEEP_ALIVE and self.hesitates
        if hesitates:
            self.hesitates = False
            self._login.forget(self._login.known)
        async with super().stream(rpc, *args, **options) as stream:
            if hesitates:
                await elapse(6)
            yield stream


@asynchronous
async def test_e1_a_token_that_ends_before_it_is_used_is_no_refusal(tmp_path: Path) -> None:
    keys = rsa_pair(tmp_path)
    token = f"jwt,pub-key={keys.cert},priv-key={keys.key},sign-method=RS256,ttl=5s"
    server, told = newest(tmp_path, f"--auth-token={token}"), Renewals()
    renewed = asyncio.Event()
    try:
        async with Hesitant(me(server)) as client:
            session = Session(
                client, 60, on_silence=told._on_silence, on_renewed=lambda _: renewed.set()
            )
            async with session:
                await asyncio.wait_for(renewed.wait(), 60)
                assert not client.hesitates
                assert told.refused == []
    finally:
        server.kill()


@asynchronous
async def test_e2_a_renewal_that_is_refused_is_no_silence(tmp_path: Path) -> None:
    """It is told as a refusal, also of a password, and the lease goes on once that is mended."""
    server, told = newest(tmp_path, "--auth-token-ttl=1"), Renewals()
    try:
        async with Client(me(server)) as client, told.session(client, 20) as session:
            await put(client, "/mine/member", "me", session.lease)
            server.ctl("user", "revoke-role", "me", "training")
            await told.refusal("denies user 'me' access to its lease")
            assert len(told.refused) == 1
            server.ctl("user", "grant-role", "me", "training")
            await asyncio.wait_for(told.renewed.wait(), 60)
            told.renewed.clear()
            server.password("me", "changed")
            server.kill()  # and with it the tokens
            await server.start_async()
            await told.refusal("password of user 'me'")
            server.password("me", "mine")
            await asyncio.wait_for(told.renewed.wait(), 60)
            assert not session.lost.done()
    finally:
        server.kill()


@asynchronous
async def test_r3_a_lease_is_renewed_without_a_login(guarded: EtcdServer) -> None:
    """Older etcds ask nobody who renews: a changed password costs no lease."""
    if guarded.asks_who_renews:
        pytest.skip("this etcd asks who renews")
    told = Renewals()
    silent, back = told.failing, told.renewed
    async with (
        proxy(guarded.endpoint) as way,
        Client(replace(me(guarded), endpoints=(way.endpoint,))) as client,
        told.session(client, 30, often=15) as session,
    ):
        guarded.password("me", "changed")
        way.cut(refuse=True)
        await asyncio.wait_for(silent.wait(), 60)
        with pytest.raises(EtcdDenied):
            async with Client(me(guarded)) as other:
                await other.range(Get("/mine/"), timeout=5)
        way.thaw()
        await asyncio.wait_for(back.wait(), 60)
        with pytest.raises(EtcdDenied):
            await client.range(Get("/mine/"), timeout=5)
        silent.clear()
        back.clear()
        way.cut(refuse=True)
        await asyncio.wait_for(silent.wait(), 60)
        way.thaw()
        await asyncio.wait_for(back.wait(), 60)
        guarded.password("me", "mine")
        assert not session.lost.done()
        assert not any(isinstance(error, EtcdDenied) for error in told.failed)


@asynchronous
async def test_r3_a_password_file_is_read_at_each_login(
    guarded: EtcdServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("changed\n")
    guarded.password("me", "changed")
    config = replace(me(guarded), password_file=str(file))
    async with Client(config) as client:
        await put(client, "/mine/a", "1")
        guarded.password("me", "mine")
        with pytest.raises(EtcdDenied, match="--password-file"):
            await client.range(Get("/mine/"), timeout=5)
        file.unlink()  # it is being replaced: the last one counts
        with pytest.raises(EtcdDenied):
            await client.range(Get("/mine/"), timeout=5)
        file.write_text("mine\n")
        await put(client, "/mine/a", "2")


@asynchronous
async def test_r3_a_permission_that_ends_is_waited_for(guarded: EtcdServer) -> None:
    """Also where the watch goes on, and only a list is refused."""
    async with proxy(guarded.endpoint) as way:
        config = replace(me(guarded), endpoints=(way.endpoint,))
        async with (
            Client(config) as client,
            Copy(client, Get("/mine/", prefix=True), reconcile=0.1) as copy,
        ):
            await copy.until(lambda _: True)
            guarded.ctl("user", "revoke-role", "me", "training", env=ROOT)
            way.cut()
            await elapse(1.5)
            assert not copy.mirror.failed.done()
            guarded.ctl("user", "grant-role", "me", "training", env=ROOT)
            guarded.ctl("put", "/mine/a", "after", env=ROOT)
            await copy.until(lambda values: values.get("/mine/a") == "after", timeout=20)


def test_the_password_is_in_no_repr(tmp_path: Path) -> None:
    config = me(EtcdServer(tmp_path))
    assert "mine" not in repr(config)
    assert "mine" not in str(config)
