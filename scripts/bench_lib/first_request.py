"""A proxy in front of etcd, or of nothing, that says when the first request came."""

import selectors
import socket
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = 1  # the frame type that opens a request: https://httpwg.org/specs/rfc9113.html#HEADERS
PATIENCE = 60.0


class Proxy:
    """Listens on `port`; passes to `upstream` ("host:port") what comes, until the request."""

    def __init__(self, upstream: str | None) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = [self._listener]

    def first(self) -> float:
        """When (CLOCK_MONOTONIC) the first request came: without an upstream, a connection."""
        deadline = time.monotonic() + PATIENCE
        other: dict[socket.socket, socket.socket] = {}
        sent: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in ready.select(left):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._listener:
                        client, _ = sock.accept()
                        self._open.append(client)
                        if self._upstream is None:
                            return time.monotonic()
                        host, _, port = self._upstream.rpartition(":")
                        server = socket.create_connection((host, int(port)))
                        self._open.append(server)
                        other |= {client: server, server: client}
                        sent[client] = b""
                        ready.register(client, selectors.EVENT_READ)
                        ready.register(server, selectors.EVENT_READ)
                        continue
                    data = sock.recv(1 << 16)
                    if not data:
                        ready.unregister(sock)
                    elif sock in sent:
                        sent[sock] += data
                        if has_request(sent[sock]):
                            return time.monotonic()
                    if data:
                        other[sock].sendall(data)
        raise TimeoutError(f"no request within {PATIENCE} s")

    def close(self) -> None:
        for sock in self._open:
            sock.close()


def has_request(data: bytes) -> bool:
    """Whether what an HTTP/2 client has sent holds a HEADERS frame."""
    at = len(PREFACE)
    while len(data) >= at + 9:
        if data[at + 3] == HEADERS:
            return True
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    return False
