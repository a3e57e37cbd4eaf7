"""The pages of `elastic-etcd serve` and their data, as an ASGI application. It is only read.

Whatever is shown came from others: pages put it in as text, and a strict Content-Security-Policy
leaves nothing to run but our own script. /metrics has the jobs for Prometheus, also when no agent
is left to tell. Loaded with that command only: extra [web].
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from elastic_etcd.cli import query
from elastic_etcd.core.schema import seconds_of, valid_job
from elastic_etcd.protocol.messages import UNCOUNTED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from elastic_etcd.cli.live.jobs import Jobs

MOST_STREAMS = 64
_METRICS = "text/plain; version=0.0.4"
_SOONEST = 0.4  # seconds between two messages of a stream, for each _PER_MESSAGE bytes of them
_PER_MESSAGE = 200_000
_QUIET = 15.0  # seconds, then a stream says that it is there
_STUCK = 30.0  # seconds for a client to take a message
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
# Those of which agents tell, too, have the same meaning there: agent/followers/metrics.py.
_GAUGES = {
    "job_state": "1; what the job does, or how it has ended.",
    "generation": "The newest generation of the job.",
    "world_size": "Ranks of the world that trains; 0: none.",
    "hanging": "1: workers of the job hang now, as far as they were told to; 0: none.",
    "nodes": "Nodes by state.",
    "restart_budget_left": "Failures that the job still survives.",
    "outcome_timestamp_seconds": "When the job has ended, by its outcome, in seconds since 1970.",
}


def application(jobs: Jobs, hosts: Iterable[str]) -> ASGIApp:
    """For requests to `hosts`, and to the address of the connection."""
    pages = _Pages(jobs)
    routes = [
        Route("/", pages.page),
        Route("/jobs/{job}", pages.page),
        *(Route(f"/{name}", _file(name, kind)) for name, kind in _FILES.items()),
        Route("/metrics", pages.metrics),
        Route("/api/jobs", pages.api_jobs),
        Route("/api/events", pages.api_events),
        Route("/api/jobs/{job}", pages.api_job),
        Route("/api/jobs/{job}/events", pages.api_events),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return _Guard(app, frozenset(host.lower() for host in hosts))


def _read_page(name: str) -> str:
    return (files("elastic_etcd.cli.live") / "page" / name).read_text("utf-8")


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    text = _read_page(name)

    def answer(request: Request) -> Response:
        del request
        return Response(text, media_type=kind)

    return answer


class _Guard:
    """Refuses what writes, what was meant for another site, and what another site asks for.

    An answer that its client does not take any more ends.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            async with asyncio.timeout(_STUCK):
                await send(message)

        refused = self._refused(scope)
        with suppress(TimeoutError):
            await (refused or self._app)(scope, receive, send_guarded)

    def _refused(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        host = _host_of(headers.get("host", "").lower())
        at = scope["server"][0].lower().removeprefix("::ffff:")  # IPv4 on a socket of IPv6
        if host not in self._hosts and host != at:
            text = "This is not the host that is asked for; see elastic-etcd serve --allow-host.\n"
            return PlainTextResponse(text, 421)
        site = headers.get("sec-fetch-site", "none")
        if scope["path"].startswith("/api/") and site not in ("none", "same-origin"):
            return PlainTextResponse("not for other sites\n", 403)
        return None


def _host_of(header: str) -> str:
    """The name in a Host header: without the port, or the brackets of an IPv6 address."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


class _Pages:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._html = _read_page("page.html")
        self._streams = 0

    async def page(self, request: Request) -> Response:
        """The page of all jobs, or of the one that the path names."""
        job = request.path_params.get("job", "")
        html = self._html.replace("{root}", "../" if job else "./")
        found = 404 if job and not self._jobs.known(job) else 200
        return Response(html, found, media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        del request
        text = _exposition(self._jobs.in_short(), etcd_up=self._jobs.away is None)
        return Response(text, media_type=_METRICS)

    async def api_jobs(self, request: Request) -> Response:
        del request
        return Response(self._jobs.overview(), media_type="application/json")

    async def api_job(self, request: Request) -> Response:
        known = self._jobs.known(request.path_params["job"])
        if known is None:
            return PlainTextResponse(f"no such job under {self._jobs.prefix}\n", 404)
        return Response(known.text, media_type="application/json")

    async def api_events(self, request: Request) -> Response:
        """The changes of all jobs, or of the one that the path names, as they come."""
        job = request.path_params.get("job", "")
        if job and not valid_job(job):
            return PlainTextResponse("a job can't be called so\n", 404)
        if self._streams >= MOST_STREAMS:
            text = f"{MOST_STREAMS} pages are open: no more are followed\n"
            return PlainTextResponse(text, 503, {"Retry-After": "10"})
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return _Stream(self._messages(job), media_type="text/event-stream")

    async def _messages(self, job: str) -> AsyncGenerator[bytes]:
        """Give the changes since the last message, as server-sent events."""
        sent: dict[str, bytes] = {}
        self._streams += 1
        try:
            async with self._jobs.viewed(job) if job else nullcontext():
                while not self._jobs.over.is_set():
                    news, now = self._jobs.news, self._now(job)
                    changed = [
                        _event(name, now[name]) for name in now if sent.get(name) != now[name]
                    ]
                    sent = now
                    if changed:
                        yield b"".join(changed)
                    pause = max(1.0, sum(map(len, changed)) / _PER_MESSAGE) * _SOONEST
                    await _is_set_in(self._jobs.over, pause)
                    if not await _is_set_in(news, _QUIET):
                        yield b":\n\n"
        finally:
            self._streams -= 1

    def _now(self, job: str) -> dict[str, bytes]:
        jobs = self._jobs
        if not job:
            return {"etcd": jobs.etcd(), "jobs": jobs.overview()}
        known = jobs.known(job)
        state = known.text if known else b"null"
        return {"etcd": jobs.etcd(), "job": state}


class _Stream(StreamingResponse):
    """An answer that ends as soon as its client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        streams = asyncio.create_task(self.stream_response(send))
        leaves = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({streams, leaves}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            streams.cancel()
            leaves.cancel()
            await asyncio.wait({streams, leaves})
        if not streams.cancelled():
            with suppress(OSError):  # TimeoutError among them
                streams.result()


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


async def _is_set_in(event: asyncio.Event, seconds: float) -> bool:
    """Whether it was set in so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _exposition(jobs: Sequence[dict[str, Any]], *, etcd_up: bool) -> str:
    """These jobs, as `status.in_short` gives them, in Prometheus' text format."""
    samples = [sample for short in jobs for sample in _samples(short)]
    up = "elastic_etcd_etcd_up"
    text = "1: etcd answers; 0: what is told of jobs is as it was before."
    lines = [f"# HELP {up} {text}", f"# TYPE {up} gauge", f"{up} {int(etcd_up)}"]
    for name, text in _GAUGES.items():
        lines += [f"# HELP elastic_etcd_{name} {text}", f"# TYPE elastic_etcd_{name} gauge"]
        for job, of, state, value in samples:
            # Of what can be shown JSON quotes the same characters as Prometheus.
            quoted = json.dumps(query.in_one_line(state), ensure_ascii=False)
            more = f",state={quoted}" if state else ""
            if of == name:
                lines.append(f'elastic_etcd_{name}{{training_job="{job}"{more}}} {value}')
    return "".join(f"{line}\n" for line in lines)


def _samples(short: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """The job, the name, the label `state` and the value of each that there is of a job."""
    job, state = short["job"], short["state"]
    yield job, "job_state", state, 1
    if state not in ("training", "forming", "deserted"):
        yield job, "outcome_timestamp_seconds", state, seconds_of(short["since"]) or 0
    if state not in ("training", "forming"):
        return
    yield job, "generation", "", short["generation"]
    yield job, "world_size", "", short["world_size"]
    yield job, "hanging", "", int(short["hangs_since"] is not None)
    yield from ((job, "nodes", each, count) for each, count in short["nodes"].items())
    most = short["limits"]["max_restarts"] if short["limits"] else 0
    if 0 < most < UNCOUNTED:
        yield job, "restart_budget_left", "", most - short["restarts"]
