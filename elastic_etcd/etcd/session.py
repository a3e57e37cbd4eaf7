"""A lease kept alive: whoever holds it is a member, and the answers show that etcd is there.

One stream per process, a request each third of the TTL that etcd granted. A third without
an answer condemns the endpoint, and the client moves on with everything (a gRPC ping would
find out after 65 s). Errors never end a session: only etcd's word that the lease is gone.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from tenacity import RetryCallState

from elastic_etcd.errors import EtcdError
from elastic_etcd.etcd import channel
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.faults import Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import now, retrying, start_over

log = logging.getLogger(__name__)

REVOKE_TIMEOUT = 2.0


class Session:
    """`async with Session(client, ttl) as session`: a lease for as long as the scope lasts.

    `lost` gets its result, the reason, when etcd says that the lease is gone.
    `silent_since` is the monotonic time of the last renewal while no endpoint answers, else
    None. `on_silence(seconds)` is called at every attempt that fails, `on_answer()` when etcd
    is back. Leaving the scope revokes the lease, which its watchers see at once.
    """

    def __init__(
        self,
        client: Client,
        ttl: int,
        *,
        timeout: float | None = None,
        on_silence: Callable[[float], None] = lambda _: None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.lease = 0
        self.ttl = ttl
        self.silent_since: float | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._timeout = timeout
        self._on_silence = on_silence
        self._on_answer = on_answer
        self._renewed = 0.0
        self._orphaned = False
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._renewed = now()
        lease = await self._client.grant(self.ttl, self._timeout)
        self.lease, self.ttl = lease.id, lease.ttl
        self._keeper = asyncio.create_task(self._keep_alive(), name="keepalive")
        self._keeper.add_done_callback(self._ended)
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

    def orphan(self) -> None:
        """Leave the lease to whoever holds it next: the scope's end will not revoke it."""
        self._orphaned = True

    async def _keep_alive(self) -> None:
        async for attempt in retrying():
            with attempt:
                try:
                    await self._renew(attempt.retry_state)
                except (EtcdError, Unanswered) as error:
                    self._silent(error)
                    # Also what looks final (a permission) may be put right before the TTL.
                    raise Unanswered(str(error)) from error

    async def _renew(self, attempts: RetryCallState) -> None:
        """Renew on one stream until the lease is gone. Raises Unanswered, EtcdError."""
        pace = self.ttl / 3
        connection = self._client.connection()
        request = pb.LeaseKeepAliveRequest(id=self.lease)
        loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(pace) as patience,
                self._client.stream(channel.LEASE_KEEP_ALIVE, "its lease") as stream,
            ):
                while True:
                    sent = now()
                    await stream.write(request)
                    answer = await stream.read()
                    patience.reschedule(None)
                    if answer.ttl <= 0:
                        self.lost.set_result(f"etcd at {connection.endpoint} says it has expired")
                        return
                    stream.began = now()
                    self._answered(sent, attempts)
                    await asyncio.wait({self.lost}, timeout=max(0.0, sent + pace - now()))
                    patience.reschedule(loop.time() + pace)
        except TimeoutError:
            self._client.give_up(connection)
            raise Unanswered(f"{connection.endpoint} is silent for {pace:.1f} s") from None

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        """A fault of this program in the keepalive must not pass for a live lease."""
        if not keeper.cancelled() and (error := keeper.exception()) and not self.lost.done():
            self.lost.set_exception(error)

    def _answered(self, sent: float, attempts: RetryCallState) -> None:
        start_over(attempts)
        self._renewed = sent
        if self.silent_since is not None:
            self.silent_since = None
            self._on_answer()

    def _silent(self, error: Exception) -> None:
        log.debug("keepalive of lease %x: %s", self.lease, error)
        if self.silent_since is None:
            self.silent_since = self._renewed
        self._on_silence(now() - self.silent_since)
