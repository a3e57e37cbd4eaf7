"""What an agent shows at its --metrics-addr, and a real Prometheus that scrapes it."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.debian import unpacked
from tests.support.job import ROOT, Agent, Job

EXAMPLES = ROOT / "examples" / "prometheus"
_ANSWERS = 60.0


def get(address: str, path: str) -> tuple[int, str]:
    """The status and the body of an answer to GET."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=_ANSWERS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def address_of(job: Job, agent: Agent) -> str:
    """Where this agent serves its metrics, as its log says."""
    job.said(agent, "/metrics\n", seconds=60)
    (address,) = re.findall(r"metrics at http://(\S+)/metrics", agent.output)
    return str(address)


def values(address: str) -> dict[str, float]:
    """All that an agent shows: by name, with the labels that are not training_job and node."""
    status, text = get(address, "/metrics")
    assert status == 200, text
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    return {_own_labels(name): float(value) for name, _, value in lines}


def _own_labels(name: str) -> str:
    labels = re.findall(r'(\w+="[^"]*")', name)
    kept = [label for label in labels if not label.startswith(("training_job=", "node="))]
    return name.partition("{")[0] + ("{" + ",".join(kept) + "}" if kept else "")


class Prometheus:
    """One that runs with the files of examples/prometheus. Raises NotToBeHad."""

    def __init__(self, folder: Path, agents: Sequence[str] = (), serves: str = "") -> None:
        programs = unpacked("prometheus", "bookworm", "prometheus-bookworm") / "usr/bin"
        self._program, self._promtool = programs / "prometheus", str(programs / "promtool")
        self._folder = folder / "prometheus"
        shutil.copytree(EXAMPLES, self._folder)
        config = self._folder / "prometheus.yml"
        text = config.read_text().replace("15s", "1s")
        given = iter((list(agents), [serves] if serves else []))
        text = re.sub(r"targets: .*", lambda _: f"targets: {json.dumps(next(given))}", text)
        assert not list(given)
        config.write_text(text)
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

    def promtool(self, *arguments: str) -> str:
        """What promtool says of the files, to which it must not object."""
        done = subprocess.run(
            [self._promtool, *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is open it scrapes."""
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(self._command(), cwd=self._folder, stdout=log, stderr=log)
        try:
            self._await_start(process)
            yield
        finally:
            process.kill()
            process.wait()

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--"),
            str(self._program),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={self.address}",
        ]

    def _await_start(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + _ANSWERS
        while not self._is_ready():
            log = (self._folder / "log").read_text()
            assert process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return get(self.address, "/-/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        status, text = get(self.address, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert status == 200, text
        return json.loads(text)["data"]

    def query(self, expression: str) -> list[float]:
        """The values that an expression has now; those that are no number are left out."""
        found = self.ask("query", query=expression)["result"]
        numbers = (float(each["value"][1]) for each in found)
        return [number for number in numbers if number == number]  # noqa: PLR0124 - no NaN
