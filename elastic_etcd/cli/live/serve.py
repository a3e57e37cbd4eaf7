"""`elastic-etcd serve`: pages for a browser, of all jobs under the prefix or of one."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING

from elastic_etcd.cli import parsers, query
from elastic_etcd.cli.flag_values import listening
from elastic_etcd.errors import UsageError
from elastic_etcd.system.sockets import address, listen

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    import uvicorn

    from elastic_etcd.cli.live.jobs import Jobs
    from elastic_etcd.etcd.client import Client

_LISTEN = "127.0.0.1:8484"
_MOST_CONNECTIONS = 256  # from there on the oldest that streams nothing is cut
_BACKLOG = 64  # so many are taken at a time: far fewer, so that who has just come is answered
_LONGEST_HEAD = 8192  # bytes
_GRACE = 1  # seconds, for answers under way at the end
_EPILOG = """\
There is no authentication, and everything is only read: names and addresses of nodes, and the last
tracebacks. So it listens on the loopback only, unless --listen names another address;
docs/operate.md has a reverse proxy. While a job's page is open its nodes say how fast they are,
which takes the right to write JOB/watched.

examples:
  elastic-etcd serve --etcd etcd1:2379
  elastic-etcd serve resnet-7                only that job, also where you may read no other
  ssh -L 8484:127.0.0.1:8484 login1      and then http://127.0.0.1:8484 in the browser here

exit codes:
  2 wrong usage, the address is taken, or the extra is missing     5 etcd unreachable, or denied
  130, 143 ended by Ctrl-C, by SIGTERM
"""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes; gives the exit code."""
    return query.with_etcd(parser, argv, _serve)


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd serve`."""
    text = "Shows all jobs under the prefix, or one, in a browser, live. Needs the extra [web]."
    every = "each job under --prefix, as without JOB"
    as_json = "say in one JSON object where it is shown"
    made = query.parser("serve", text, _EPILOG, "[JOB | --all]", every=every, as_json=as_json)
    made.checks = [query.not_both]
    made.add_argument(
        "--listen",
        type=listening,
        default=listening(_LISTEN),
        metavar="[HOST:]PORT",
        help=f"where (default: {_LISTEN}; port 0: any that is free)",
    )
    made.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this server in browsers' requests, as behind a reverse proxy; may be "
        "given again (those for its address, this machine's name and localhost are answered)",
    )
    return made


async def _serve(client: Client, args: Namespace) -> int:
    try:
        import uvicorn  # noqa: PLC0415 - loaded by this command only

        from elastic_etcd.cli.live import jobs, web  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise UsageError(f"serve: {error}; pip install 'elastic_etcd[web]'") from error
    hosts = {"localhost", socket.gethostname(), args.listen[0], *args.allow_host}
    with _listening(*args.listen) as listener:
        async with jobs.Jobs(client, args.prefix, args.timeout, args.job or "") as known:
            config = uvicorn.Config(
                web.application(known, hosts),
                http=_bounded(),
                h11_max_incomplete_event_size=_LONGEST_HEAD,
                backlog=_BACKLOG,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE,
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve([listener]))
            _say(listener, args)
            return await _until_a_signal(server, serving, known)


def _bounded() -> type[asyncio.Protocol]:
    """The protocol of uvicorn, which itself waits for ever for a request, with a bound."""
    from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415 - as uvicorn itself

    connected: dict[Bounded, None] = {}  # the oldest first

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
            super().connection_made(transport)
            connected[self] = None
            if len(connected) > _MOST_CONNECTIONS:
                oldest = next((each for each in connected if not each.streams()), self)
                del connected[oldest]
                oldest.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connected.pop(self, None)
            super().connection_lost(exc)

        def streams(self) -> bool:
            if self.cycle is None or self.transport.is_closing():
                return False
            return self.cycle.response_started and not self.cycle.response_complete

    return Bounded


def _say(listener: socket.socket, args: Namespace) -> None:
    url = f"http://{address(args.listen[0], listener.getsockname()[1])}/"
    shown = args.prefix
    if args.job:
        url, shown = f"{url}jobs/{args.job}", f"{args.prefix}/{args.job}"
    line = (
        json.dumps({"version": query.JSON_VERSION, "url": url, "shown": shown})
        if args.json
        else f"{shown} is shown at {url}"
    )
    print(line, flush=True)


async def _until_a_signal(server: uvicorn.Server, serving: asyncio.Task[None], jobs: Jobs) -> int:
    ended: list[int] = []

    def end(number: signal.Signals) -> None:
        ended.append(128 + number)
        server.should_exit = True
        jobs.end()

    # uvicorn's own would raise them again at its end.
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment] # as said
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    await asyncio.wait({serving, jobs.keeper}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        server.should_exit = True
        await serving
        jobs.keeper.result()
    serving.result()
    return ended[0]


def _listening(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        at = address(host, port)
        raise UsageError(f"--listen {at}: {reason}; port 0 is any that is free") from error
