"""Which etcd to talk to and as whom, from flags and from etcdctl's own environment variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_etcd.core.schema import wrong_label
from elastic_etcd.errors import UsageError

DEFAULT_PORT = 2379
SOCKET = "unix://"  # before the path of an embedded etcd's
ENDPOINT_FORM = "write host:2379, http://host:2379 or https://host:2379, several with commas"


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Endpoints as `host:port` (IPv6 in brackets) or `unix:///path`, and credentials.

    Those are PEM file names, or a user.
    """

    endpoints: tuple[str, ...]
    tls: bool = False
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None  # from which it is read again at each login

    @property
    def who(self) -> str | None:
        """As whom etcd may know this client, in words.

        With --client-cert-auth the common name of a certificate is a user without a login.
        """
        if self.user is not None:
            return f"user {self.user!r}"
        return "the user that --cert names" if self.cert else None

    @classmethod
    def parse(
        cls,
        endpoints: str | None,
        *,
        cacert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        user: str | None = None,
        password_file: str | None = None,
        env: Mapping[str, str],
    ) -> "EtcdConfig | None":
        """The configuration, or None when neither flag nor environment names an endpoint.

        A flag comes before its variable: ETCDCTL_ENDPOINTS, ETCDCTL_CACERT, ETCDCTL_CERT,
        ETCDCTL_KEY, ETCDCTL_USER, with the meaning that etcdctl gives them. The password is
        taken from `password_file`, ELASTIC_ETCD_PASSWORD, ETCDCTL_PASSWORD or
        `user:password` in ETCDCTL_USER, never from a flag. Raises UsageError.
        """
        text = endpoints or env.get("ETCDCTL_ENDPOINTS")
        if not text or not text.strip():
            return None
        cacert = cacert or env.get("ETCDCTL_CACERT") or None
        cert = cert or env.get("ETCDCTL_CERT") or None
        key = key or env.get("ETCDCTL_KEY") or None
        if (cert is None) != (key is None):
            raise UsageError("a client certificate needs both --cert and --key (PEM files)")
        addresses, tls = _endpoints(text, files_given=bool(cacert or cert))
        if not tls and (cacert or cert):
            raise UsageError(
                f"--cacert, --cert and --key are for TLS, but the endpoints are http:// ({text}); "
                "write https://"
            )
        name, password = _user(user, password_file, env)
        return cls(
            addresses, tls, cacert, cert, key, name, password, password_file if name else None
        )


def _endpoints(text: str, *, files_given: bool) -> tuple[tuple[str, ...], bool]:
    """Addresses, and whether they are spoken to over TLS."""
    addresses: list[str] = []
    schemes: set[str] = set()
    for part in text.split(","):
        if part.strip().startswith(f"{SOCKET}/"):
            addresses.append(part.strip())
            schemes.add("http")
            continue
        scheme, separator, address = part.strip().rpartition("://")
        if separator and scheme not in ("http", "https"):
            raise UsageError(f"etcd endpoint {_masked(part)!r}: {ENDPOINT_FORM}")
        schemes.add(scheme)
        addresses.append(_address(address, part.strip()))
    if {"http", "https"} <= schemes:
        raise UsageError(f"etcd endpoints {text!r}: use either http:// or https:// for all of them")
    tls = "https" in schemes or ("http" not in schemes and files_given)
    return tuple(dict.fromkeys(addresses)), tls


def _masked(part: str) -> str:
    """Without the user and password that may be in it."""
    return re.sub(r"^\s*(\w+://)?.*@", r"\1***@", part).strip()


def _address(text: str, part: str) -> str:
    """`host:port` from what follows the scheme."""
    if "@" in part:
        raise UsageError(
            f"etcd endpoint {_masked(part)!r}: {ENDPOINT_FORM}. A user goes into --user, "
            "a password into ELASTIC_ETCD_PASSWORD or a --password-file"
        )
    wrong = UsageError(f"etcd endpoint {part!r}: {ENDPOINT_FORM}")
    text = text.removesuffix("/")
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bracketed = host.startswith("[") and host.endswith("]")
    if not host.strip("[]") or (":" in host and not bracketed) or set(host) & set("/@ "):
        raise wrong
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise wrong
    if why := wrong_label(host):
        raise UsageError(f"etcd endpoint {part!r}: {why}")
    return f"{host}:{int(port)}"


def _user(
    flag: str | None, password_file: str | None, env: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """User and password."""
    if flag and ":" in flag:
        raise UsageError(
            "--user takes the name only: a password on the command line can be read by every "
            "user of this machine; put it in ELASTIC_ETCD_PASSWORD or in a --password-file"
        )
    variable, _, inline = env.get("ETCDCTL_USER", "").partition(":")
    name = flag or variable
    if not name:
        return None, None
    if password_file:
        return name, first_line(password_file)
    password = env.get("ELASTIC_ETCD_PASSWORD") or env.get("ETCDCTL_PASSWORD")
    if not password and name == variable:
        password = inline
    if not password:
        raise UsageError(
            f"no password for etcd user {name!r}: put it in ELASTIC_ETCD_PASSWORD "
            "or in a file named by --password-file"
        )
    return name, password


def first_line(path: str) -> str:
    """The password in a file. Raises UsageError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            password = file.readline().rstrip("\r\n")
    except OSError as error:
        raise UsageError(f"--password-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--password-file {path}: it is not UTF-8") from None
    if not password:
        raise UsageError(f"--password-file {path}: the first line is empty")
    return password
