"""The etcd client: a handful of RPCs that outlive frozen members, elections and restarts.

One channel to one endpoint at a time. An attempt that fails, or gets no answer in 1-2 s,
moves everything to the next endpoint (one channel with many addresses stays with a frozen
member for ever: etcd#8980). The two streams, keepalive and watch, are in session.py and
mirror.py.
"""

import math
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self

from elastic_etcd.core.txn import Delete, Get, KeyValue, Put, Snapshot, Txn
from elastic_etcd.errors import EtcdRefused, EtcdUnreachable, ForkedClient, UsageError
from elastic_etcd.etcd import channel, faults, wire
from elastic_etcd.etcd.auth import ANONYMOUS, Login, Token
from elastic_etcd.etcd.channel import Answer, Connection, Request, Rpc, Stream
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.faults import Compacted, RpcFailed, TokenRefused, Unanswered, Untrusted
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import growing, jitter, now, retrying

PAGE = 1000
ATTEMPT_TIMEOUT = (1.0, 2.0)
LOGIN_TIMEOUT = 5.0  # a login costs etcd 60 ms, and many agents may come at once


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`gets` has one tuple for each Get of the branch that ran.

    `ambiguous`: an earlier attempt may have been applied, so `succeeded=False` may mean that
    this very Txn succeeded before. Read again and compare.
    """

    succeeded: bool
    revision: int
    ambiguous: bool
    gets: tuple[tuple[KeyValue, ...], ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease and the TTL that etcd granted, in seconds (it has a minimum)."""

    id: int
    ttl: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A snapshot, and which history of which cluster it belongs to."""

    snapshot: Snapshot
    cluster: int
    term: int


class Client:
    """`async with Client(config) as client`, in the event loop that will use it.

    Every request takes a `timeout` in seconds; None tries for ever. Raises EtcdUnreachable
    when it is over, EtcdDenied, EtcdRefused, and ForkedClient in a forked child.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._credentials = channel.credentials(config)
        self._login = Login(config)
        self._pid = os.getpid()
        self._at = jitter.randrange(len(config.endpoints))  # agents spread over the members
        self._connection: Connection | None = None
        self._retired: set[Connection] = set()
        self._answered = False
        self._untrusted: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if os.getpid() != self._pid:  # gRPC's threads did not come along
            return
        connections = {*self._retired, *filter(None, [self._connection])}
        self._connection = None
        self._retired.clear()
        for connection in connections:
            await connection.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, `host:port`."""
        return self._config.endpoints[self._at]

    async def txn(self, txn: Txn, timeout: float | None = None) -> TxnResult:
        """Do `txn`; see TxnResult about a Txn that may have been done twice."""
        request = wire.txn_request(txn)
        answer, applied = await self.call(channel.TXN, request, _keys(txn), _deadline(timeout))
        writes = any(isinstance(operation, Put | Delete) for operation in txn.then)
        return TxnResult(
            answer.succeeded, answer.header.revision, writes and applied, wire.gets(answer)
        )

    async def range(self, *ranges: Get, timeout: float | None = None) -> Snapshot:
        """All of `ranges` as they stand at one revision, linearizable, read in pages."""
        return (await self.list(*ranges, timeout=timeout)).snapshot

    async def list(
        self, *ranges: Get, timeout: float | None = None, values: bool = True
    ) -> Listing:
        """As `range`, with the cluster's identity; without `values` each is empty."""
        deadline = _deadline(timeout)
        while True:
            try:
                return await self._pages(ranges, deadline, values=values)
            except Compacted:  # between two pages; the first page's revision is a new one
                continue

    async def grant(self, ttl: int, timeout: float | None = None) -> Lease:
        """A new lease of at least `ttl` seconds. One that got lost on the way back expires."""
        request = pb.LeaseGrantRequest(ttl=ttl)
        answer, _ = await self.call(channel.LEASE_GRANT, request, "a lease", _deadline(timeout))
        return Lease(answer.id, answer.ttl)

    async def revoke(self, lease: int, timeout: float | None = None) -> None:
        """End the lease and delete its keys; fine if it is gone already."""
        request = pb.LeaseRevokeRequest(id=lease)
        what = f"lease {lease:x}"
        try:
            await self.call(channel.LEASE_REVOKE, request, what, _deadline(timeout))
        except EtcdRefused as error:
            if faults.LEASE_NOT_FOUND not in str(error):
                raise

    def local_address(self) -> str:
        """This machine's IP address on the way to etcd."""
        host, _, port = self.endpoint.rpartition(":")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # UDP: chooses a route, sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise EtcdUnreachable(
                f"no way to etcd at {self.endpoint} ({error.strerror}).\n"
                "Check --etcd and this machine's network, or give --advertise."
            ) from None

    async def call(
        self, rpc: Rpc[Request, Answer], request: Request, what: str, deadline: float
    ) -> tuple[Answer, bool]:
        """The answer, and whether an earlier attempt may have been applied as well."""
        self._check_process()
        began = now()
        applied = False
        try:
            async for attempt in retrying(deadline):
                with attempt:
                    try:
                        patience = growing(jitter.uniform(*ATTEMPT_TIMEOUT), attempt.retry_state)
                        limits = began, deadline, patience
                        return await self._attempt(rpc, request, what, limits), applied
                    except Unanswered as error:
                        applied = applied or error.applied
                        raise
        except Unanswered as error:
            raise self._unreachable(error, now() - began) from error
        raise AssertionError("tenacity ends with a result or an error")

    @asynccontextmanager
    async def stream(
        self, rpc: Rpc[Request, Answer], what: str, metadata: channel.Metadata = ()
    ) -> AsyncIterator[Stream[Request, Answer]]:
        """A stream on the current connection.

        Inside, Unanswered gives the endpoint up if it is to blame, and TokenRefused means
        EtcdDenied if the token is not older than `stream.began` (set that after each
        success); gRPC's errors become these.
        """
        self._check_process()
        began = now()
        token = await self._token(now() + LOGIN_TIMEOUT)
        connection = self.connection()
        stream = connection.open(rpc, token.metadata + metadata, began)
        try:
            yield stream
        except (RpcFailed, Unanswered) as error:
            raise self._judged(error, connection, what, token, stream.began) from error
        finally:
            stream.close()

    def connection(self) -> Connection:
        """The connection in use; made without waiting for it to be established."""
        if self._connection is None:
            # Certificates are renewed under a long training; one that is being replaced at this
            # very moment will be read at the next connection.
            with suppress(UsageError):
                self._credentials = channel.credentials(self._config)
            self._connection = Connection(self.endpoint, self._credentials)
        return self._connection

    def give_up(self, connection: Connection) -> None:
        """`connection` does not answer: everything on it moves to the next endpoint."""
        if connection.retired:
            return
        if connection is self._connection:
            self._connection = None
            self._at = (self._at + 1) % len(self._config.endpoints)
        self._retired = {old for old in self._retired if not old.closed} | {connection}
        connection.retire()

    async def _attempt(
        self,
        rpc: Rpc[Request, Answer],
        request: Request,
        what: str,
        limits: tuple[float, float, float],
    ) -> Answer:
        """One attempt at the current endpoint. Raises Unanswered, EtcdDenied, EtcdRefused.

        `limits`: when the call began, its deadline, and how long this attempt may take.
        """
        began, deadline, patience = limits
        token = await self._token(deadline)
        connection = self.connection()
        limit = min(patience, max(deadline - now(), 0.001))
        try:
            answer = await connection.unary(rpc, request, limit, token.metadata)
        except (RpcFailed, Unanswered) as error:
            hurry = limit < patience  # the caller's: not the endpoint's fault
            raise self._judged(error, connection, what, token, began, hurry=hurry) from error
        self._answered = True
        return answer

    async def _token(self, deadline: float) -> Token:
        """The token for a request at the current endpoint."""

        async def authenticate(request: pb.AuthenticateRequest) -> str:
            connection = self.connection()
            limit = min(LOGIN_TIMEOUT, max(deadline - now(), 0.001))
            try:
                answer = await connection.unary(channel.AUTHENTICATE, request, limit, ())
            except (RpcFailed, Unanswered) as error:
                if isinstance(error, RpcFailed) and error.details == faults.AUTH_NOT_ENABLED:
                    return ""  # as etcdctl: a user who is not asked for is no error
                raise self._judged(error, connection, "a login", ANONYMOUS, now()) from error
            return answer.token

        return await self._login.token(authenticate)

    def _judged(
        self,
        error: RpcFailed | Unanswered,
        connection: Connection,
        what: str,
        token: Token,
        began: float,
        *,
        hurry: bool = False,
    ) -> Exception:
        """What to raise for `error`, once its consequences have been drawn."""
        endpoint, user = connection.endpoint, self._login.user
        fault = faults.translate(error, endpoint, what, user)
        if isinstance(fault, TokenRefused):
            self._login.forget(token)
            if user is None or token.issued >= began:
                return faults.denied(endpoint, what, user)
        if isinstance(fault, Untrusted) and not self._answered:
            self._untrusted.add(endpoint)
            if self._untrusted.issuperset(self._config.endpoints):
                return faults.untrusted(endpoint, fault.reason)
        if isinstance(fault, Unanswered) and fault.move and not hurry:
            self.give_up(connection)
        return fault

    async def _pages(self, ranges: tuple[Get, ...], deadline: float, *, values: bool) -> Listing:
        """The first page of every range in one request, the others at its revision."""
        wire.check_size(len(ranges))
        what = ", ".join(get.key for get in ranges)
        asked = [wire.range_request(get, limit=PAGE, values=values) for get in ranges]
        if len(asked) == 1:  # not as a Txn: see "panics" in docs/failures.md
            only, _ = await self.call(channel.RANGE, asked[0], what, deadline)
            header, pages = only.header, [only]
        else:
            request = pb.TxnRequest(success=[pb.RequestOp(range=page) for page in asked])
            several, _ = await self.call(channel.TXN, request, what, deadline)
            header, pages = several.header, [answer.range for answer in several.responses]
        revision = header.revision
        kvs: list[pb.KeyValue] = []
        for get, first in zip(ranges, pages, strict=True):
            page = first
            kvs.extend(page.kvs)
            while page.more:
                rest = wire.range_request(get, limit=PAGE, values=values)
                rest.key, rest.revision = page.kvs[-1].key + b"\0", revision
                page, _ = await self.call(channel.RANGE, rest, what, deadline)
                kvs.extend(page.kvs)
        found = {kv.key: kv for kv in map(wire.key_value, kvs)}
        return Listing(Snapshot(revision, found), header.cluster_id, header.raft_term)

    def _unreachable(self, error: Unanswered, seconds: float) -> EtcdUnreachable:
        return faults.unreachable(self._config.endpoints, error.reason, seconds)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"the etcd client of process {self._pid} is used in its forked child "
                f"{os.getpid()}: gRPC does not survive a fork; make a Client in the child"
            )


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else now() + timeout


def _keys(txn: Txn) -> str:
    """The first key that `txn` is about, for messages."""
    for part in (txn.then, txn.compare, txn.otherwise):
        if part:
            return part[0].key
    return "nothing"
