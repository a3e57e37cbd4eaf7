"""`--all`: what the commands of `elastic-etcd` say of all jobs under a prefix, and do to them."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from datetime import datetime

import pytest

from elastic_etcd.__main__ import main
from elastic_etcd.core.schema import Drain, Keys, Limits, Member, Requests, Spec, decode, encode
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.etcd.client import Client
from tests.support.etcd import EtcdServer
from tests.support.jobs import KEYS, OUTCOME, OVER, RUNNING

DRAINED = Requests((Drain("n1"),))
LEFT = {KEYS.member(0xA), KEYS.member(0xB), KEYS.wanted}
SHOUTED = r"<script>\x1b[2J&" + "\"'"


class Shell:
    """Four jobs in etcd, without agents, and a person at a shell."""

    def __init__(self, etcd: EtcdServer, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.etcd, self.prefix, self._capsys = etcd, prefix, capsys
        self.where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")

    def put(self, job: str, values: Mapping[str, str]) -> None:
        moved = {key.replace(KEYS.root, f"{self.prefix}/{job}"): v for key, v in values.items()}

        async def write() -> None:
            async with Client(self.etcd.config) as client:
                await client.txn(
                    Txn((), tuple(Put(key, value) for key, value in moved.items())), 60
                )

        asyncio.run(write())

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        code = main([*argv, *self.where])
        told = self._capsys.readouterr()
        return code, told.out, told.err

    def ok(self, *argv: str) -> str:
        code, out, err = self(*argv)
        assert code == 0, err
        return out

    def wanted(self, job: str) -> Requests | None:
        key = Keys(f"{self.prefix}/{job}").wanted
        text = self.etcd.ctl("get", "--print-value-only", key)
        return decode(Requests, text) if text.strip() else None


@pytest.fixture
def empty(etcd: EtcdServer, prefix: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    yield Shell(etcd, prefix, capsys)
    etcd.ctl("del", "--prefix", prefix)


@pytest.fixture
def shell(empty: Shell) -> Shell:
    """`a` and `b` train, `c` is over, all nodes of `d` have gone."""
    for job in ("a", "b"):
        empty.put(job, {key: value for key, value in RUNNING.items() if key != KEYS.wanted})
    empty.put("c", OVER)
    empty.put("d", {key: value for key, value in RUNNING.items() if key not in LEFT})
    empty.etcd.ctl("put", f"{empty.prefix}/what/is/this", "{")
    return empty


def objects(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_status(shell: Shell) -> None:
    header, *rows = shell.ok("status", "--all").splitlines()
    assert header.split() == ["job", "state", "nodes", "ranks", "restarts", "because"]
    assert [row.split()[:2] for row in rows] == [
        ["a", "training"],
        ["b", "training"],
        ["d", "deserted"],
        ["c", "succeeded"],
    ]
    assert "2 training " in rows[0]
    states = objects(shell.ok("status", "--all", "--json"))
    assert [(s["job"], s["state"], s["world_size"]) for s in states] == [
        ("a", "training", 2),
        ("b", "training", 2),
        ("d", "deserted", 0),
        ("c", "succeeded", 0),
    ]
    assert states[0] == json.loads(shell.ok("status", "a", "--json"))


def test_top(shell: Shell) -> None:
    rows = shell.ok("top", "--all").splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["a", "b", "d", "c"], "those that go on come first"
    found = objects(shell.ok("top", "--all", "--json"))
    assert [(f["job"], f["nodes"]) for f in found[:2]] == [
        ("a", {"training": 2}),
        ("b", {"training": 2}),
    ]
    assert not shell.etcd.ctl("get", "--prefix", f"{shell.prefix}/a/watched"), "nobody is disturbed"


def test_events_by_their_times(shell: Shell) -> None:
    lines = shell.ok("events", "--all").splitlines()
    times = [line[:25] for line in lines if line.startswith("20")]  # nobody knows a hang's
    assert times == sorted(times)
    first = [line.split()[1:3] for line in lines[:4]]
    assert first == [[job, "RENDEZVOUS"] for job in ("a", "b", "c", "d")]
    assert SHOUTED in "".join(lines)
    told = objects(shell.ok("events", "--all", "--json"))
    assert len(told) == len(lines)
    of_c = [event for event in told if event["metadata"]["run_id"] == "c"]  # type: ignore[index]
    assert of_c == objects(shell.ok("events", "c", "--json"))


def test_events_are_followed(shell: Shell) -> None:
    command = [sys.executable, "-m", "elastic_etcd", "events", "--all", "--follow", *shell.where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "SUCCEEDED" in line)
        shell.put("new", {KEYS.member(7): encode(Member(7, "n7", 1, run="r"))})
        assert next(line for line in process.stdout if "n7 is there" in line).split()[1] == "new"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_report(shell: Shell) -> None:
    shell.put("none", {KEYS.wanted: encode(DRAINED)})
    code, out, err = shell("report", "--all")
    assert code == 0
    said = [line for line in out.splitlines() if line.startswith(("job ", "  state "))]
    states = ("a", "training"), ("b", "training"), ("c", "succeeded"), ("d", "deserted")
    assert said == [line for job, state in states for line in (f"job {job}", f"  state {state}")]
    assert err == "note: job none has had no world yet\n"
    assert [found["job"] for found in objects(shell.ok("report", "--all", "--json"))] == [*"abcd"]


@pytest.mark.parametrize("command", ["status", "top", "events", "report", "stop"])
def test_no_job_at_all(empty: Shell, command: str) -> None:
    code, out, err = empty(command, "--all")
    assert (code, out.strip()) == (
        0,
        "job  state  nodes  ranks  restarts  because" * (command == "top"),
    )
    assert ("has no job under" in err) == (command != "top")


def test_a_node_is_drained_from_all_jobs_and_comes_back(shell: Shell) -> None:
    shell.put("e", {**RUNNING, KEYS.member(0xA): encode(Member(0xA, "n3", 1, run="r"))})
    code, out, err = shell("drain", "--all", "n1", "--deadline", "7")
    assert code == 0
    assert err.startswith(f"node n1 is to leave 2 jobs under {shell.prefix}: a, b\n")
    assert sorted(out.splitlines()) == [
        f"node n1 of job {job} is to leave within 7 s" for job in ("a", "b")
    ]
    for job in ("a", "b"):
        there = shell.wanted(job)
        assert there
        assert [d.node for d in there.drains] == ["n1"]
    again = objects(shell.ok("drain", "n1", "--all", "--json"))
    assert {(found["job"], found["changed"]) for found in again} == {("a", False), ("b", False)}
    code, _, err = shell("undrain", "--all", "n1")
    assert (code, err.count("still leaving")) == (1, 2), "in none of both"
    shell.etcd.ctl("del", Keys(f"{shell.prefix}/a").member(0xA))
    code, out, err = shell("undrain", "--all", "n1")
    assert (code, out) == (1, "node n1 of job a may come back\n")
    assert "error: job b: node n1 of job b is still leaving" in err
    assert shell.wanted("a") is None


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_a_node_that_no_job_knows(shell: Shell, command: str) -> None:
    code, out, err = shell(command, "--all", "zebra")
    assert (code, out) == (1, "")
    assert "zebra" in err
    assert f"no job under {shell.prefix}" in err


def test_a_machine_leaves_all_jobs(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_NAME", "n1")
    assert shell.ok("drain", "--all", "--self").count("node n1 of job") == 2


def test_o7_all_jobs_that_are_long_over_are_forgotten(shell: Shell) -> None:
    age = time.time() - datetime.fromisoformat(OUTCOME.at).timestamp()
    code, out, err = shell("forget", "--all", "--yes", "--older-than", str(age + 3600))
    assert (code, out) == (0, "")
    assert f"note: no job under {shell.prefix} was over " in err
    code, out, err = shell("forget", "--all", "--older-than", "1")
    assert (code, "asks first" in err) == (2, True)
    code, out, err = shell("forget", "--all", "--yes", "--older-than", "1")
    assert (code, out) == (0, "job c is forgotten\n")
    assert err == f"to forget: 1 job under {shell.prefix}: c\n"
    assert [s["job"] for s in objects(shell.ok("status", "--all", "--json"))] == ["a", "b", "d"]


def test_all_jobs_are_stopped(shell: Shell) -> None:
    code, out, err = shell("stop", "--all")
    assert (code, out) == (2, "")
    assert "asks first, and here is no terminal: give --yes" in err
    assert shell.wanted("a") is None
    code, out, err = shell("stop", "--all", "--yes", "--save")
    assert code == 0
    assert err == f"to stop: 2 jobs under {shell.prefix}: a, b\n"
    assert sorted(out.splitlines()) == [f"job {job} is to stop" for job in ("a", "b")]
    for job in ("a", "b"):
        there = shell.wanted(job)
        assert there
        assert there.stop
        assert there.stop.save


def test_the_exit_code_of_all_jobs_is_the_highest_also_where_nobody_reads(shell: Shell) -> None:
    shell.put("b", {KEYS.spec: encode(Spec("r", Limits(2, 2)))})
    argv = [sys.executable, "-m", "elastic_etcd", "drain", "n1", "--all", *shell.where]
    piped = ["bash", "-o", "pipefail", "-c", '"$@" | true', "bash", *argv]
    done = subprocess.run(piped, stderr=subprocess.PIPE, text=True, check=False)
    assert "error: job b: refused: " in done.stderr
    assert done.returncode == 1, done.stderr
    assert shell.wanted("a")


@pytest.mark.parametrize(
    ("pressed", "code", "stops"), [(b"n\n", 1, False), (b"\x03", 130, False), (b"y\n", 0, True)]
)
def test_who_stops_all_jobs_is_asked(shell: Shell, pressed: bytes, code: int, stops: bool) -> None:
    command = [sys.executable, "-m", "elastic_etcd", "stop", "--all", *shell.where]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_own_terminal,  # noqa: PLW1509 - so that Ctrl-C reaches it
    ) as process:
        os.close(theirs)
        said = b""
        while b"Go on? [y/N] " not in said:
            said += os.read(ours, 1 << 16)
        assert b"2 jobs" in said
        while process.poll() is None:  # Python misses a Ctrl-C that comes just before it reads
            os.write(ours, pressed)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == code
    os.close(ours)
    there = shell.wanted("a")
    assert bool(there and there.stop) == stops


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
