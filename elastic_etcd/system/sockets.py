"""Sockets that listen for TCP, how their addresses are written, and lookups of names for a log."""

import ctypes
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared; who gives one means it


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens at `host`, which may be a name, and nowhere else.

    All addresses of IPv4 are those of IPv6, too, and the other way round, as in Go: a probe comes
    from where its cluster is. Raises OSError.
    """
    asked = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, where = min(asked, key=lambda found: found[4][0] == "::1")  # localhost's other one
    both = socket.has_dualstack_ipv6()
    if where[0] in _ANY:
        family = socket.AF_INET6 if both else socket.AF_INET
        where = (_ANY[both], port)
    dual = both and family == socket.AF_INET6
    return socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=dual)


def address(host: str, port: int) -> str:
    """Both as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def short_lookups(address: str) -> Iterator[None]:
    """A name server has one second to answer this thread, while it connects to `address`.

    torch asks for the name of each peer of a TCPStore, which only a log shows (pytorch#159007). A
    name server that does not answer is asked twice, 5 s each, so that each start of a worker took
    10 s (resolv.conf(5)).

    A name has to be looked up for more than a log: then, for other threads, and with another libc
    than glibc all lookups are as patient as the machine says.
    """
    libc = ctypes.CDLL(None)
    try:
        ipaddress.ip_address(address.partition("%")[0])
        libc["__res_init"]()
        resolver = libc["__res_state"]  # that of the calling thread: its first fields are ints
    except (ValueError, AttributeError):
        yield
        return
    resolver.restype = ctypes.POINTER(ctypes.c_int)
    fields = resolver()
    before = fields[0], fields[1]
    fields[0], fields[1] = 1, 1  # retrans in seconds, retry
    try:
        yield
    finally:
        fields[0], fields[1] = before
