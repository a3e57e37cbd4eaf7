"""Metadata services of three clouds on the loopback, which behave as their documents say."""

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class Service(ThreadingHTTPServer):
    """One of the three; `notice` is the time at which this machine goes."""

    daemon_threads = True

    def __init__(self, kind: "type[Request]") -> None:
        self.notice: datetime | None = None
        self.changed = threading.Condition()
        self.tokens: list[str] = []
        self.uses = 0  # of the newest token
        self.approved = threading.Event()
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), kind)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def preempt(self, seconds: float) -> None:
        """The machine goes in so many seconds."""
        with self.changed:
            self.notice = datetime.now(UTC) + timedelta(seconds=seconds)
            self.changed.notify_all()


class Request(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    flavor: ClassVar[dict[str, str]] = {}

    def answer(self, status: int, text: str = "", **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (self.flavor | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        with self.server.changed:
            self.server.asked.append(self.path)
            self.server.changed.notify_all()
        self.get(*self._parsed())

    def _parsed(self) -> tuple[str, dict[str, str]]:
        path, _, query = self.path.partition("?")
        return path, dict(urllib.parse.parse_qsl(query))

    def get(self, path: str, query: dict[str, str]) -> None:
        raise NotImplementedError

    def log_message(self, *_: Any) -> None:
        pass


class AwsRequest(Request):
    """IMDSv2: nothing without a token; a token of this one lasts for three requests."""

    def do_PUT(self) -> None:
        life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0")
        if self.path != "/latest/api/token" or not 1 <= int(life) <= 21600:
            self.answer(400)
            return
        self.server.tokens.append(f"token{len(self.server.tokens)}==")
        self.server.uses = 0
        self.answer(200, self.server.tokens[-1])

    def get(self, path: str, query: dict[str, str]) -> None:
        del query
        self.server.uses += 1
        token = self.headers.get("X-aws-ec2-metadata-token")
        if token not in self.server.tokens[-1:] or self.server.uses > 3:
            self.answer(401)
        elif path != "/latest/meta-data/spot/instance-action" or not self.server.notice:
            self.answer(404, "Not Found")
        else:
            at = self.server.notice.strftime("%Y-%m-%dT%H:%M:%SZ")
            self.answer(200, json.dumps({"action": "terminate", "time": at}))


class GcpRequest(Request):
    """It waits for a change of what the asker has, by its ETag, if asked to."""

    flavor: ClassVar[dict[str, str]] = {"Metadata-Flavor": "Google"}

    def get(self, path: str, query: dict[str, str]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.answer(403)
        elif path != "/computeMetadata/v1/instance/preempted":
            self.answer(404)
        else:
            with self.server.changed:
                if query.get("wait_for_change") == "true":
                    last, seconds = query.get("last_etag"), float(query["timeout_sec"])
                    self.server.changed.wait_for(lambda: self._etag() != last, seconds)
                self.answer(200, "TRUE" if self.server.notice else "FALSE", ETag=self._etag())

    def _etag(self) -> str:
        return "b" if self.server.notice else "a"


class AzureRequest(Request):
    """The events of a whole group of machines; each is approved by its id."""

    def get(self, path: str, query: dict[str, str]) -> None:
        if self.headers.get("Metadata") != "true":
            self.answer(400)
        elif path == "/metadata/instance/compute/name" and query["format"] == "text":
            self.answer(200, "vm2")
        elif path == "/metadata/scheduledevents" and query["api-version"] == "2020-07-01":
            self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": self._events()}))
        else:
            self.answer(404)

    def _events(self) -> list[dict[str, Any]]:
        others = self._event("other", "Preempt", "vm1", datetime.now(UTC))
        freeze = self._event("freeze", "Freeze", "vm2", datetime.now(UTC))
        own = self.server.notice
        return [others, freeze, *([self._event("own", "Preempt", "vm2", own)] if own else [])]

    def _event(self, name: str, kind: str, machine: str, at: datetime) -> dict[str, Any]:
        return {
            "EventId": name,
            "EventStatus": "Scheduled",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [machine],
            "NotBefore": format_datetime(at, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body == {"StartRequests": [{"EventId": "own"}]}:
            self.server.approved.set()
        self.answer(200)


SERVICES: dict[str, type[Request]] = {"aws": AwsRequest, "gcp": GcpRequest, "azure": AzureRequest}


@contextmanager
def metadata_service(cloud: str) -> Iterator[Service]:
    """One that is asked by programs which have its address in ELASTIC_ETCD_METADATA."""
    with Service(SERVICES[cloud]) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
