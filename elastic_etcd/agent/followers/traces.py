"""Each change of world as a trace, loaded with --traces only.

All nodes give it one id, derived from the run and the generation, so that nothing more is written
to etcd. OpenTelemetry's own variables say where spans go, and its own thread brings them there.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import entry_points

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, set_span_in_context

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.lifecycle import Event, State
from elastic_etcd.core.schema import Participant, Round
from elastic_etcd.errors import UsageError
from elastic_etcd.times import TRACES_FLUSH
from elastic_etcd.version import __version__

log = logging.getLogger(__name__)


@contextmanager
def tracing(config: AgentConfig) -> Iterator["Traces"]:
    """Spans go out while this is open, and what is left for TRACES_FLUSH more.

    Raises UsageError for an exporter that is not there.
    """
    library, warning = logging.getLogger("opentelemetry"), _FirstWarning()
    before = library.handlers[:], library.propagate
    library.handlers[:], library.propagate = [warning], False
    traces = Traces(config)
    try:
        yield traces
    finally:
        flush = threading.Thread(target=traces.close, name="traces", daemon=True)
        flush.start()
        flush.join(TRACES_FLUSH)
        warning.over = True
        library.handlers[:], library.propagate = before


class _FirstWarning(logging.Handler):
    """A collector that is away is told once, and not at each try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.over = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.over:
            self.over = True
            said = record.getMessage().rstrip(".")
            text = "--traces: %s. Spans are lost; look at OTEL_EXPORTER_OTLP_ENDPOINT (told once)"
            log.warning(text, said)


class _Ids(RandomIdGenerator):
    """Random ones, but for the trace and its first span: these are the change's on all nodes."""

    change = ""
    _first = 0

    def generate_trace_id(self) -> int:
        digest = sha256(self.change.encode()).digest()
        self._first = int.from_bytes(digest[16:24])
        return int.from_bytes(digest[:16])

    def generate_span_id(self) -> int:
        first, self._first = self._first, 0
        return first or super().generate_span_id()


class Traces:
    """A span for each change on this node, and in it one for each phase.

    All nodes begin the trace's first span, as the parent of their own; group rank 0's alone ends
    it, so that it is sent once.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._ids, self._node = _Ids(), config.node
        own = {"service.name": "elastic-etcd", "service.instance.id": config.node}
        resource = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        for exporter in _exporters():
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("elastic_etcd", __version__)
        self._job = config.job
        self._before: list[tuple[str, float, float]] = []  # phases that lead to the next world
        self._open: list[Span] = []  # that end with the change
        self._context = Context()  # of this node's span
        self._offset = 0.0  # from the agent's clock to that of spans
        self._until = 0.0  # the end of the last phase

    def see(self, before: State, event: Event, state: State) -> None:
        """Begin the spans of a world that begins here."""
        del event
        running, view = state.local.running, state.view
        part = view.part(state.local.lease) if view else None
        if view and view.round and part and running and running != before.local.running:
            self._begin_change(view.round, part)

    def pass_phase(self, phase: str, begin: float, end: float) -> None:
        """Take note of a phase of this node that has ended, in seconds of the agent's clock."""
        if phase in ("start", "first_step"):
            self._add(phase, begin, end)
            if phase == "first_step":
                self._end_change()
            return
        self._end_change()
        if self._before and self._before[-1][2] != begin:
            self._before.clear()  # this node was a spare since
        self._before.append((phase, begin, end))

    def close(self) -> None:
        """Send all that is left."""
        self._end_change()
        self._provider.shutdown()

    def _begin_change(self, world: Round, part: Participant) -> None:
        self._ids.change = f"{world.run}/{world.generation}"
        self._offset = time.time() - time.monotonic()
        began = self._ns(self._before[0][1])
        about: dict[str, str | int] = {
            "training.job": self._job,
            "training.run": world.run,
            "training.generation": world.generation,
            "training.reason": world.reason,
            "training.world_size": world.world_size,
        }
        name = "change of world"
        change = self._tracer.start_span(name, Context(), attributes=about, start_time=began)
        about |= {"training.node": self._node, "training.group_rank": part.group_rank}
        context = set_span_in_context(change, Context())
        own = self._tracer.start_span(self._node, context, attributes=about, start_time=began)
        self._open = [own] if part.group_rank else [own, change]
        self._context = set_span_in_context(own, Context())
        for phase, begin, end in self._before:
            self._add(phase, begin, end)
        self._before.clear()

    def _add(self, phase: str, begin: float, end: float) -> None:
        self._until = end
        span = self._tracer.start_span(phase, self._context, start_time=self._ns(begin))
        span.end(self._ns(end))

    def _end_change(self) -> None:
        for span in self._open:
            span.end(self._ns(self._until))
        self._open.clear()

    def _ns(self, at: float) -> int:
        return round((at + self._offset) * 1e9)


def _exporters() -> Iterator[SpanExporter]:
    """Those of OTEL_TRACES_EXPORTER, by the names under which packages offer them."""
    given = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", given).partition("/")[0]
    names = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    for name in names.split(","):
        offered = f"otlp_proto_{protocol}" if name == "otlp" else name
        for found in entry_points(group="opentelemetry_traces_exporter", name=offered):
            yield found.load()()
            break
        else:
            if name != "none":
                raise UsageError(f"--traces: no package here has the exporter {offered}")
