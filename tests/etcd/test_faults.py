"""Which failures are worth another attempt, and which may have been applied."""

import grpc
import pytest

from elastic_etcd.errors import EtcdDenied, EtcdRefused
from elastic_etcd.etcd.faults import (
    Compacted,
    LeaseNotFound,
    RpcFailed,
    TokenRefused,
    TooLarge,
    Unanswered,
    Untrusted,
    brief,
    translate,
)

Code = grpc.StatusCode
OPERATIONS = "too many operations in txn request"


def fault(code: grpc.StatusCode, details: str) -> Exception:
    return translate(RpcFailed(code, details), "host:2379", "/key", "user 'me'")


@pytest.mark.parametrize(
    ("code", "details", "applied"),
    [
        (Code.UNKNOWN, "context deadline exceeded", True),
        (Code.UNKNOWN, "raft: stopped", True),
        (Code.UNKNOWN, "raft proposal dropped", True),  # the lead is handed on
        (Code.UNKNOWN, "something new", True),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", True),
        (Code.UNAVAILABLE, "etcdserver: leader changed", True),
        (Code.UNAVAILABLE, "etcdserver: request timed out", True),
        (Code.UNAVAILABLE, "Socket closed", True),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", True),
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: x", False),
        (Code.UNAVAILABLE, "connections to all backends failing; last error: x", False),
        (Code.FAILED_PRECONDITION, "etcdserver: not leader", True),
        (Code.FAILED_PRECONDITION, "etcdserver: rpc not supported for learner", False),  # 3.7
        (Code.UNAVAILABLE, "etcdserver: rpc not supported for learner", False),  # before it
    ],
)
def test_another_attempt_elsewhere(code: grpc.StatusCode, details: str, *, applied: bool) -> None:
    error = fault(code, details)
    assert isinstance(error, Unanswered)
    assert (error.applied, error.move) == (applied, True)


def test_another_attempt_at_the_same_place() -> None:
    error = fault(Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests")
    assert isinstance(error, Unanswered)
    assert (error.applied, error.move) == (False, False)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token"),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty"),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
    ],
)
def test_another_login(code: grpc.StatusCode, details: str) -> None:
    assert isinstance(fault(code, details), TokenRefused)


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", EtcdRefused, "full"),
        (Code.INVALID_ARGUMENT, "etcdserver: request is too large", TooLarge, "/key in one"),
        (Code.INVALID_ARGUMENT, f"etcdserver: {OPERATIONS}", TooLarge, "--max-txn-ops"),
        (Code.UNIMPLEMENTED, "unknown service etcdserverpb.KV", EtcdRefused, "v3 API"),
        (Code.UNKNOWN, "trying to send message larger than max", TooLarge, "/key in one"),
        (Code.UNKNOWN, "mvcc: database space exceeded", EtcdRefused, "is full"),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", LeaseNotFound, "lease"),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", EtcdDenied, "denies user 'me'"),
        (
            Code.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            EtcdDenied,
            "password of user 'me'",
        ),
    ],
)
def test_for_the_user_to_put_right(
    code: grpc.StatusCode, details: str, kind: type[Exception], text: str
) -> None:
    error = fault(code, details)
    assert isinstance(error, kind)
    assert text in str(error)
    assert "host:2379" in str(error)
    assert str(error).count("\n") <= 2


def test_compacted() -> None:
    details = "etcdserver: mvcc: required revision has been compacted"
    assert isinstance(fault(Code.OUT_OF_RANGE, details), Compacted)


@pytest.mark.parametrize(
    ("details", "short"),
    [
        (
            (
                "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: "
                "Failed to "
                "connect to remote host: Connection refused"
            ),
            "Failed to connect to remote host: Connection refused",
        ),
        (
            (
                "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: "
                "Ssl handshake"
                " failed: SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
                "CERTIFICATE_VERIFY_FAILED: self signed certificate: OK"
            ),
            "CERTIFICATE_VERIFY_FAILED: self signed certificate",
        ),
        ("Socket closed", "Socket closed"),
    ],
)
def test_grpc_in_brief(details: str, short: str) -> None:
    assert brief(details) == short
    error = fault(Code.UNAVAILABLE, details)
    assert isinstance(error, Untrusted) == ("CERTIFICATE" in details)
