"""The recipe of docs/prometheus.md that makes spans of a job's events, as it stands there."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.core.schema import Keys
from tests.support.etcd import EtcdServer
from tests.support.jobs import FIRST, HOSTILE, KEYS, OVER

ROOT = Path(__file__).parents[2]
BEGAN = datetime.fromisoformat(str(FIRST.began_at)).timestamp()


class Collector:
    """`bodies` are all that were posted to `url`, by path."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.bodies: list[tuple[str, str, Any]] = []


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Request(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            taking.bodies.append((self.path, self.headers["Content-Type"], body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Request) as server:
        taking = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield taking
        server.shutdown()
        thread.join()


def test_each_world_is_a_trace(
    etcd: EtcdServer, prefix: str, collector: Collector, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "prometheus.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "spans.py").write_text(block)
    for key, value in OVER.items():
        etcd.ctl("put", key.replace(KEYS.root, Keys(f"{prefix}/j").root), value)
    where = ("--etcd", etcd.endpoint, "--prefix", prefix)
    events = subprocess.check_output(
        [sys.executable, "-m", "elastic_etcd", "events", "j", "--json", *where]
    )
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    for _ in range(2):
        spans = [sys.executable, "-W", "error", str(tmp_path / "spans.py")]
        subprocess.run(spans, input=events, env=environment, check=True)

    assert {about[:2] for about in collector.bodies} == {("/v1/traces", "application/json")}
    sent = [body["resourceSpans"][0]["scopeSpans"][0]["spans"] for *_, body in collector.bodies]
    assert len(sent) == 4
    assert sent[:2] == sent[2:]  # with the same ids
    ends = "rank 1 on n2 exited 1", "every participant is done"
    for (world, *parts), ended in zip(sent[:2], ends, strict=True):
        about = {a["key"]: a["value"]["stringValue"] for a in world["attributes"]}
        assert (about["training.job"], about["training.run"]) == ("j", "r")
        assert about["training.ended"].startswith(ended)
        assert {each["parentSpanId"] for each in parts} == {world["spanId"]}
        assert world["parentSpanId"] == ""
        assert {each["traceId"] for each in parts} == {world["traceId"]}
        assert len({each["spanId"] for each in (world, *parts)}) == 3
    assert sent[0][0]["traceId"] != sent[1][0]["traceId"]
    assert [seconds(span) for span in sent[0]] == [
        ("world", -3.0, 62.51),
        ("rendezvous", -3.0, 0.0),
        ("training", 0.0, 62.51),
    ]
    assert [seconds(span) for span in sent[1]] == [
        ("world", 63.25, 183.5),
        ("rendezvous", 63.25, 63.5),
        ("training", 63.5, 183.5),
    ]
    nodes = [a["value"]["stringValue"] for a in sent[1][0]["attributes"] if "nodes" in a["key"]]
    assert nodes == [str(["n1", HOSTILE])]


def seconds(span: dict[str, Any]) -> tuple[str, float, float]:
    """Its name, and when it began and ended since the first world did."""
    begin, end = (int(span[f"{which}TimeUnixNano"]) / 1e9 - BEGAN for which in ("start", "end"))
    return span["name"], round(begin, 3), round(end, 3)
