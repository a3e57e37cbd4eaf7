"""`elastic-etcd serve`: by HTTP as anybody may speak it, and in a real browser."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.cli.live.jobs import Jobs
from elastic_etcd.cli.live.web import MOST_STREAMS
from elastic_etcd.core.schema import (
    Failure,
    History,
    Keys,
    Ledger,
    Limits,
    Master,
    Member,
    Outcome,
    Pace,
    Page,
    Participant,
    Phase,
    RankDoing,
    Round,
    Spec,
    Value,
    encode,
)
from elastic_etcd.core.txn import Get, Put, Txn
from elastic_etcd.errors import EtcdRefused
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import Mirror
from tests.support.chromium import chromium
from tests.support.debian import NotToBeHad
from tests.support.etcd import EtcdServer
from tests.unit.test_metrics import CONFIG

pytestmark = pytest.mark.timeout(600)

ATTACK = "<img src=x onerror=alert(1)>\u202e\x1b[31m"
TRACEBACK = "Traceback (most recent call last):\n<script>alert(1)</script>RuntimeError: no luck\n"
DEADLINE = 90.0
ANSWERS = 60.0


def running(keys: Keys, nodes: int, first: str = "node1") -> dict[str, Value]:
    """The keys of a job that trains."""
    names = [first, *(f"node{n}" for n in range(2, nodes + 1))]
    world = tuple(Participant(100 + n, name, 1, n, n) for n, name in enumerate(names))
    master = Master("h", 1)
    now = Round(2, Phase.FINAL, 100, "node7 is lost", "r", first, nodes, nodes, master)
    began = "2026-11-22T10:00:00.000+00:00", "2026-11-22T10:05:03.500+00:00"
    members = {
        keys.member(100 + n): Member(100 + n, name, 1, run="r") for n, name in enumerate(names)
    }
    return {
        keys.spec: Spec("r", Limits(1, 64)),
        keys.ledger: Ledger(2, 2, nodes),
        keys.round: now,
        keys.page(0): Page(2, world),
        keys.history(1): History(1, "r", "the job begins", began[0], ended_at=began[1]),
        keys.history(2): History(2, "r", "node7 is lost", began[1].replace("03.5", "04.0")),
        keys.pace(100): Pace(100, 2, 1041, 4.5, RankDoing.STEP),
        **members,
    }


def ended(keys: Keys) -> dict[str, Value]:
    failure = Failure(ATTACK, 1, 1, 4211, 1, 92.5, TRACEBACK)
    outcome = Outcome("failed", "no restarts left", "r", 4, 3, failure, "2026-11-22T10:06:00+00:00")
    return {keys.outcome: outcome}


async def write(etcd: EtcdServer, values: Mapping[str, Value | str]) -> None:
    puts = [Put(k, v if isinstance(v, str) else encode(v)) for k, v in values.items()]
    async with Client(etcd.config) as client:
        await client.txn(Txn((), tuple(puts)), 60)


class Server:
    """A `serve` that runs, and requests to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout
        self.url = process.stdout.readline().split()[-1]
        self.host = self.url.removeprefix("http://").rstrip("/")

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.host, timeout=ANSWERS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        return connection.getresponse(), connection

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        answer, connection = self.ask(path, method, **headers)
        with closing(connection), answer:
            return answer.status, answer.read().decode()

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        assert status == 200, text
        return json.loads(text)

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """What comes as server-sent events, by their names."""
        answer, connection = self.ask(path)
        assert answer.headers["Content-Type"].startswith("text/event-stream")

        def events() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in answer:
                kind, _, rest = line.decode().rstrip("\n").partition(": ")
                if kind == "event":
                    name = rest
                elif kind == "data":
                    yield name, json.loads(rest)

        with closing(connection), answer:
            yield events()


@contextmanager
def serving(etcd: EtcdServer, prefix: str, *flags: str) -> Iterator[Server]:
    where = (f"--etcd={etcd.endpoint}", f"--prefix={prefix}", "--listen=0", *flags)
    command = [sys.executable, "-m", "elastic_etcd", "serve", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def waits_for(what: str, look: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_both_families(etcd: EtcdServer, prefix: str) -> None:
    """And a browser may name the one to which it is connected."""
    with serving(etcd, prefix, "--listen=0.0.0.0:0") as server:
        assert server.host.startswith("0.0.0.0:")
        port = server.host.rpartition(":")[2]
        for server.host in (f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert server.get("/api/jobs")[0] == 200
            assert server.get("/api/jobs", Host="192.0.2.7")[0] == 421


async def test_o3_prometheus_reads_how_each_job_is(etcd: EtcdServer, prefix: str) -> None:
    """Also what agents can't tell, that they are gone."""
    j, over, left = (Keys(f"{prefix}/{job}") for job in ("j", "over", "left"))
    odd = replace(ended(over)[over.outcome], state='"odd"\\\n\x1b')
    await write(etcd, running(j, 3, ATTACK) | {over.outcome: odd})
    await write(etcd, {left.history(1): History(1, "r", "the job begins")})
    with serving(etcd, prefix) as server:
        status, text = server.get("/metrics")
    assert status == 200
    found = {
        (sample.name.removeprefix("elastic_etcd_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found == {
        ("etcd_up",): 1,
        ("hanging", "j"): 0,
        ("job_state", "j", "training"): 1,
        ("job_state", "left", "deserted"): 1,
        ("job_state", "over", '"odd"\\ \\x1b'): 1,
        ("generation", "j"): 2,
        ("world_size", "j"): 3,
        ("nodes", "j", "training"): 3,
        ("restart_budget_left", "j"): 3,
        ("outcome_timestamp_seconds", "over", '"odd"\\ \\x1b'): 1795341960,
    }
    of_agents = Metrics(CONFIG).text().decode()
    own = ("", "elastic_etcd_job_state", "elastic_etcd_etcd_up")
    for line in text.splitlines():
        name = line.split()[2] if line.startswith("# TYPE") else ""
        assert f"# TYPE {name} gauge" in of_agents or name in own


async def test_jobs_by_http(etcd: EtcdServer, prefix: str) -> None:
    keys, other = Keys(f"{prefix}/j"), Keys(f"{prefix}/over")
    garbage = {
        f"{prefix}/<b>/round": "x",
        f"{prefix}/j/round/x": "{",
        f"{prefix}/team/k/round": "x",
    }
    await write(etcd, running(keys, 3, ATTACK) | ended(other))
    await write(etcd, garbage)
    with serving(etcd, prefix, "--allow-host=training.example") as server:
        found = server.json("/api/jobs")["jobs"]
        assert [(job["job"], job["world_size"]) for job in found] == [("j", 3), ("over", 0)]
        state = server.json("/api/jobs/j")
        assert state["nodes"][0]["node"] == ATTACK
        assert state["nodes"][0]["pace"] == {"step": 1041, "per_second": 4.5, "doing": "step"}
        assert (
            state["events"][-1] == "2026-11-22T10:05:04Z generation 2: node7 is lost; 0.5 s later"
        )
        assert server.json("/api/jobs/over")["outcome"]["failure"]["message"] == TRACEBACK
        assert server.get("/api/jobs/none")[0] == server.get("/jobs/none")[0] == 404
        assert server.get("/api/jobs/a%20b/events")[0] == 404

        answer, connection = server.ask("/jobs/j", "HEAD")
        with closing(connection), answer:
            policy = answer.headers["Content-Security-Policy"]
        assert answer.status == 200
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert server.get("/api/jobs/j/events", "HEAD") == (200, "")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert server.get("/api/jobs/j", method)[0] == 405
        for host, status in (
            ("localhost:1", 200),
            ("training.example", 200),
            ("evil.example", 421),
            ("127.0.0.1.evil.example:8484", 421),
            ("[::1]:8484", 421),
        ):
            assert server.get("/api/jobs", Host=host)[0] == status, host
        assert server.get("/api/jobs", Sec_Fetch_Site="cross-site")[0] == 403
        assert server.get("/", Sec_Fetch_Site="cross-site")[0] == 200

        with server.stream("/api/events") as events:
            assert next(events)[0] == "etcd"
            assert len(next(events)[1]["jobs"]) == 2
            assert not etcd.ctl("get", keys.watched), "nobody looks at a job"
        with server.stream("/api/jobs/j/events") as events:
            names = {next(events)[0] for _ in range(2)}
            assert names == {"etcd", "job"}
            waits_for("it says that somebody looks", lambda: etcd.ctl("get", keys.watched))
            lost = History(3, "r", "node9 is lost")
            await write(etcd, {keys.history(3): lost})
            states = (state for name, state in events if name == "job")
            assert any("node9 is lost" in state["events"][-1] for state in states)
        waits_for("nobody looks any more", lambda: not etcd.ctl("get", keys.watched))

        with ExitStack() as streams:
            for _ in range(MOST_STREAMS):
                next(streams.enter_context(server.stream("/api/events")))
            assert server.get("/api/events", "HEAD")[0] == 503
            assert server.get("/api/jobs")[0] == 200
            idle_connections_keep_nobody_out(server, streams)
        waits_for("there is room again", lambda: server.get("/api/events", "HEAD")[0] == 200)


def idle_connections_keep_nobody_out(server: Server, stack: ExitStack) -> None:
    """O9: nor do they end a stream, or is more than 8 KiB of a head read."""
    host, _, port = server.host.rpartition(":")

    def connect() -> socket.socket:
        return stack.enter_context(socket.create_connection((host, int(port)), timeout=ANSWERS))

    for _ in range(400):
        connect().sendall(b"GET / HTTP/1.1\r\nX")
    assert server.get("/api/jobs")[0] == 200
    assert server.get("/api/events", "HEAD")[0] == 503, "the streams go on"
    long = connect()
    long.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 9000)
    assert long.recv(12) == b"HTTP/1.1 400"


async def test_one_job_only(etcd: EtcdServer, prefix: str) -> None:
    keys = Keys(f"{prefix}/j")
    await write(etcd, running(keys, 3) | ended(Keys(f"{prefix}/over")))
    with serving(etcd, prefix, "j") as server:
        server.host = server.host.removesuffix("/jobs/j")
        assert [job["job"] for job in server.json("/api/jobs")["jobs"]] == ["j"]
        assert server.get("/api/jobs/over")[0] == 404
        deserted = {key for key in running(keys, 3) if key.startswith(keys.members)}
        assert server.json("/api/jobs/j")["state"] == "training"
        for key in deserted:
            etcd.ctl("del", key)
        gone = lambda: server.json("/api/jobs/j")["state"] == "deserted"  # noqa: E731
        waits_for("nobody is there", gone)
    command = [sys.executable, "-m", "elastic_etcd", "serve", "--json", "--listen=0"]
    where = (f"--etcd={etcd.endpoint}", f"--prefix={prefix}")
    with subprocess.Popen([*command, *where], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        told = json.loads(process.stdout.readline())
        process.terminate()
    assert (told["shown"], told["url"][:17]) == (prefix, "http://127.0.0.1:")


async def test_etcd_is_away_and_comes_back(own_etcd: EtcdServer, prefix: str) -> None:
    own_etcd.start()
    keys = Keys(f"{prefix}/j")
    await write(own_etcd, running(keys, 1))
    with (
        serving(own_etcd, prefix, "--timeout=2") as server,
        server.stream("/api/jobs/j/events") as events,
    ):
        told = (data["away"] for name, data in events if name == "etcd")
        assert next(told) is None
        waits_for("its nodes are told", lambda: own_etcd.ctl("get", keys.watched))
        own_etcd.kill()
        away = next(told)
        assert away["since"].startswith("20")
        assert own_etcd.endpoint in away["why"]
        assert server.json("/api/jobs/j")["world_size"] == 1
        own_etcd.start()
        assert next(told) is None
        await write(own_etcd, {keys.history(3): History(3, "r", "node9 is lost")})
        waits_for("it goes on", lambda: len(server.json("/api/jobs/j")["history"]) == 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it(etcd: EtcdServer, prefix: str, number: signal.Signals) -> None:
    keys = Keys(f"{prefix}/j")
    await write(etcd, running(keys, 1))
    with serving(etcd, prefix) as server, server.stream("/api/jobs/j/events") as events:
        next(events)
        waits_for("its nodes are told", lambda: etcd.ctl("get", keys.watched))
        server.process.send_signal(number)
        assert server.process.wait(DEADLINE) == 128 + number
        assert all(events), "the stream has ended"
    assert not etcd.ctl("get", keys.watched), "its lease has ended"


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["--etcd=127.0.0.1:1", "--timeout=0.5", "--listen=0"], 5, "127.0.0.1:1"),
        (["--etcd=127.0.0.1:1", "--listen=:80"], 2, "--listen: :80: say 0.0.0.0:80"),
        (["a/b"], 2, "a job id is 1 to 128"),
        (["j", "--all"], 2, "j and --all: give one of both"),
    ],
)
def test_what_can_not_be_served(argv: list[str], code: int, told: str) -> None:
    command = [sys.executable, "-m", "elastic_etcd", "serve", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, told in done.stderr) == (code, True), done


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_the_extra_that_is_missing_is_told(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "from elastic_etcd.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--etcd=127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert "pip install 'elastic_etcd[web]'" in done.stderr


async def test_a_prefix_with_too_many_keys(etcd: EtcdServer, prefix: str) -> None:
    await write(etcd, {f"{prefix}/{n}": "x" for n in range(4)})
    async with Client(etcd.config) as client:
        whole = Get(f"{prefix}/", prefix=True)
        assert len((await client.list(whole, most=4)).snapshot.kvs) == 4
        with pytest.raises(EtcdRefused, match="more than 3 keys"):
            await client.list(whole, most=3)
        changed = asyncio.Event()
        async with Mirror(client, (whole,), changed.set, most=4) as mirror:
            await changed.wait()
            await write(etcd, {f"{prefix}/one_more": "x"})
            await asyncio.wait({mirror.failed}, timeout=DEADLINE)
            assert "more than 4 keys" in str(mirror.failed.exception())


async def test_a_mistake_in_telling_the_nodes_ends_it(etcd: EtcdServer, prefix: str) -> None:
    class Mistaken(Client):
        async def txn(self, *_: object) -> NoReturn:
            raise KeyError("a mistake")

    await write(etcd, running(Keys(f"{prefix}/j"), 1))
    async with Mistaken(etcd.config) as client, Jobs(client, prefix, 60) as jobs:
        async with jobs.viewed("j"):
            await asyncio.wait({jobs.keeper}, timeout=DEADLINE)
            assert jobs.keeper.done()
        async with jobs.viewed("j"):
            assert jobs.over.is_set(), "as for a page that is opened while the server ends"
        with pytest.raises(KeyError, match="a mistake"):
            jobs.keeper.result()


@pytest.mark.nightly(part="chromium")
async def test_in_a_browser(etcd: EtcdServer, prefix: str, tmp_path: Path) -> None:
    keys, other = Keys(f"{prefix}/j"), Keys(f"{prefix}/over")
    await write(etcd, running(keys, 64, ATTACK))
    await write(etcd, ended(other))
    with ExitStack() as scope:
        try:
            page = scope.enter_context(chromium(tmp_path))
        except NotToBeHad as reason:
            pytest.skip(str(reason))
        with serving(etcd, prefix) as server:
            page.open(server.url)
            page.shows("document.querySelectorAll('tbody tr').length === 2")
            began = time.monotonic()
            page.open(f"{server.url}jobs/j")
            page.shows("document.body && document.body.innerText.includes('node64')")
            print(f"64 nodes are shown after {time.monotonic() - began:.2f} s")
            page.evaluate("window.loaded = 1")
            began = time.monotonic()
            await write(etcd, {keys.history(3): History(3, "r", "node9 is lost")})
            page.shows("document.body.innerText.includes('generation 3: node9 is lost')")
            print(f"an event is shown after {time.monotonic() - began:.2f} s")
            assert page.evaluate("window.loaded") == 1, "without loading it again"
            shown = page.evaluate("document.querySelector('td.name').textContent")
            assert shown == r"<img src=x onerror=alert(1)>\u{202e}\u{1b}[31m"
            page.open(f"{server.url}jobs/over", width=390, dark=True)
            page.shows("document.querySelector('pre') !== null")
            assert page.evaluate("document.querySelector('pre').textContent") == TRACEBACK
            assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            page.open(server.url, width=390)
            page.shows("document.querySelectorAll('tbody tr').length === 2")
            left = "Math.round(document.querySelector('td.{}').getClientRects()[0].left)"
            padding = "getComputedStyle(document.querySelector('td.rest')).paddingLeft"
            assert page.evaluate(left.format("rest")) == page.evaluate(left.format("name"))
            assert page.evaluate(padding) == "0px", "lines begin where their job's name does"
            assert page.complaints() == []
            asked = set(page.requests())
            assert len(asked) > 5
            assert {url for url in asked if not url.startswith(server.url)} <= {"about:blank"}
