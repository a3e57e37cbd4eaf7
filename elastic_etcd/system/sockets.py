"""Sockets that listen for TCP, and how their addresses are written."""

import socket

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
