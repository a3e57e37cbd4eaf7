"""Docker's API, over its socket, for the containers of the compose project that this runs in."""

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

SOCKET = "/var/run/docker.sock"
PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(SOCKET)


def call(method: str, path: str, body: object = None, timeout: float = 60) -> Any:
    """The decoded answer, or None where there is none. Raises AssertionError on a refusal."""
    connection = _Connection("docker", timeout=timeout)
    try:
        connection.request(
            method,
            path,
            body=json.dumps(body) if body is not None else None,
            headers={"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    # 304: it is already as asked.
    assert response.status < 400, f"{method} {path}: {response.status} {answer.decode()}"
    kind = response.headers.get("Content-Type", "")
    return json.loads(answer) if "json" in kind and answer else answer


@dataclass(frozen=True)
class Container:
    """One service's container, with docker's verbs. Each returns when it is done."""

    service: str
    id: str

    def do(self, verb: str, **query: str) -> None:
        call("POST", f"/containers/{self.id}/{verb}?{urlencode(query)}")

    def start(self) -> None:
        self.do("start")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after the service's stop_grace_period, that is never."""
        self.do("stop", t="50")

    def kill(self) -> None:
        """SIGKILL everything in it. Paused, it would not die."""
        if self.state()["Paused"]:
            self.do("unpause")
        if self.state()["Running"]:
            self.do("kill")
            self.wait()

    def wait(self, seconds: float = 60) -> None:
        """Until it has ended."""
        call("POST", f"/containers/{self.id}/wait?condition=not-running", timeout=seconds)

    def pause(self) -> None:
        self.do("pause")

    def unpause(self) -> None:
        self.do("unpause")

    def disconnect(self) -> None:
        """Take its network interface away."""
        call("POST", f"/networks/{self.network()}/disconnect", {"Container": self.id})

    def connect(self) -> None:
        """Give it one again; its address is the next free one, which is another as a rule."""
        endpoint = {"Container": self.id, "EndpointConfig": {"Aliases": [self.service]}}
        call("POST", f"/networks/{self.network()}/connect", endpoint)

    def reconnect(self) -> None:
        """Connected, whatever a test has done to it."""
        if self.network() not in self.inspect()["NetworkSettings"]["Networks"]:
            self.connect()

    def network(self) -> str:
        """The project's default network."""
        project = self.inspect()["Config"]["Labels"][PROJECT]
        return f"{project}_default"

    def address(self) -> str:
        networks = self.inspect()["NetworkSettings"]["Networks"]
        return str(networks[self.network()]["IPAddress"])

    def inspect(self) -> Any:
        return call("GET", f"/containers/{self.id}/json")

    def state(self) -> Any:
        return self.inspect()["State"]

    def output(self, tail: int = 60) -> str:
        """The last lines of what it printed since it was created."""
        raw = call("GET", f"/containers/{self.id}/logs?stdout=1&stderr=1&tail={tail}")
        lines = bytearray()
        while raw:  # frames: a kind, three zeros, the length, the text
            length = int.from_bytes(raw[4:8], "big")
            lines += raw[8 : 8 + length]
            raw = raw[8 + length :]
        return lines.decode(errors="replace")


def containers() -> dict[str, Container]:
    """Those of this container's own compose project, running or not, by service."""
    me = call("GET", f"/containers/{socket.gethostname()}/json")
    label = f"{PROJECT}={me['Config']['Labels'][PROJECT]}"
    found = call("GET", f"/containers/json?all=1&filters={quote(json.dumps({'label': [label]}))}")
    return {c["Labels"][SERVICE]: Container(c["Labels"][SERVICE], c["Id"]) for c in found}
