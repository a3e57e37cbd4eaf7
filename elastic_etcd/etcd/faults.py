"""Judges a failed RPC: try again, log in again, or tell the user.

Only this module reads the texts of gRPC's errors.
"""

import re
from collections.abc import Sequence

from elastic_etcd.errors import EtcdDenied, EtcdError, EtcdRefused, EtcdUnreachable
from elastic_etcd.etcd._grpc import Code

# A member that is added without a vote, until it has caught up and is promoted (etcd >= 3.4).
LEARNER = "etcdserver: rpc not supported for learner"
# Only these say that the request was surely not applied: but for the last it was never sent.
NOT_APPLIED = ("failed to connect to all addresses", "connections to all backends failing", LEARNER)
TOO_LARGE = (
    "etcdserver: request is too large",
    "etcdserver: too many operations in txn request",
    "larger than max",  # gRPC's own limit at the server, which follows etcd's
)
FULL = "database space exceeded"
AUTH_NOT_ENABLED = "etcdserver: authentication is not enabled"
LEASE_NOT_FOUND = "etcdserver: requested lease not found"
LEASE_EXISTS = "etcdserver: lease already exists"
PERMISSION_DENIED = "etcdserver: permission denied"
TOKEN_ERRORS = (
    "etcdserver: invalid auth token",
    "etcdserver: user name is empty",
    "etcdserver: revision of auth store is old",
)
# gRPC's names for a peer that the certificates exclude, at either end.
WRONG_NAME = ("Hostname Verification Check failed", "is not in peer certificate")
# With TLS 1.3 the server looks at ours after the handshake, and gRPC no longer says what it heard.
CLIENT_REFUSED = ("ALERT_BAD_CERTIFICATE", "ALERT_UNKNOWN_CA", "ALERT_CERTIFICATE", "Unwrap failed")
NO_PAIR = "Failed to create security handshaker"
UNTRUSTED = (*WRONG_NAME, *CLIENT_REFUSED, NO_PAIR, "CERTIFICATE_VERIFY_FAILED")


class RpcFailed(Exception):
    """The error that gRPC raised. Never leaves the package."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Unanswered(Exception):
    """This attempt failed, another one may not. Never leaves the package.

    `applied`: the request may have been applied all the same.
    `move`: the endpoint is to blame, go to another one.
    """

    def __init__(self, reason: str, *, applied: bool = True, move: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.applied = applied
        self.move = move


class TokenRefused(Unanswered):
    """The authentication token has expired, or was not enough: log in again, once."""


class Untrusted(Unanswered):
    """The TLS handshake failed: nothing that another attempt at this endpoint would cure."""


class Compacted(Exception):
    """The revision that was asked for is no longer kept. Never leaves the package."""


class LeaseNotFound(EtcdRefused):
    """The lease has ended."""


class LeaseExists(EtcdRefused):
    """A lease with the id that was asked for is there already."""


class TooLarge(EtcdRefused):
    """A request beyond etcd's limits, which it would refuse again."""


Fault = Unanswered | Compacted | EtcdError


def translate(error: RpcFailed | Unanswered, endpoint: str, what: str, who: str | None) -> Fault:
    """The exception to raise for `error`, which the RPC of `who` for `what` met at `endpoint`."""
    if isinstance(error, Unanswered):
        return error
    code, details = error.code, error.details
    if details == PERMISSION_DENIED:
        return denied(endpoint, what, who)
    if details in TOKEN_ERRORS or code is Code.UNAUTHENTICATED:
        return TokenRefused(details, applied=False, move=False)
    if code is Code.OUT_OF_RANGE and "compacted" in details:
        return Compacted(details)
    if details == "etcdserver: too many requests":
        return Unanswered(details, applied=False, move=False)
    if transient(code, details):
        applied = not any(text in details for text in NOT_APPLIED)
        kind = Untrusted if any(text in details for text in UNTRUSTED) else Unanswered
        return kind(brief(details) or code.name, applied=applied)
    return fatal(code, details, endpoint, what, who)


def canceled(reason: str, compact_revision: int) -> Unanswered | Compacted:
    """Why etcd ended a watch, from the fields of its last answer: an exception to raise."""
    if compact_revision:
        return Compacted(reason)
    # 3.5 says of a watch that its permission is denied when the token has expired, too.
    if any(text in reason for text in (*TOKEN_ERRORS, PERMISSION_DENIED)):
        return TokenRefused(reason, applied=False, move=False)
    return Unanswered(reason or "etcd cancelled the watch")


def transient(code: Code, details: str) -> bool:
    """Whether another attempt, or another endpoint, may succeed."""
    if code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.INTERNAL):
        return True
    if code is Code.UNKNOWN:  # Go's own errors, of a member that goes down or hands on its lead
        return not any(text in details for text in (*TOO_LARGE, FULL))
    return code is Code.FAILED_PRECONDITION and details in ("etcdserver: not leader", LEARNER)


def fatal(code: Code, details: str, endpoint: str, what: str, who: str | None) -> EtcdError:
    """An error that the user has to put right."""
    if details == "etcdserver: authentication failed, invalid user ID or password":
        return EtcdDenied(
            f"etcd at {endpoint} refuses the password of {who}.\n"
            "Check --user and ELASTIC_ETCD_PASSWORD; a --password-file is read at each login, so "
            "that a new password can be put there under a running job."
        )
    if code is Code.UNIMPLEMENTED:
        return EtcdRefused(
            f"the server at {endpoint} does not speak the etcd v3 API ({brief(details)}).\n"
            "Check --etcd: it takes etcd's client port (2379), etcd 3.4 or newer."
        )
    if any(text in details for text in TOO_LARGE):
        return TooLarge(
            f"etcd at {endpoint} can't take {what} in one request ({brief(details)}).\n"
            "Raise its --max-request-bytes and --max-txn-ops, or start the job with fewer nodes."
        )
    if FULL in details:
        return EtcdRefused(
            f"etcd at {endpoint} is full ({details}), {what} was not written.\n"
            "Compact, defragment and `etcdctl alarm disarm`, or raise --quota-backend-bytes."
        )
    kinds = {LEASE_NOT_FOUND: LeaseNotFound, LEASE_EXISTS: LeaseExists}
    kind = kinds.get(details, EtcdRefused)
    return kind(f"etcd at {endpoint} refused {what}: {details or code.name}")


def denied(endpoint: str, what: str, who: str | None) -> EtcdDenied:
    """The error when `who` lacks the permission, or was refused with a fresh token.

    None: nobody has said who asks.
    """
    if who is None:
        return EtcdDenied(
            f"etcd at {endpoint} asks for a user to access {what}.\n"
            "Give --user NAME and its password in ELASTIC_ETCD_PASSWORD."
        )
    return EtcdDenied(
        f"etcd at {endpoint} denies {who} access to {what}.\n"
        "Let an administrator run `etcdctl role grant-permission ROLE --prefix=true readwrite "
        "PREFIX` for a role of this user, or use another --prefix."
    )


def untrusted(endpoint: str, reason: str) -> EtcdDenied:
    """No endpoint of the configuration could be trusted at the first contact."""
    return EtcdDenied(
        f"no trust between this client and etcd at {endpoint} ({reason}).\n{_distrust(reason)}"
    )


def _distrust(reason: str) -> str:
    """The hint after a TLS handshake that failed."""
    if any(text in reason for text in WRONG_NAME):
        return "Its certificate is for another host: write --etcd with a name that it lists."
    if any(text in reason for text in CLIENT_REFUSED):
        return "It refuses this client's certificate, or lack of one: check --cert and --key."
    if NO_PAIR in reason:
        return "Check --cert and --key, which must belong together, and --cacert: one is damaged."
    if "expired" in reason or "not yet valid" in reason:
        return "Renew its certificate, or set this machine's clock."
    # Older gRPC does not say why.
    return "Give the authority that signed its certificate with --cacert; or has it expired?"


def unreachable(endpoints: Sequence[str], reason: str, seconds: float) -> EtcdUnreachable:
    """No answer that counts within the caller's time."""
    if "WRONG_VERSION_NUMBER" in reason or "Handshake read failed" in reason:
        hint = "It does not seem to speak TLS: try http://."
    elif "Socket closed" in reason:
        hint = "Something else listens there; or if etcd speaks TLS, write https://."
    elif any(text in reason for text in UNTRUSTED):
        hint = _distrust(reason)
    elif "resolv" in reason or "lookup" in reason:
        own = "GRPC_DNS_RESOLVER=native takes this machine's own lookup (.local, LDAP)"
        hint = f"Check the host name in --etcd; {own}."
    else:
        hint = "Is it running there, and can this machine reach it? Check --etcd."
    return EtcdUnreachable(
        f"no answer from etcd at {', '.join(endpoints)} for {seconds:.1f} s ({reason}).\n{hint}"
    )


def too_many(what: str, most: int) -> TooLarge:
    """There are more keys than the caller has room for: an exception to raise."""
    return TooLarge(f"{what}: there are more than {most} keys")


def brief(details: str) -> str:
    """The last, most specific part of gRPC's text."""
    last = details.rpartition("last error: ")[2]
    last = re.sub(r"^([A-Z_]+: )?((ipv4|ipv6|dns):\S+: )?", "", last)
    return re.sub(r".*OPENSSL_internal:", "", last).removesuffix(": OK").strip()
