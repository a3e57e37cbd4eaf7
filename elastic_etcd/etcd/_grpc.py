"""gRPC as it is used here: how it starts, its channels, and the RPCs of etcd.

Only this module imports gRPC, because the import already reads the environment.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from google.protobuf.message import Message

from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.access import SOCKET, EtcdConfig
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb


@contextmanager
def _startup() -> Iterator[None]:
    """Import gRPC and make its channels in this scope.

    gRPC reads these variables at the import and when it starts. Afterwards they have to be as
    they were, or the workers would inherit them.
    """
    wanted = {
        # Its log repeats our errors in its own words; whoever asks for it gets it.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
        # Unset, one forked child in six crashes (grpcio 1.85); set to 1, it hangs.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


with _startup():
    import grpc
    import grpc.aio

Code = grpc.StatusCode
Credentials = grpc.ChannelCredentials
CONNECTING = grpc.ChannelConnectivity.CONNECTING
RpcError = grpc.aio.AioRpcError
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs

Certificates: TypeAlias = tuple[bytes | None, bytes | None, bytes | None]
Request = TypeVar("Request")
Answer = TypeVar("Answer")
_In = TypeVar("_In", bound=Message)
_Out = TypeVar("_Out", bound=Message)

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


def _rpc(method: str, request: type[_In], answer: type[_Out]) -> Rpc[_In, _Out]:
    return Rpc(f"/etcdserverpb.{method}", request.SerializeToString, answer.FromString)


RANGE = _rpc("KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = _rpc("KV/Txn", pb.TxnRequest, pb.TxnResponse)
LEASE_GRANT = _rpc("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = _rpc("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = _rpc("Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
WATCH = _rpc("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
AUTHENTICATE = _rpc("Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)


def channel(endpoint: str, credentials: Credentials | None) -> Any:
    """A channel to one endpoint, over TLS if there are credentials."""
    with _startup():
        if credentials is None:
            return grpc.aio.insecure_channel(target(endpoint), OPTIONS)
        return grpc.aio.secure_channel(target(endpoint), credentials, OPTIONS)


def target(endpoint: str) -> str:
    """The name that gRPC has for the endpoint; an IP address needs no resolver."""
    if endpoint.startswith(SOCKET):
        return f"unix:{quote(endpoint.removeprefix(SOCKET))}"
    host = endpoint.rpartition(":")[0]
    if host.startswith("["):
        return f"ipv6:{endpoint}"
    if host.replace(".", "").isdigit():
        return f"ipv4:{endpoint}"
    return f"dns:///{endpoint}"


def certificates(config: EtcdConfig) -> Certificates | None:
    """Read the PEM files, which may be on a slow disk; None for plain text.

    Raises UsageError.
    """
    if not config.tls:
        return None
    import ssl  # noqa: PLC0415 - it takes 4 MB

    # gRPC has its own list of authorities; etcdctl takes the system's, so we do.
    roots = config.cacert or ssl.get_default_verify_paths().cafile
    return _pem("--cacert", roots), _pem("--key", config.key), _pem("--cert", config.cert)


def credentials_of(files: Certificates | None) -> Credentials | None:
    """TLS credentials, or None for plain text."""
    if files is None:
        return None
    with _startup():
        return grpc.ssl_channel_credentials(*files)


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
