"""The metrics of this agent, its workers and its job, and their server: with --metrics-addr only.

The agent's loop hands in each state; a scrape comes in another thread and only reads. All counts
are kept here: prometheus-client's own counters would write into PROMETHEUS_MULTIPROC_DIR, which is
the workers'.

The HTTP server has a thread of its own: /metrics, /healthz and /readyz. It answers while the
agent's loop stands still. There is no authentication, so strangers get little: a request a
connection, of which the first line is read, and a place until somebody newer needs it.
"""

import asyncio
import logging
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.loop_watchdog import Watchdog
from elastic_etcd.agent.followers.recovery import Histogram, Recovery
from elastic_etcd.agent.followers.time_accounting import TimeAccounting, is_spare
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import hangs
from elastic_etcd.core.lifecycle import Event, Finished, Life, State, WorkersDiverged
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Phase, seconds_of
from elastic_etcd.core.view import Everything, View
from elastic_etcd.errors import UsageError
from elastic_etcd.protocol.activity import Activity
from elastic_etcd.protocol.messages import UNCOUNTED
from elastic_etcd.system.sockets import address, listen
from elastic_etcd.version import __version__

# A probe is answered two turns of the loop after its connection is taken, and a turn takes no more
# connections than the backlog. So however many there are, no probe is the oldest before that.
_BACKLOG = 32
_MOST = 4 * _BACKLOG  # connections at a time; from there on the oldest is cut
_LONGEST = 8192  # bytes of a request
_DEADLINE = 10.0  # seconds for a connection, from its beginning to its end
_REQUEST_LINE = re.compile(rb"(GET|HEAD) ([^ ?]*)\S* HTTP/1\.\d\r\n")
_PLAIN = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"

_REQUESTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

log = logging.getLogger(__name__)


class StepCounts:
    """The numbers on the workers' pages, added up over all worlds of this agent.

    A scrape in the middle of `follow` would count a world twice.
    """

    def __init__(self, workers: Workers) -> None:
        self._lock = threading.Lock()
        self._workers = workers
        self._generation = 0  # of the world that runs here
        self._before = (0, 0, 0.0)

    def follow(self, generation: int) -> None:
        """This world is about to start, or none (0): the pages are about to be used again."""
        if generation != self._generation:
            with self._lock:
                self._before, self._generation = self._sum(), generation

    def read(self) -> list[Activity]:
        """The activities of this world's workers, once its pages are cleared for it."""
        begun = self._generation and self._workers.generation == self._generation
        return [page.read() for page in self._workers.pages] if begun else []

    def total(self) -> tuple[int, int, float]:
        """Steps of the slowest worker here; commits of all of them, and how long these took."""
        with self._lock:
            return self._sum()

    def _sum(self) -> tuple[int, int, float]:
        pages, (steps, commits, seconds) = self.read(), self._before
        return (
            steps + min((page.steps for page in pages), default=0),
            commits + sum(page.commits for page in pages),
            seconds + sum(page.commit_seconds for page in pages),
        )


class Metrics(Collector):
    """A scrape reads them, and probes are answered by them.

    `address` is where they are served; `requests` is told how long etcd took for each answer.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.address = ""
        self.requests = Histogram(_REQUESTS)
        self._config = config
        self._own = {"training_job": config.job, "node": config.node}
        self._watchdog: Watchdog | None = None
        self._membership: Membership | None = None
        self._state = State(Local(run=""), config.nproc)
        self._recovery = Recovery()
        self._steps: StepCounts | None = None
        self._divergences = 0
        self._hang = (0, 0)  # that was told last: its generation and number
        self._hangs = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # --- in the agent's loop --------------------------------------------------------------

    def watch(self, watchdog: Watchdog) -> None:
        """From here on it knows whether the loop turns."""
        self._watchdog = watchdog

    def follow(
        self,
        membership: Membership,
        workers: Workers,
        accounting: TimeAccounting,
    ) -> None:
        """From here on these are read, and changes of world are counted."""
        self._membership, self._steps = membership, StepCounts(workers)
        self._recovery = accounting.recovery

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the agent's new state."""
        del before
        self._state = state
        if isinstance(event, WorkersDiverged) and event.named:
            self._divergences += 1
        hang = state.view.hang if state.view else None
        if hang and hang.alarm and (hang.generation, hang.number) > self._hang:
            self._hang = hang.generation, hang.number
            self._hangs += 1
        if self._steps:
            self._steps.follow(state.local.running)

    # --- in any thread --------------------------------------------------------------------

    def stuck(self) -> str:
        """Why this agent had better be started again, "" if its loop turns."""
        seconds = self._watchdog.stands if self._watchdog else 0.0
        return f"the loop stands for {seconds:.0f} s" if seconds > self._config.lease_ttl else ""

    def unready(self) -> str:
        """Why this node is neither in a world nor a spare, "" if it is."""
        return unready(self._state)

    def text(self) -> bytes:
        """All of it, in Prometheus' own format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """As prometheus-client asks for it."""
        about = {"version": __version__, "nnodes": self._config.limits.nnodes}
        info = InfoMetricFamily(f"{_PREFIX}job", "This agent and its job.", labels=self._names(""))
        info.add_metric([*self._own.values()], about)
        yield info
        yield from self._of_world()
        yield from self._of_changes()
        yield from self._of_steps()
        requests = "From a request to the answer of etcd."
        yield self._histogram("etcd_request_seconds", requests, {"": self.requests})
        left = {"": self._membership.lease_left} if self._membership else {}
        ends = "Until the lease ends if nothing renews it."
        yield self._gauge("lease_ttl_remaining_seconds", ends, left)

    def _of_world(self) -> Iterator[Metric]:
        state = self._state
        view = state.view
        now = view.round if view else None
        takes_part = now is not None and state.local.running == now.generation
        ranks = now.world_size if now and takes_part else 0
        newest = {"": now.generation if now else 0}
        yield self._gauge("generation", "The newest generation of the job.", newest)
        text = "Ranks of the world that trains here; 0: none."
        yield self._gauge("world_size", text, {"": ranks})
        counts = nodes(state.view) if state.view else {}
        text = "Nodes by state; the coordinator tells all of them."
        yield self._gauge("nodes", text, counts, "state")
        most = state.limits.max_restarts if state.limits else 0
        left = {"": most - view.restarts} if view and now and 0 < most < UNCOUNTED else {}
        text = (
            "Failures that the job still survives; absent where it may be started again for ever."
        )
        yield self._gauge("restart_budget_left", text, left)
        outcome = state.view.outcome if state.view else None
        ended = {outcome.state: seconds_of(outcome.at) or 0.0} if outcome else {}
        text = "When the job has ended, by its outcome, in seconds since 1970."
        yield self._gauge("outcome_timestamp_seconds", text, ended, "state")

    def _of_changes(self) -> Iterator[Metric]:
        recovery = self._recovery
        text = "Worlds that followed another on this node."
        yield self._counter("restarts", text, recovery.restarts, "cause")
        text = "From the last step of a world to the first of the next."
        yield self._counter("lost_seconds", text, recovery.lost, "cause")
        text = "Each phase of a change of world on this node."
        yield self._histogram("recovery_seconds", text, recovery.phases, "phase")

    def _of_steps(self) -> Iterator[Metric]:
        steps, commits, seconds = self._steps.total() if self._steps else (0, 0, 0.0)
        pages = self._steps.read() if self._steps else []
        text = "Steps of all worlds, of the slowest worker here."
        yield self._counter("steps", text, {"": steps})
        text = "Steps of this world, of the slowest worker here."
        yield self._gauge("step", text, {"": min(p.steps for p in pages)} if pages else {})
        slowest = {"": max(p.slowest for p in pages)} if pages else {}
        text = "The slowest of the last 64 steps of the workers here."
        yield self._gauge("step_seconds", text, slowest)
        text = "Commits of the state by the workers here."
        commit = SummaryMetricFamily(f"{_PREFIX}commit_seconds", text, labels=self._names(""))
        commit.add_metric([*self._own.values()], commits, seconds)
        yield commit
        hang = hangs.that_lasts(self._state.view) if self._state.view else None
        text = "1: workers of the job hang now, as far as they were told to; 0: none."
        yield self._gauge("hanging", text, {"": int(hang is not None)})
        text = "Hangs of the job that were told while this agent was there."
        yield self._counter("hangs", text, {"": self._hangs})
        text = "Workers here whose values were found to differ from the other replicas'."
        yield self._counter("divergences", text, {"": self._divergences})

    def _gauge(self, name: str, text: str, values: Mapping[str, float], label: str = "") -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=self._names(label))
        for value, number in values.items():
            family.add_metric(self._labels(value), number)
        return family

    def _counter(
        self, name: str, text: str, values: Mapping[str, float], label: str = ""
    ) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=self._names(label))
        for value, number in values.items():
            family.add_metric(self._labels(value), number)
        return family

    def _histogram(
        self, name: str, text: str, values: Mapping[str, Histogram], label: str = ""
    ) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=self._names(label))
        for value, histogram in values.items():
            family.add_metric(self._labels(value), histogram.buckets, histogram.sum)
        return family

    def _names(self, label: str) -> list[str]:
        return [*self._own, *filter(None, [label])]

    def _labels(self, value: str) -> list[str]:
        return [*self._own.values(), *filter(None, [value])]


_PREFIX = "elastic_etcd_"


def unready(state: State) -> str:
    """Why a node is neither in a world nor a spare, "" if it is."""
    own, now = state.local, state.view.round if state.view else None
    if own.leaving or state.life is not Life.MEMBER:
        return "leaving" if own.leaving else state.life.value
    if now is None or now.phase is not Phase.FINAL or own.stopping:
        return f"generation {now.generation}: {now.phase}" if now else "no round"
    finished = isinstance(state.result, Finished)
    if own.running == now.generation or (finished and own.ran == now.generation):
        return ""
    return "" if is_spare(state) else f"not in generation {now.generation}"


def nodes(view: View) -> dict[str, float]:
    """How many nodes are in which state; only a coordinator sees more than the training ones."""
    now = view.round
    final = now is not None and now.phase is Phase.FINAL
    if view.coverage != Everything():
        return {"training": now.nodes if now and final else 0}
    world = {p.lease for p in view.world} if final else set[int]()
    found = Counter(_member_state(m.leaving, m.lease in world, final) for m in view.members)
    return {state: found[state] for state in ("training", "spare", "waiting", "leaving")}


def _member_state(leaving: bool, taken: bool, final: bool) -> str:
    if leaving:
        return "leaving"
    if taken:
        return "training"
    return "spare" if final else "waiting"


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
    request = _REQUEST_LINE.match(head)
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
