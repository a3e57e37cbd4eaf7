"""--traces: each change of world is one trace, with the phases of each node."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.collector import Received, collecting
from tests.support.go_programs import built_or_skip, pinned
from tests.support.job import Agent, Job
from tests.support.ticking import TickingJob

MODULE = Path(__file__).parent / "modules" / "collector"
CONFIG = """
receivers: {otlp: {protocols: {http: {endpoint: "127.0.0.1:PORT"}}}}
exporters: {debug: {verbosity: detailed}}
service:
  pipelines: {traces: {receivers: [otlp], exporters: [debug]}}
  telemetry: {metrics: {level: none}}
"""
PRINTED = re.compile(r"Trace ID +: (\w+)\n +Parent ID +: \w*\n +ID +: \w+\n +Name +: (.+)\n")
PHASES = ["detect", "stop", "rendezvous", "start", "first_step"]
TRAINS = """
import os, time
import elastic_etcd as ee

print("pid", os.getpid(), "in generation", os.environ["ELASTIC_ETCD_GENERATION"], flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
    ee.heartbeat()
"""


def pid_in(job: Job, agent: Agent, generation: int) -> int:
    said = re.compile(rf"pid (\d+) in generation {generation}\n")
    found = job.wait(f"generation {generation} on {agent.node}", lambda: said.search(agent.output))
    return int(found[1])


def test_a_change_is_one_trace_of_all_nodes(ticks: TickingJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    with collecting() as collector:
        env = collector.variables | {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "mine"}
        given = {"script": (str(script),), "env": env, "traces": None}
        n1, n2 = (ticks.start(n, **given) for n in ("n1", "n2"))

        def nodes(generation: int) -> list[Received]:
            """The spans of both nodes, which are sent after all that is in them."""
            found = (collector.named(n, generation) for n in ("n1", "n2"))
            return [span for span in found if span]

        ticks.wait("the first world's trace", lambda: len(nodes(1)) == 2)
        os.kill(pid_in(ticks, n2, 1), signal.SIGKILL)
        pid_in(ticks, n1, 2)
        ticks.wait("the trace of the change", lambda: len(nodes(2)) == 2)
        ticks.wait("its root", lambda: collector.named("change of world", 2))
        ticks.finish(n1, n2)

    (root,) = [s for s in collector.spans if s.trace == nodes(2)[0].trace and not s.parent]
    assert root == collector.named("change of world", 2)
    assert "rank" in root.about["training.reason"]
    assert "was killed by SIGKILL" in root.about["training.reason"]
    assert root.about["service.name"] == "mine"
    assert {s.name: s.about["service.instance.id"] for s in nodes(2)} == {"n1": "n1", "n2": "n2"}
    for node in nodes(2):
        assert node.parent == root.id
        phases = collector.below(node)
        assert [span.name for span in phases] == PHASES
        assert {span.trace for span in phases} == {root.trace}
        ends = [node.begin, *(span.end for span in phases[:-1])]
        assert [round(s.begin - e, -4) for s, e in zip(phases, ends, strict=True)] == [0] * 5
        assert phases[-1].end == node.end
    assert [[s.name for s in collector.below(n)] for n in nodes(1)] == [PHASES[2:]] * 2
    assert len({s.trace for s in collector.spans}) == 2


@pytest.mark.nightly(part="jobs")
@pytest.mark.timeout(1800)  # the first time, Go has to build it
def test_opentelemetry_s_own_collector_takes_them(ticks: TickingJob, tmp_path: Path) -> None:
    version = pinned(MODULE, "go.opentelemetry.io/collector/otelcol")
    program = built_or_skip(MODULE, f"otelcol-{version}", {"otelcol": "."}) / "otelcol"
    script, config, printed = (tmp_path / name for name in ("train.py", "config.yaml", "printed"))
    script.write_text(TRAINS)
    (port,) = free_ports(1)
    config.write_text(CONFIG.replace("PORT", str(port)))
    command = [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--"]
    with printed.open("wb") as output:
        command += [str(program), f"--config=file:{config}"]
        collector = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        ticks.wait("the collector is ready", lambda: "is ready" in printed.read_text())
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        given = {"script": (str(script),), "env": env, "traces": None}
        n1, n2 = (ticks.start(n, **given) for n in ("n1", "n2"))
        os.kill(pid_in(ticks, n1, 1), signal.SIGKILL)
        for agent in (n1, n2):
            pid_in(ticks, agent, 2)

        def spans() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for trace, name in PRINTED.findall(printed.read_text()):
                found.setdefault(trace, []).append(name)
            return found

        whole = sorted(["change of world", "n1", "n2", *PHASES, *PHASES])
        ticks.wait("the trace", lambda: whole in map(sorted, spans().values()))
        assert len(spans()) == 2
        ticks.finish(n1, n2)
    finally:
        collector.kill()
        collector.wait()


def test_a_collector_that_is_away_is_told_once(ticks: TickingJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}"}
    quick = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    node = ticks.start("n1", nnodes="1", script=(str(script),), env=away | quick, traces=None)
    ticks.said(node, "warning: --traces: ")
    for generation in (1, 2):
        os.kill(pid_in(ticks, node, generation), signal.SIGKILL)
    pid_in(ticks, node, 3)
    ticks.finish(node)
    assert node.output.count("warning: --traces: ") == node.output.count("OTEL_") == 1, node.output
    assert "Traceback" not in node.output


def test_a_collector_that_never_answers_holds_nobody_up(ticks: TickingJob, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
        node = ticks.start("n1", nnodes="1", script=(str(script),), env=env, traces=None)
        pid_in(ticks, node, 1)
        ticks.stop()
        ticks.exits(node, 0, seconds=25)  # without a bound OpenTelemetry takes 30


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("sys.modules['opentelemetry'] = None", "pip install 'elastic_etcd[otel]'"),
        ("import os; os.environ['OTEL_TRACES_EXPORTER'] = 'zip'", "has the exporter zip"),
    ],
)
def test_a_package_that_is_missing_is_told_first(tmp_path: Path, before: str, said: str) -> None:
    code = f"import sys; {before}; from elastic_etcd.launch import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--traces", "--no-python", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "]: error: --traces: " in done.stderr
    assert said in done.stderr
