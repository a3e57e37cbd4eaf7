"""The etcd client: requests that outlive frozen members, elections and restarts of etcd.

It has one channel to one endpoint at a time. An attempt that fails, or gets no answer in 1-2 s,
moves everything to the next endpoint (one channel with many addresses stays with a frozen
member for ever: etcd#8980). The two streams, keepalive and watch, are in session.py and
mirror.py.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Never, Self

from elastic_etcd.core.txn import Delete, Get, KeyValue, Put, Snapshot, Txn
from elastic_etcd.errors import ForkedClient, UsageError
from elastic_etcd.etcd import _grpc, faults, wire
from elastic_etcd.etcd.access import EtcdConfig, first_line
from elastic_etcd.etcd.connection import Connection, Metadata, Stream
from elastic_etcd.etcd.faults import (
    Compacted,
    LeaseNotFound,
    RpcFailed,
    TokenRefused,
    Unanswered,
    Untrusted,
)
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import Attempts, Refusals, jitter, now
from elastic_etcd.system.threads import begin, in_thread
from elastic_etcd.times import ATTEMPT_TIMEOUT, CERTIFICATES, LOGIN_TIMEOUT, PASSWORD_FILE

PAGE = 1000


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The answer to a Txn.

    An earlier attempt of an `ambiguous` one may have been applied, so `succeeded=False` may mean
    that this very Txn succeeded before. Read again and compare.
    """

    succeeded: bool
    revision: int
    ambiguous: bool
    gets: tuple[tuple[KeyValue, ...], ...]  # a tuple for each Get of the branch that ran


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease that etcd has granted."""

    id: int
    ttl: int  # in seconds, as granted: etcd has a minimum


@dataclass(frozen=True, slots=True)
class Listing:
    """A snapshot, and which history of which cluster it belongs to."""

    snapshot: Snapshot
    cluster: int
    term: int


@dataclass(frozen=True, slots=True)
class Token:
    """The token that etcd gave for the password."""

    value: str  # "" if this etcd asks for none
    issued: float

    @property
    def metadata(self) -> Metadata:
        """The metadata that is sent with each request."""
        return (("token", self.value),) if self.value else ()


ANONYMOUS = Token("", 0.0)


class Login:
    """Keeps one token. A login costs etcd 60 ms of CPU, so it is done once at a time.

    The password file is read at each login, so that a password can be changed.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.user = config.user
        self._password = config.password or ""
        self._file = config.password_file
        self._token: Token | None = None
        self._lock = asyncio.Lock()

    async def token(
        self, authenticate: Callable[[pb.AuthenticateRequest], Awaitable[str]]
    ) -> Token:
        """The token, from `authenticate` when there is none; its errors are raised."""
        if self.user is None:
            return ANONYMOUS
        if self._token is None:
            async with self._lock:
                if self._token is None:  # nobody else got one while we waited for the lock
                    password = await self._read_password()
                    issued = now()
                    request = pb.AuthenticateRequest(name=self.user, password=password)
                    self._token = Token(await authenticate(request), issued)
        return self._token

    @property
    def known(self) -> Token:
        """The token that there is, for a request that does without as well."""
        return self._token or ANONYMOUS

    async def _read_password(self) -> str:
        if self._file is not None:
            with suppress(OSError, UsageError):  # it is being replaced: the last one counts
                read = partial(first_line, self._file)
                self._password = await in_thread(read, PASSWORD_FILE)
        return self._password

    def forget(self, token: Token) -> None:
        """Forget a `token` that etcd refused: whoever comes next logs in again."""
        if self._token is token:
            self._token = None


@dataclass(slots=True)
class Call(Generic[_grpc.Request, _grpc.Answer]):
    """A request that is repeated until it is answered, or its deadline is over."""

    rpc: _grpc.Rpc[_grpc.Request, _grpc.Answer]
    request: _grpc.Request
    what: str  # it is about, for messages
    attempts: Attempts
    began: float = field(default_factory=now)
    applied: bool = False  # an attempt that failed may have been applied
    why: str = ""  # the last attempt failed for which there was time


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a request: whatever its error is judged by."""

    what: str
    connection: Connection
    token: Token
    began: float  # a token that was issued later is fresh
    hurried: bool = False  # it got less time than an endpoint needs: the caller had no more


class Client:
    """`async with Client(config) as client`, in the event loop that will use it.

    Every request takes a `timeout` in seconds; None tries for ever. Raises EtcdUnreachable
    when it is over, EtcdDenied, EtcdRefused, and ForkedClient in a forked child. `on_answer` is
    called with the seconds that each answer took.
    """

    def __init__(
        self, config: EtcdConfig, on_answer: Callable[[float], None] | None = None
    ) -> None:
        self.endpoints = config.endpoints
        self.refusals = Refusals()
        self._config = config
        self._on_answer = on_answer
        self._credentials = _grpc.credentials_of(_grpc.certificates(config))
        self._reading: asyncio.Future[_grpc.Certificates | None] | None = None  # it may take long
        self._login = Login(config)
        self._pid = os.getpid()
        self._at = jitter.randrange(len(self.endpoints))  # agents spread over the members
        self._connection: Connection | None = None
        # gRPC ends its threads with its last channel, and makes none ever again if it is refused
        # some at the next (1.85): this one is never used, and open.
        self._idle: Connection | None = None
        self._retired: set[Connection] = set()
        self._answered = False
        self._untrusted: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if os.getpid() != self._pid:  # gRPC's threads did not come along
            return
        connections = {*self._retired, *filter(None, [self._connection, self._idle])}
        self._connection = self._idle = None
        self._retired.clear()
        for connection in connections:
            await connection.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, `host:port`."""
        return self.endpoints[self._at]

    async def txn(self, txn: Txn, timeout: float | None = None) -> TxnResult:
        """Do `txn`; see TxnResult about a Txn that may have been done twice."""
        request = wire.txn_request(txn)
        keys = [part.key for part in (*txn.then, *txn.compare, *txn.otherwise)]
        what = keys[0] if keys else "nothing"
        answer, applied = await self.call(_grpc.TXN, request, what, _deadline(timeout))
        writes = any(isinstance(operation, Put | Delete) for operation in txn.then)
        return TxnResult(
            answer.succeeded, answer.header.revision, writes and applied, wire.gets(answer)
        )

    async def range(self, *ranges: Get, timeout: float | None = None) -> Snapshot:
        """All of `ranges` as they stand at one revision, linearizable, read in pages."""
        return (await self.list(*ranges, timeout=timeout)).snapshot

    async def list(
        self,
        *ranges: Get,
        timeout: float | None = None,
        values: bool = True,
        most: int | None = None,
    ) -> Listing:
        """As `range`, with the cluster's identity; without `values` each is empty.

        Raises TooLarge for more than `most` keys.
        """
        deadline = _deadline(timeout)
        while True:
            try:
                return await self._pages(ranges, deadline, values=values, most=most)
            except Compacted:  # between two pages; the first page's revision is a new one
                continue

    async def grant(self, ttl: int, timeout: float | None = None, lease: int = 0) -> LeaseGrant:
        """A new lease of at least `ttl` seconds; it expires if the answer gets lost on its way.

        It gets the id `lease`, if that is given. Raises LeaseExists.
        """
        request = pb.LeaseGrantRequest(ttl=ttl, id=lease)
        answer, _ = await self.call(_grpc.LEASE_GRANT, request, "a lease", _deadline(timeout))
        return LeaseGrant(answer.id, answer.ttl)

    async def revoke(self, lease: int, timeout: float | None = None) -> None:
        """End the lease and delete its keys; fine if it is gone already."""
        request = pb.LeaseRevokeRequest(id=lease)
        what = f"lease {lease:x}"
        with suppress(LeaseNotFound):
            await self.call(_grpc.LEASE_REVOKE, request, what, _deadline(timeout))

    async def call(
        self,
        rpc: _grpc.Rpc[_grpc.Request, _grpc.Answer],
        request: _grpc.Request,
        what: str,
        deadline: float,
    ) -> tuple[_grpc.Answer, bool]:
        """The answer, and whether an earlier attempt may have been applied as well.

        `what` is the key or lease that the request is about, for messages.
        """
        self._check_process()
        call = Call(rpc, request, what, Attempts(deadline))
        try:
            return await call.attempts.run(partial(self._attempt, call)), call.applied
        except Unanswered as error:
            seconds = now() - call.began
            reason = call.why or error.reason
            raise faults.unreachable(self.endpoints, reason, seconds) from error

    @asynccontextmanager
    async def stream(
        self,
        rpc: _grpc.Rpc[_grpc.Request, _grpc.Answer],
        what: str,
        metadata: Metadata = (),
        *,
        login: bool = True,
    ) -> AsyncIterator[Stream[_grpc.Request, _grpc.Answer]]:
        """A stream on the current connection, with `login` by a user who has logged in.

        Inside, Unanswered gives the endpoint up if it is to blame, and TokenRefused means
        EtcdDenied if the token is not older than `stream.began` (set that after each
        success); gRPC's errors become these.
        """
        self._check_process()
        began = now()
        token = await self._token(now() + LOGIN_TIMEOUT) if login else self._login.known
        connection = await self.connected()
        stream = connection.open(rpc, token.metadata + metadata, began)
        try:
            yield stream
        except (RpcFailed, Unanswered) as error:
            self._fail(error, Attempt(what, connection, token, stream.began))
        finally:
            stream.close()

    async def connected(self) -> Connection:
        """The connection in use; made without waiting for it to be established."""
        if self._connection is None and self._config.tls:
            await self._read_certificates()
        if self._connection is None:
            self._idle = self._idle or Connection(self.endpoint, self._credentials)
            self._connection = Connection(self.endpoint, self._credentials)
        return self._connection

    async def _read_certificates(self) -> None:
        """Read them again: certificates are renewed under a long training.

        A file that is being replaced at this very moment, or lies on a disk that stands still,
        will be read at the next connection.
        """
        reading = self._reading or begin(partial(_certificates, self._config))
        self._reading = reading
        await asyncio.wait({reading}, timeout=CERTIFICATES)
        if reading.done() and reading is self._reading:
            self._reading = None
            if files := reading.result():
                self._credentials = _grpc.credentials_of(files)

    def give_up(self, connection: Connection, why: str = "given up") -> None:
        """Leave `connection`, which is silent: all that is on it moves to the next endpoint.

        While a name server is what is silent, the next attempt goes on where this one was.
        """
        if connection.retired or connection.looking_up:
            return
        if connection is self._connection:
            self._connection = None
            self._at = (self._at + 1) % len(self.endpoints)
        self._retired = {old for old in self._retired if not old.closed} | {connection}
        connection.retire(why)

    async def _attempt(self, call: Call[_grpc.Request, _grpc.Answer]) -> _grpc.Answer:
        """Make one attempt at the current endpoint. Raises Unanswered, EtcdDenied, EtcdRefused."""
        patience = call.attempts.growing(jitter.uniform(*ATTEMPT_TIMEOUT))
        try:
            return await self._ask(call, patience)
        except Unanswered as error:
            call.applied = call.applied or error.applied
            if now() < call.attempts.deadline:
                call.why = error.reason
            raise

    async def _ask(self, call: Call[_grpc.Request, _grpc.Answer], patience: float) -> _grpc.Answer:
        token = await self._token(call.attempts.deadline)
        connection = await self.connected()
        limit = min(patience, _left(call.attempts.deadline))
        attempt = Attempt(call.what, connection, token, call.began, hurried=limit < patience)
        sent = now()
        try:
            answer = await connection.unary(call.rpc, call.request, limit, token.metadata)
        except (RpcFailed, Unanswered) as error:
            self._fail(error, attempt)
        if self._on_answer:
            self._on_answer(now() - sent)
        self._answered = True
        return answer

    async def _token(self, deadline: float) -> Token:
        """The token for a request at the current endpoint."""
        return await self._login.token(partial(self._authenticate, deadline))

    async def _authenticate(self, deadline: float, request: pb.AuthenticateRequest) -> str:
        connection = await self.connected()
        limit = min(LOGIN_TIMEOUT, _left(deadline))
        try:
            answer = await connection.unary(_grpc.AUTHENTICATE, request, limit, ())
        except (RpcFailed, Unanswered) as error:
            if isinstance(error, RpcFailed) and error.details == faults.AUTH_NOT_ENABLED:
                return ""  # as etcdctl: a user who is not asked for is no error
            self._fail(error, Attempt("a login", connection, ANONYMOUS, now()))
        return answer.token

    def _fail(self, error: RpcFailed | Unanswered, attempt: Attempt) -> Never:
        """Do what follows from the `error` of `attempt`, and raise what it means."""
        endpoint, who = attempt.connection.endpoint, self._config.who
        fault = faults.translate(error, endpoint, attempt.what, who)
        if isinstance(fault, TokenRefused):
            self._login.forget(attempt.token)
            if self._login.user is None or attempt.token.issued >= attempt.began:
                asked = self._login.user is None and faults.PERMISSION_DENIED not in fault.reason
                raise faults.denied(endpoint, attempt.what, None if asked else who) from error
        if isinstance(fault, Untrusted) and not self._answered:
            self._untrusted.add(endpoint)
            if self._untrusted.issuperset(self.endpoints):
                raise faults.untrusted(endpoint, fault.reason) from error
        if isinstance(fault, Unanswered) and fault.move and not attempt.hurried:
            self.give_up(attempt.connection, fault.reason)
        raise fault from error

    async def _pages(
        self, ranges: tuple[Get, ...], deadline: float, *, values: bool, most: int | None
    ) -> Listing:
        """The first page of every range in one request, the others at its revision."""
        what = ", ".join(get.key for get in ranges)
        asked = [wire.range_request(get, limit=PAGE, values=values) for get in ranges]
        header, pages = await self._first_pages(asked, what, deadline)
        found: dict[str, KeyValue] = {}
        for get, request, first in zip(ranges, asked, pages, strict=True):
            page = first
            while True:
                found |= wire.key_values(page)
                if most and len(found) > most:
                    raise faults.too_many(what, most)
                if not page.more or get.limit:
                    break
                request.key = page.kvs[-1].key + b"\0"
                request.revision = header.revision
                page, _ = await self.call(_grpc.RANGE, request, what, deadline)
        return Listing(Snapshot(header.revision, found), header.cluster_id, header.raft_term)

    async def _first_pages(
        self, asked: Sequence[pb.RangeRequest], what: str, deadline: float
    ) -> tuple[pb.Header, Sequence[pb.RangeResponse]]:
        if len(asked) == 1:  # not as a Txn: see "panics" in docs/failures.md
            only, _ = await self.call(_grpc.RANGE, asked[0], what, deadline)
            return only.header, [only]
        request = pb.TxnRequest(success=[pb.RequestOp(range=page) for page in asked])
        several, _ = await self.call(_grpc.TXN, request, what, deadline)
        return several.header, [answer.range for answer in several.responses]

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"the etcd client of process {self._pid} is used in its forked child "
                f"{os.getpid()}: gRPC does not survive a fork; make a Client in the child"
            )


def _certificates(config: EtcdConfig) -> _grpc.Certificates | None:
    """The certificates as they are now; None if one can't be read, or is none."""
    try:
        return _grpc.certificates(config)
    except UsageError:
        return None


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else now() + timeout


def _left(deadline: float) -> float:
    """Seconds until `deadline`, more than none."""
    return max(deadline - now(), 0.001)
