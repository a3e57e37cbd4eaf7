"""`elastic-etcd top`: on a real terminal of 80 columns and 24 lines, and without one."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_etcd.core.schema import (
    Drain,
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
    Requests,
    Round,
    Spec,
    Watched,
    decode,
    encode,
)
from tests.support.etcd import EtcdServer

NAMES = [f"node{n}" for n in range(1, 31)]
OVER = Outcome("failed", "no restarts left", "r", 4, 3, at="2026-11-22T10:06:00+00:00")
HOSTILE = "\x1b[31mnode2[bold]"
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def keys(etcd: EtcdServer, prefix: str) -> Iterator[Keys]:
    """A job of thirty nodes, without agents; two of them say how fast they are."""
    keys, leases = Keys(f"{prefix}/j"), range(100, 130)
    world = [Participant(100 + n, name, 1, n, n) for n, name in enumerate(NAMES)]
    now = Round(2, Phase.FINAL, 100, "node7 is lost", "r", "node1", 30, 30, Master("h", 1))
    began = "2026-11-22T10:00:00.000+00:00", "2026-11-22T10:05:03.500+00:00"
    values = {
        keys.spec: Spec("r", Limits(2, 64)),
        keys.ledger: Ledger(2, 2, 30),
        keys.round: now,
        keys.page(0): Page(2, tuple(world)),
        keys.history(1): History(1, "r", "the job begins", began[0], ended_at=began[1]),
        keys.history(2): History(2, "r", "node7 is lost", began[1].replace("03.5", "04.0")),
        keys.pace(100): Pace(100, 2, 1041, 4.5, RankDoing.STEP),
        keys.pace(101): Pace(101, 2, 1041, 4.25, RankDoing.COMMIT),
        keys.pace(102): Pace(102, 1, 7, 4.25, RankDoing.STEP),  # of an older world
    }
    for key, value in values.items():
        etcd.ctl("put", key, encode(value))
    for lease, name in zip(leases, NAMES, strict=True):
        etcd.ctl("put", keys.member(lease), encode(Member(lease, name, 1, run="r")))
    yield keys
    etcd.ctl("del", "--prefix", prefix)


def command(etcd: EtcdServer, keys: Keys, *flags: str) -> list[str]:
    where = (f"--etcd={etcd.endpoint}", f"--prefix={keys.root.removesuffix('/j')}", "--timeout=60")
    return [sys.executable, "-m", "elastic_etcd", "top", "j", *where, *flags]


class Screen:
    """A terminal with `top` in it, and what it has printed."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.text = ""
        self.terminal = terminal
        self.before = termios.tcgetattr(terminal)

    def shows(self, *texts: str) -> None:
        deadline = time.monotonic() + 90
        while not all(text in SEQUENCE.sub("", self.text) for text in texts):
            assert time.monotonic() < deadline, self.text[-4000:]
            self.text += os.read(self.terminal, 1 << 16).decode()

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self.terminal, keys.encode())


@contextmanager
def terminal(argv: list[str]) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    env = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        try:
            yield Screen(ours, process)
        finally:
            process.kill()
            os.close(ours)


def test_a_job_on_a_terminal(etcd: EtcdServer, keys: Keys) -> None:
    with terminal(command(etcd, keys)) as top:
        top.shows(
            "job j: training since 2026-11-22T10:05:04Z, generation 2",
            "node1 ",
            "4.50",
            "commit",
            "of 30 nodes",
        )
        top.shows("2026-11-22T10:05:04Z generation 2: node7 is lost", "q: quit")
        lines = SEQUENCE.sub("\n", top.text).replace("\r", "\n").split("\n")
        assert max(map(len, lines)) <= 80
        assert "node30" not in top.text
        deadline = time.monotonic() + 90
        while not (text := etcd.ctl("get", "--print-value-only", keys.watched)).strip():
            assert time.monotonic() < deadline
        watched = decode(Watched, text)
        assert watched.seconds == 2.0
        top.press("j\x1b[Bjkd")  # down three times, up once
        top.shows("drain node3? y: yes")
        top.press("n")
        top.shows("nothing is done")
        top.press("dy")
        top.shows("node node3 of job j is to leave within 30 s", "node3 is drained by")
        there = decode(Requests, etcd.ctl("get", "--print-value-only", keys.wanted))
        assert [(d.node, d.lease) for d in there.drains] == [("node3", "")]
        top.press("u")
        top.shows("undrain node3? y: yes")
        top.press("nq")
        assert top.process.wait(90) == 0
    assert not etcd.ctl("get", keys.watched), "its lease has ended"


def test_a_terminal_is_left_as_it_was(etcd: EtcdServer, keys: Keys) -> None:
    with terminal(command(etcd, keys)) as top:
        top.shows("q: quit")
        top.text = ""
        top.process.send_signal(signal.SIGTSTP)
        top.process.terminate()
        assert top.process.wait(90) == 143
        top.text += os.read(top.terminal, 1 << 16).decode()
        assert "\x1b[?1049l" in top.text
        assert termios.tcgetattr(top.terminal) == top.before


def printed(etcd: EtcdServer, keys: Keys, *flags: str) -> str:
    argv = command(etcd, keys, *flags)
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_how_fast_nodes_are(etcd: EtcdServer, keys: Keys) -> None:
    nodes = {n["node"]: n for n in json.loads(printed(etcd, keys, "--json"))["nodes"]}
    assert nodes["node1"]["pace"] == {"step": 1041, "per_second": 4.5, "doing": "step"}
    with terminal(command(etcd, keys)) as top:
        top.shows("node1 ")
        top.press("\x1b[A" + 40 * "j")
        top.shows("node30")


def test_a_mistake_of_its_own_is_shown(etcd: EtcdServer, keys: Keys) -> None:
    """Also one of a task beside the screen."""
    breaks = """
import sys
from elastic_etcd import __main__
from elastic_etcd.cli.live import jobs
async def keep(*_):
    raise KeyError("a mistake")
jobs.Viewer.view = keep
sys.exit(__main__.main(sys.argv[1:]))
"""
    argv = command(etcd, keys)
    with terminal([argv[0], "-c", breaks, *argv[3:]]) as top:
        top.shows("KeyError: 'a mistake'")
        assert top.process.wait(90) == 1


def test_all_jobs_on_a_terminal(etcd: EtcdServer, keys: Keys) -> None:
    where = (f"--etcd={etcd.endpoint}", f"--prefix={keys.root.removesuffix('/j')}", "--timeout=60")
    argv = [sys.executable, "-m", "elastic_etcd", "top", "--all", *where]
    with terminal(argv) as top:
        top.shows("1 job under", "training", "30 training", "q: quit")
        etcd.ctl("put", f"{keys.root.removesuffix('/j')}/k/outcome", encode(OVER))
        top.shows("2 jobs under", "failed")
        lines = SEQUENCE.sub("\n", top.text).replace("\r", "\n").split("\n")
        assert max(map(len, lines)) <= 80
        top.press("q")
        assert top.process.wait(90) == 0


def test_a_long_reason_leaves_room_for_the_rest(etcd: EtcdServer, keys: Keys) -> None:
    name = "a-node-whose-name-is-as-long-as-some-clouds-have-them.example.org"
    etcd.ctl("put", keys.member(131), encode(Member(131, name, 1, run="r")))
    etcd.ctl("put", keys.spec, encode(Spec("r", Limits(8, 64, multiple_of=8))))
    with terminal(command(etcd, keys)) as top:
        top.shows("node1 ")
        top.press(40 * "j")
        top.shows("a-node-w", "spare")
        shown = SEQUENCE.sub("", top.text)
        for head in ("node", "state", "ranks", "step", "steps/s", "doing", "why"):
            assert re.search(rf"\b{head}\b", shown), head


def test_a_job_that_is_over(etcd: EtcdServer, keys: Keys) -> None:
    etcd.ctl("del", "--prefix", keys.root)
    etcd.ctl("put", keys.outcome, encode(OVER))
    lines = printed(etcd, keys).splitlines()
    assert "  no node is there" in map(str.rstrip, lines)
    assert not any("steps/s" in line for line in lines)


def test_a_job_without_a_terminal(etcd: EtcdServer, keys: Keys) -> None:
    etcd.ctl("put", keys.wanted, encode(Requests((Drain(HOSTILE),))))
    shown = subprocess.run(command(etcd, keys), capture_output=True, text=True, check=True).stdout
    assert "\\x1b[31mnode2[bold] is drained" in shown
    assert "\x1b" not in shown
    assert all(f" {name} " in shown for name in NAMES)
    assert re.search(r"node2 +training +1 +1041 +4\.25 +commit", shown)
    assert re.search(r"node3 +training +2 +- +- +-", shown)
    assert "q: quit" not in shown
    for argv, code, told in (
        (["--etcd=127.0.0.1:1", "--timeout=0.5"], 5, "127.0.0.1:1"),
        (["--prefix=/nobody"], 1, " has no job at /nobody/j"),
        (["--onse"], 2, "--once"),
    ):
        failed = subprocess.run(
            command(etcd, keys, *argv), capture_output=True, text=True, check=False
        )
        assert (failed.returncode, told in failed.stderr) == (code, True), failed
