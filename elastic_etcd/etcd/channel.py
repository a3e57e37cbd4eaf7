"""One gRPC channel to one endpoint, and the RPCs of etcd that are used."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.faults import RpcFailed, Unanswered
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.startup import grpc_startup

with grpc_startup():
    import grpc
    import grpc.aio

Request = TypeVar("Request")
Answer = TypeVar("Answer")
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs
Metadata = tuple[tuple[str, str], ...]

OPTIONS = (
    # Subchannels are otherwise shared by address, and with them a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),  # the client decides, because it knows what may be repeated
    ("grpc.enable_http_proxy", 0),  # as etcdctl: etcd is not behind the proxy for the web
)


@dataclass(frozen=True, slots=True)
class Rpc(Generic[Request, Answer]):
    """A method's path and its two messages."""

    path: str
    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Answer]


RANGE = Rpc(
    "/etcdserverpb.KV/Range", pb.RangeRequest.SerializeToString, pb.RangeResponse.FromString
)
TXN = Rpc("/etcdserverpb.KV/Txn", pb.TxnRequest.SerializeToString, pb.TxnResponse.FromString)
LEASE_GRANT = Rpc(
    "/etcdserverpb.Lease/LeaseGrant",
    pb.LeaseGrantRequest.SerializeToString,
    pb.LeaseGrantResponse.FromString,
)
LEASE_REVOKE = Rpc(
    "/etcdserverpb.Lease/LeaseRevoke",
    pb.LeaseRevokeRequest.SerializeToString,
    pb.LeaseRevokeResponse.FromString,
)
LEASE_KEEP_ALIVE = Rpc(
    "/etcdserverpb.Lease/LeaseKeepAlive",
    pb.LeaseKeepAliveRequest.SerializeToString,
    pb.LeaseKeepAliveResponse.FromString,
)
WATCH: Rpc[pb.WatchRequest, pb.WatchResponse] = Rpc(
    "/etcdserverpb.Watch/Watch", pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString
)
AUTHENTICATE = Rpc(
    "/etcdserverpb.Auth/Authenticate",
    pb.AuthenticateRequest.SerializeToString,
    pb.AuthenticateResponse.FromString,
)


class Connection:
    """A channel. Once retired it takes no new requests, and closes after those under way."""

    def __init__(self, endpoint: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.endpoint = endpoint
        self.retired = False
        self._channel = _channel(endpoint, credentials)
        self._methods: dict[str, Any] = {}
        self._streams: set[Any] = set()
        self._under_way = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing of it is left."""
        return self._closing is not None and self._closing.done()

    async def unary(
        self, rpc: Rpc[Request, Answer], request: Request, timeout: float, metadata: Metadata
    ) -> Answer:
        """One request and its answer. Raises RpcFailed, Unanswered."""
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = self._channel.unary_unary(
                rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode
            )
        self._under_way += 1
        try:
            answer: Answer = await _outcome(method(request, timeout=timeout, metadata=metadata))
            return answer
        finally:
            self._under_way -= 1
            if self.retired:
                self._close_when_idle()

    def open(
        self, rpc: Rpc[Request, Answer], metadata: Metadata, began: float
    ) -> "Stream[Request, Answer]":
        """A stream in both directions; `close` it."""
        call = self._channel.stream_stream(
            rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode
        )(metadata=metadata)
        self._streams.add(call)
        return Stream(self, call, began)

    def end(self, call: Any) -> None:
        """Cancel a stream."""
        call.cancel()
        self._streams.discard(call)

    def retire(self) -> None:
        """End the streams now, and the channel when its last request is answered."""
        self.retired = True
        for call in self._streams:
            call.cancel()
        self._close_when_idle()

    async def close(self) -> None:
        """Retire and close, whatever is under way."""
        self.retire()
        await self._channel.close()
        if self._closing is not None:
            await self._closing

    def _close_when_idle(self) -> None:
        if self._under_way == 0 and self._closing is None:
            self._closing = asyncio.create_task(self._channel.close())


class Stream(Generic[Request, Answer]):
    """A stream of requests and answers on one connection. Raises RpcFailed, Unanswered."""

    def __init__(self, connection: Connection, call: Any, began: float) -> None:
        self.began = began  # when the attempt began that has not succeeded yet
        self._connection = connection
        self._call = call
        self._ended = asyncio.Event()
        call.add_done_callback(lambda _: self._ended.set())

    async def write(self, request: Request) -> None:
        """Send a request."""
        work = asyncio.ensure_future(self._call.write(request))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            work.cancel()  # gRPC's write waits for ever if the call ends before it has begun
        outcome = _outcome(work)
        del work
        await outcome

    async def read(self) -> Answer:
        """The next answer."""
        answer = await _outcome(self._call.read())
        if answer is EOF:
            raise Unanswered("the server ended the stream")
        return cast("Answer", answer)

    def close(self) -> None:
        """Cancel what is under way."""
        call, self._call = self._call, None  # a traceback may keep this object, not the call
        self._connection.end(call)


async def _outcome(work: Awaitable[Any]) -> Any:
    """The result of `work`, or gRPC's error in our words.

    It is raised outside of the handler and without `work` on purpose: a traceback that holds
    a call keeps it alive, and that lets a closed channel connect again and again.
    """
    failure: Exception
    try:
        return await work
    except grpc.aio.AioRpcError as error:
        failure = RpcFailed(error.code(), error.details() or "")
    except asyncio.InvalidStateError:
        failure = Unanswered("the stream has ended")
    except asyncio.CancelledError:
        # A call that we cancelled looks in gRPC as if this task were cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failure = Unanswered("the connection was given up")
    del work
    raise failure


def _channel(endpoint: str, credentials: grpc.ChannelCredentials | None) -> Any:
    with grpc_startup():
        if credentials is None:
            return grpc.aio.insecure_channel(target(endpoint), OPTIONS)
        return grpc.aio.secure_channel(target(endpoint), credentials, OPTIONS)


def credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """TLS credentials from the PEM files, or None for plain text. Raises UsageError."""
    if not config.tls:
        return None
    # gRPC has its own list of authorities; etcdctl takes the system's, so we do.
    roots = config.cacert or ssl.get_default_verify_paths().cafile
    files = _pem("--cacert", roots), _pem("--key", config.key), _pem("--cert", config.cert)
    with grpc_startup():
        return grpc.ssl_channel_credentials(*files)


def target(endpoint: str) -> str:
    """The name that gRPC has for the endpoint; an IP address needs no resolver."""
    host = endpoint.rpartition(":")[0]
    if host.startswith("["):
        return f"ipv6:{endpoint}"
    if host.replace(".", "").isdigit():
        return f"ipv4:{endpoint}"
    return f"dns:///{endpoint}"


def _pem(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise UsageError(f"{flag} {path}: not a PEM file")
    return data
