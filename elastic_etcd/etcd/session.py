"""A session: a lease that is kept alive.

It sends a request each third of the TTL that etcd granted, or more often, on one stream. When as
long passes without an answer, the client gives the endpoint up and moves to the next one with all
its streams (a gRPC ping would notice after 65 s). No error ends a session: only etcd's word that
the lease is gone.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from elastic_etcd.errors import EtcdDenied, EtcdError
from elastic_etcd.etcd._grpc import LEASE_KEEP_ALIVE
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.connection import Connection
from elastic_etcd.etcd.faults import LeaseExists, TokenRefused, Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import Attempts, boottime, now
from elastic_etcd.times import REVOKE_TIMEOUT

log = logging.getLogger(__name__)


class Session:
    """`async with Session(client, ttl) as session`: a lease for as long as the scope lasts.

    It is renewed `often` times in each TTL. With `lease` it is the lease of an earlier session,
    which goes on, or is granted once more if it has ended.

    `lost` gets its result, the reason, when etcd says that the lease is gone; its exception is a
    fault of this program.
    `silent_since` is the monotonic time of the last renewal while no endpoint renews it, else
    None. `on_silence(seconds, error)` is called at every attempt that fails once a renewal is as
    late as another one would be due, with an error that begins with the endpoint; and at once with
    an EtcdError where etcd refuses it. `on_answer()` is called when etcd renews again. `renewed`
    is when the last renewal that was answered was sent, by `boottime`, and `on_renewed(seconds)`
    is called at each, with the time since the one before. Leaving the scope revokes the lease,
    which its watchers see at once.
    """

    def __init__(
        self,
        client: Client,
        ttl: int,
        *,
        often: int = 3,
        lease: int = 0,
        timeout: float | None = None,
        on_silence: Callable[[float, Exception], None] = lambda _seconds, _error: None,
        on_answer: Callable[[], None] = lambda: None,
        on_renewed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.lease = lease
        self.ttl = ttl
        self.often = often
        self.silent_since: float | None = None
        self.renewed = 0.0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._timeout = timeout
        self._on_silence = on_silence
        self._on_answer = on_answer
        self._on_renewed = on_renewed
        self._renewed = 0.0
        self._orphaned = False
        self._login = True  # before the next attempt, if there is no token
        self._denied = False  # since the last renewal
        self._attempts = Attempts()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._renewed, self.renewed = now(), boottime()
        with suppress(LeaseExists):
            lease = await self._client.grant(self.ttl, self._timeout, self.lease)
            self.lease, self.ttl = lease.id, lease.ttl
        self._keeper = asyncio.create_task(self._keep_alive(), name="keepalive")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._orphaned or self.lost.done():
            return
        try:
            await self._client.revoke(self.lease, REVOKE_TIMEOUT)
        except EtcdError as reason:
            log.warning("lease %x is left to expire in %s s: %s", self.lease, self.ttl, reason)

    @property
    def _pace(self) -> float:
        """Seconds from one renewal to the next."""
        return self.ttl / self.often

    def fall_silent(self) -> None:
        """Count from the last renewal as silent, until the next one is answered."""
        if self.silent_since is None:
            self.silent_since = self._renewed

    def orphan(self) -> None:
        """Leave the lease to its next holder: the scope's end does not revoke it."""
        self._orphaned = True

    async def _keep_alive(self) -> None:
        """Renew until the lease is gone, which is the result of `lost`."""
        try:
            self.lost.set_result(await self._attempts.run(self._renew))
        except Exception as error:  # noqa: BLE001 - our own fault must not pass for a live lease
            if not self.lost.done():
                self.lost.set_exception(error)

    async def _renew(self) -> str:
        """Renew until the lease is gone; gives the reason. Raises Unanswered."""
        connection = await self._client.connected()
        try:
            return await self._renew_on_one_stream(connection)
        except (EtcdError, Unanswered) as error:
            # An etcd older than 3.4.42, 3.5.28 and 3.6.9 asks nobody who renews: there a changed
            # password costs no lease. A token that has ended is no news: the next attempt has one.
            self._login = isinstance(error, TokenRefused)
            # Nor is a login that is refused once: a busy machine may have used its token too late.
            first = isinstance(error, EtcdDenied) and not self._denied
            self._denied = self._denied or first
            if not (self._login or first):
                self._failed(connection.endpoint, error)
            # Also what looks final (a permission) may be put right before the TTL.
            raise Unanswered(str(error)) from error

    async def _renew_on_one_stream(self, connection: Connection) -> str:
        """As `_renew`; raises EtcdError, too."""
        pace = self._pace
        request = pb.LeaseKeepAliveRequest(id=self.lease)
        loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(pace) as patience,
                self._client.stream(LEASE_KEEP_ALIVE, "its lease", login=self._login) as stream,
            ):
                while True:
                    sent, booted = now(), boottime()
                    await stream.write(request)
                    answer = await stream.read()
                    patience.reschedule(None)
                    if answer.ttl <= 0:
                        return f"etcd at {connection.endpoint} says it has expired"
                    stream.began = now()
                    self._answered(sent, booted)
                    await asyncio.wait({self.lost}, timeout=max(0.0, sent + pace - now()))
                    patience.reschedule(loop.time() + pace)
        except TimeoutError:
            why = f"silent for {pace:.1f} s"
            self._client.give_up(connection, why)
            raise Unanswered(why) from None

    def _answered(self, sent: float, booted: float) -> None:
        self._attempts.start_over()
        self._denied = False
        before = self.renewed
        self._renewed, self.renewed = sent, booted
        self._on_renewed(boottime() - before)
        if self.silent_since is not None:
            self.silent_since = None
            self._on_answer()

    def _failed(self, endpoint: str, error: EtcdError | Unanswered) -> None:
        log.debug("keepalive of lease %x at %s: %s", self.lease, endpoint, error)
        told: Exception = error
        if isinstance(error, Unanswered):
            if now() < self._renewed + 2 * self._pace:
                return  # another endpoint may answer in time
            told = Unanswered(f"{endpoint}: {error.reason}")
        self.fall_silent()
        assert self.silent_since is not None
        self._on_silence(now() - self.silent_since, told)
