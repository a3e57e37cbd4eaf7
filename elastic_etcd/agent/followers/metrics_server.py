"""The HTTP server of --metrics-addr, on a thread of its own: /metrics, /healthz and /readyz.

It answers while the agent's loop stands still. There is no authentication.
"""

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.errors import UsageError

_MOST = 32  # connections at a time; others are closed at once
_IDLE = 90.0  # seconds until a quiet one is closed: longer than most scrape intervals
_AGAIN = 0.2  # seconds, while no descriptor is free
_PLAIN = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger(__name__)


@contextmanager
def serving(config: AgentConfig) -> Iterator[Metrics]:
    """Serve the metrics at `config.metrics_addr` for as long as this is open.

    Raises UsageError where that address can't be had.
    """
    assert config.metrics_addr
    host, port = config.metrics_addr
    metrics = Metrics(config)
    try:
        server = _Server(host, port, metrics)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"--metrics-addr {_shown(host, port)}: {reason}.\n"
            "Give each agent of a machine a port of its own, or 0 for any that is free."
        ) from error
    thread = threading.Thread(target=server.serve, name="metrics", daemon=True)
    thread.start()
    metrics.address = _shown(*server.server_address[:2])
    log.info("metrics at http://%s/metrics", metrics.address)
    try:
        yield metrics
    finally:
        server.end()
        thread.join()
        server.server_close()


def _shown(host: Any, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # else a port that is taken would be no error

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self._free = threading.BoundedSemaphore(_MOST)
        self._ended = threading.Event()
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Without a look-up of this machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def serve(self) -> None:
        """Until `end`; it sleeps as long as nobody comes."""
        while not self._ended.is_set():
            self.handle_request()

    def end(self) -> None:
        """From another thread; wakes up the one that serves."""
        self._ended.set()
        self.socket.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            self._ended.wait(_AGAIN)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        log.debug("metrics: %s was not answered: %r", client_address, sys.exception())


class _Request(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # a connection serves many scrapes
    server_version, sys_version = "elastic_etcd", ""
    timeout = _IDLE

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        metrics = self.server.metrics
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(HTTPStatus.OK, metrics.text(), _METRICS)
            case "/healthz":
                self._judge(metrics.stuck())
            case "/readyz":
                self._judge(metrics.unready())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz, /readyz\n", _PLAIN)

    def do_HEAD(self) -> None:
        """Answer like GET, without a body."""
        self.do_GET()

    def _judge(self, why_not: str) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if why_not else HTTPStatus.OK
        self._answer(status, f"{why_not or 'ok'}\n".encode(), _PLAIN)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the library
        log.debug("metrics: %s", format % args)
