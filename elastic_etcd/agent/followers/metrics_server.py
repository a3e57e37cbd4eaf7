"""The HTTP server of --metrics-addr, on a thread of its own: /metrics, /healthz and /readyz.

It answers while the agent's loop stands still. There is no authentication, so strangers get little:
a request a connection, of which the first line is read, and a place until somebody newer needs it.
"""

import asyncio
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.errors import UsageError
from elastic_etcd.system.sockets import address, listen

# A probe is answered two turns of the loop after its connection is taken, and a turn takes no more
# connections than the backlog. So however many there are, no probe is the oldest before that.
_BACKLOG = 32
_MOST = 4 * _BACKLOG  # connections at a time; from there on the oldest is cut
_LONGEST = 8192  # bytes of a request
_DEADLINE = 10.0  # seconds for a connection, from its beginning to its end
_REQUEST = re.compile(rb"(GET|HEAD) ([^ ?]*)\S* HTTP/1\.\d\r\n")
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
        listener = listen(host, port)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise UsageError(
            f"--metrics-addr {address(host, port)}: {reason}.\n"
            "Give each agent of a machine a port of its own, or 0 for any that is free."
        ) from error
    metrics.address = address(host, listener.getsockname()[1])
    loop, server = asyncio.new_event_loop(), _Server(metrics)
    serves = server.serve(listener)
    thread = threading.Thread(target=_run, args=(loop, serves), name="metrics", daemon=True)
    thread.start()
    log.info("metrics at http://%s/metrics", metrics.address)
    try:
        yield metrics
    finally:
        loop.call_soon_threadsafe(server.over.set)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, serves: Any) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serves)


def answer(head: bytes, metrics: Metrics) -> bytes:
    """The answer to a request whose first line and headers are `head`."""
    status, kind, body = HTTPStatus.BAD_REQUEST, _PLAIN, b"only GET and HEAD\n"
    request = _REQUEST.match(head)
    match request and request[2]:
        case None:
            pass
        case b"/metrics":
            status, kind, body = HTTPStatus.OK, _METRICS, metrics.text()
        case b"/healthz":
            status, body = _judged(metrics.stuck())
        case b"/readyz":
            status, body = _judged(metrics.unready())
        case _:
            status, body = HTTPStatus.NOT_FOUND, b"/metrics, /healthz, /readyz\n"
    lines = (
        f"HTTP/1.1 {status} {status.phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode() + (b"" if head.startswith(b"HEAD ") else body)


def _judged(why_not: str) -> tuple[HTTPStatus, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if why_not else HTTPStatus.OK
    return status, f"{why_not or 'ok'}\n".encode()


class _Server:
    def __init__(self, metrics: Metrics) -> None:
        self.over = asyncio.Event()
        self._metrics = metrics
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def serve(self, listener: socket.socket) -> None:
        """Until `over`; it sleeps as long as nobody comes."""
        asyncio.get_running_loop().set_exception_handler(_note)
        server = asyncio.start_server(
            self._connected, sock=listener, limit=_LONGEST, backlog=_BACKLOG
        )
        async with await server:
            await self.over.wait()
            for writer in self._open:
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MOST:
            oldest = next(iter(self._open))
            oldest.transport.abort()
            del self._open[oldest]
        self._open[writer] = None
        try:
            async with asyncio.timeout(_DEADLINE):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(head, self._metrics))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            log.debug("metrics: a request was not answered: %r", error)
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """No descriptor is free, say: asyncio tries again after a second."""
    del loop
    log.debug("metrics: %s: %r", context["message"], context.get("exception"))
