"""`elastic-etcd drain`, `undrain` and `stop`: what they write, and what they refuse."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.__main__ import main
from elastic_etcd.core.schema import (
    Drain,
    Halt,
    History,
    Keys,
    Ledger,
    Limits,
    Member,
    Outcome,
    Requests,
    Scale,
    Spec,
    decode,
    encode,
)
from elastic_etcd.etcd.client import Client, TxnResult
from tests.support.etcd import EtcdServer
from tests.support.proxy import Proxy, proxy_aside

A, B, C = (Member(lease, name, 1, run="r") for lease, name in ((10, "a"), (11, "b"), (12, "c")))


class Shell:
    """A job of three in etcd, without agents, and a person at a shell."""

    def __init__(self, etcd: EtcdServer, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.etcd, self.prefix, self._capsys = etcd, prefix, capsys
        self.endpoint = etcd.endpoint
        self.keys = Keys(f"{prefix}/j")
        self.put(self.keys.spec, encode(Spec("r", Limits(2, 3, leave_deadline=20.0))))
        self.put(self.keys.ledger, encode(Ledger(1, 1, 3)))
        for member in (A, B, C):
            self.put(self.keys.member(member.lease), encode(member))

    def put(self, key: str, value: str) -> None:
        self.etcd.ctl("put", key, value)

    def __call__(self, *argv: str) -> tuple[int, str]:
        command, job, *rest = argv
        where = ("--etcd", self.endpoint, "--prefix", self.prefix, "--timeout", "60")
        code = main([command, job, *rest, *where])
        told = self._capsys.readouterr()
        return code, told.out + told.err

    def ok(self, *argv: str) -> str:
        code, told = self(*argv)
        assert code == 0, told
        return told

    @property
    def wanted(self) -> Requests | None:
        """As it is in etcd, without who asked for it."""
        text = self.etcd.ctl("get", "--print-value-only", self.keys.wanted)
        if not text.strip():
            return None
        there = decode(Requests, text)
        halt = replace(there.stop, by="", at="") if there.stop else None
        scale = replace(there.scale, by="", at="") if there.scale else None
        return Requests(tuple(replace(d, by="", at="") for d in there.drains), halt, scale)


@pytest.fixture
def shell(etcd: EtcdServer, prefix: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    yield Shell(etcd, prefix, capsys)
    etcd.ctl("del", "--prefix", prefix)


def test_agents_of_an_older_format_are_not_asked(shell: Shell) -> None:
    """They could not read it, and would do nothing."""
    spec = json.loads(encode(Spec("r", Limits(2, 3)))) | {"v": 1, "min_version": 1}
    shell.put(shell.keys.spec, json.dumps(spec))
    code, told = shell("drain", "j", "b")
    assert (code, shell.wanted) == (1, None), told
    assert "is run by an older elastic_etcd (format 1)" in told


def test_drains_come_and_go(shell: Shell) -> None:
    assert shell.ok("drain", "j", "b") == "node b of job j is to leave within 20 s\n"
    told = json.loads(shell.ok("drain", "j", "c", "--deadline", "120", "--json", "--force"))
    assert (told["node"], told["changed"], told["deadline"]) == ("c", True, 120.0)
    assert shell.wanted == Requests((Drain("b"), Drain("c", 120.0)))
    assert "it was drained before" in shell.ok("drain", "j", "b")
    assert "still leaving" in shell("undrain", "j", "b")[1]
    for member in (B, C):
        shell.etcd.ctl("del", shell.keys.member(member.lease))
    shell.ok("undrain", "j", "b")
    assert shell.wanted == Requests((Drain("c", 120.0),))
    shell.ok("undrain", "j", "c")
    assert shell.wanted is None, "nothing is left behind"


def test_a_second_drain_tells_the_deadline_that_stands(shell: Shell) -> None:
    shell.ok("drain", "j", "b", "--deadline", "600")
    told = json.loads(shell.ok("drain", "j", "b", "--json"))
    assert (told["changed"], told["deadline"]) == (False, 600.0)
    assert "within 600 s; it was drained before" in told["told"]


def test_a_second_drain_takes_no_time_from_a_machine_that_drains_itself(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NODE_NAME", "b")
    shell.ok("drain", "j", "--self", "--deadline", "600")
    own = Drain("b", 600.0, "000000000000000b")
    assert "within 600 s; it was drained before" in shell.ok("drain", "j", "--self")
    assert shell.wanted == Requests((own,)), "others wait for as long as its workers have"
    assert "within 600 s" in shell.ok("drain", "j", "b")
    assert shell.wanted == Requests((own, Drain("b")))


def test_flags_stand_where_one_likes(shell: Shell) -> None:
    assert "within 5 s" in shell.ok("drain", "j", "--deadline", "5", "b")
    assert "2:8" in shell.ok("scale", "j", "--nodes-multiple-of", "1", "2:8")


def test_o6_what_would_stop_training_is_refused(shell: Shell) -> None:
    shell.ok("drain", "j", "b")
    code, told = shell("drain", "j", "c")
    assert (code, told.splitlines()) == (
        1,
        [
            (
                "error: refused: 1 node would be left, at least 2 are needed: training would stop "
                "until more come, or end after 600 s"
            ),
            "Give --force if that is meant.",
        ],
    )
    assert shell.wanted == Requests((Drain("b"),))
    assert shell("drain", "j", "b")[0] == 0, "which it is"
    code, told = shell("scale", "j", "3:8")
    assert (code, "2 nodes are there, at least 3 are needed" in told) == (1, True)
    assert shell.wanted == Requests((Drain("b"),))


def test_o7_a_job_that_is_over_is_forgotten(shell: Shell) -> None:
    code, told = shell("forget", "j", "--force")
    assert (code, told) == (1, "error: job j has nodes: a, b, c. Stop it, and wait for its end\n")
    for member in (A, B, C):
        shell.etcd.ctl("del", shell.keys.member(member.lease))
    shell.put(shell.keys.history(1), encode(History(1)))
    code, told = shell("forget", "j")
    assert (code, "is deserted, not over" in told) == (1, True)
    code, told = shell("stop", "j")
    assert (code, "is deserted, nobody is there to stop it: " in told) == (1, True)
    assert shell.wanted is None
    outcome = Outcome("succeeded", "all are done", "r", 1, 0, at="2026-11-22T10:00:00Z")
    shell.put(shell.keys.outcome, encode(outcome))
    other = shell.keys.root + "2/outcome"
    shell.put(other, encode(outcome))
    assert shell.ok("forget", "j") == "job j is forgotten\n"
    assert not shell.etcd.ctl("get", "--prefix", shell.keys.root + "/")
    assert shell.etcd.ctl("get", other), "another job is left alone"
    shell.put(shell.keys.history(1), encode(History(1)))
    assert shell.ok("forget", "j", "--force") == "job j is forgotten\n"


def test_a_machine_drains_the_agent_that_is_there(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "c")
    monkeypatch.setenv("PET_NODE_NAME", "b")
    shell.put(shell.keys.spec, encode(Spec("r", Limits(3, 3, leave_deadline=20.0))))
    shell.ok("drain", "j", "--self")  # it goes anyway, whatever is left
    assert shell.wanted == Requests((Drain("b", lease="000000000000000b"),))
    shell.etcd.ctl("del", shell.keys.member(B.lease))
    assert shell("drain", "j", "--self") == (
        1,
        "error: this machine's node, b, is not in job j; there are a, c\n",
    )
    shell.ok("stop", "j", "--save")
    assert shell.wanted == Requests((), Halt("r", save=True)), (
        "who has left is not drained any more"
    )
    assert "it was to stop before" in shell.ok("stop", "j")


def test_an_order_to_stop_does_not_outlive_its_run(shell: Shell) -> None:
    shell.ok("stop", "j")
    shell.put(shell.keys.spec, encode(Spec("another", Limits(2, 3))))
    shell.put(shell.keys.member(A.lease), encode(replace(A, run="another")))
    shell.ok("drain", "j", "a", "--force")
    assert shell.wanted == Requests((Drain("a"),))


def test_a_job_is_scaled_and_back(shell: Shell) -> None:
    told = "job j is to train on 4:8 nodes\n"
    assert shell.ok("scale", "j", "4:8", "--force") == told
    scale = Scale(4, 8, run="r", instead_of="2:3")
    assert shell.wanted == Requests(scale=scale)
    assert "it was scaled so before" in shell.ok("scale", "j", "4:8")
    shell.ok("scale", "j", "4:8", "--nodes-multiple-of", "4", "--force")
    assert shell.wanted == Requests(scale=replace(scale, multiple_of=4))
    shell.ok("scale", "j", "2:3")
    assert shell.wanted is None


def test_a_scale_is_of_what_the_run_was_begun_with(shell: Shell) -> None:
    shell.ok("scale", "j", "3:8")
    assert "2 nodes would be left, at least 3 are" in shell("drain", "j", "a")[1]
    shell.ok("drain", "j", "a", "--force")
    shell.put(shell.keys.spec, encode(Spec("r", Limits(2, 4))))  # all had left, and came with that
    assert "1 node would be left, at least 2 are" in shell("drain", "j", "b")[1]


def test_a_job_for_one_node_is_not_scaled(shell: Shell) -> None:
    shell.put(shell.keys.spec, encode(Spec("r", Limits(1, 1))))
    assert shell("scale", "j", "1:2") == (
        1,
        "error: job j can't be scaled: its agent meets no others (--nnodes 1)\n",
    )


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (("drain", "k", "a"), 1, " has no job at "),
        (("drain", "j", "bb"), 1, "job j has no node bb (did you mean b?)"),
        (("drain", "j", "zebra"), 1, "job j has no node zebra; there are a, b, c"),
        (("drain", "j"), 2, "which node? Give its name, or --self"),
        (("drain", "j", "a", "--self"), 2, "which node?"),
        (("drain", "j", "a", "--deadline", "soon"), 2, "soon is not a number of seconds"),
        (("undrain", "j", "a"), 1, "node a of job j is not drained"),
        (("stop", "a/b"), 2, "becomes a part of a key in etcd\n"),
        (("stop", "acks"), 2, "part of a key in etcd, where acks means something else\n"),
        (("stop", "jj"), 1, " has no job at PREFIX/jj (did you mean j?); "),
        (("scale", "j"), 2, "no nodes given"),
        (("scale", "j", "2:1025"), 1, "--nnodes 2:3, which can be scaled to 1024 nodes"),
        (("scale", "j", "3:2"), 2, "3:2: MIN is above MAX; did you mean 2:3?"),
        (("scale", "j", "2:3", "--nodes-multiple-of", "4"), 2, "no multiple of 4 is from 2 to 3"),
    ],
)
def test_what_is_refused(shell: Shell, argv: tuple[str, ...], code: int, told: str) -> None:
    returned, said = shell(*argv)
    assert (returned, told.replace("PREFIX", shell.prefix) in said) == (code, True), said
    assert said.startswith("error: ")
    assert shell.wanted is None


@pytest.mark.parametrize(
    "command", [("drain", "j", "a"), ("stop", "j"), ("scale", "j", "2:8")], ids=lambda c: c[0]
)
def test_a_job_that_is_over(shell: Shell, command: tuple[str, ...]) -> None:
    outcome = Outcome("succeeded", "all are done", "r", 1, 0, at="2026-11-22T10:00:00Z")
    shell.put(shell.keys.outcome, encode(outcome))
    assert shell(*command) == (1, "error: job j is over: succeeded at 2026-11-22T10:00:00Z\n")


def test_who_ends_a_wait_is_told_what_stands(shell: Shell) -> None:
    where = ("--etcd", shell.etcd.endpoint, "--prefix", shell.prefix, "--timeout", "60")
    command = [sys.executable, "-m", "elastic_etcd", "drain", "j", "a", "--wait", *where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while shell.wanted is None:
            assert time.monotonic() < deadline
        time.sleep(0.5)  # it may be about to wait
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert (process.returncode, told) == (
        130,
        "note: a is still there; what was asked for stands\n",
    )


def test_a_job_that_nobody_ends_is_not_said_to_be_stopped(shell: Shell) -> None:
    """All of its agents are killed meanwhile."""
    where = ("--etcd", shell.etcd.endpoint, "--prefix", shell.prefix, "--timeout", "60")
    command = [sys.executable, "-m", "elastic_etcd", "stop", "j", "--wait", *where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while shell.wanted is None:
            assert time.monotonic() < deadline
        for member in (A, B, C):
            shell.etcd.ctl("del", shell.keys.member(member.lease))
        told = process.communicate(timeout=60)[1]
    assert (process.returncode, "no node is there, and nobody has said" in told) == (4, True)


def test_who_waits_in_vain_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNKILLABLE", "STOP_PATIENCE"):
        monkeypatch.setattr(f"elastic_etcd.cli.write_requests.{name}", 0.5)
    code, told = shell("drain", "j", "a", "--wait", "--deadline", "0")
    assert (code, told) == (4, "error: after 1 s a is still there; what was asked for stands\n")
    assert shell.wanted == Requests((Drain("a", 0.0),))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("drain", "j", "c"), "node c of job j is to leave within 20 s\n"),
        (("undrain", "j", "gone"), "node gone of job j may come back\n"),
        (("scale", "j", "2:2"), "job j is to train on 2:2 nodes\n"),
        (("stop", "j"), "job j is to stop\n"),
        (("forget", "j"), "job j is forgotten\n"),
    ],
)
def test_what_was_written_though_the_answer_was_lost_is_told_as_written(
    shell: Shell, command: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.put(shell.keys.wanted, encode(Requests((Drain("gone"),))))
    if command[0] == "forget":
        for member in (A, B, C):
            shell.etcd.ctl("del", shell.keys.member(member.lease))
        shell.put(shell.keys.outcome, encode(Outcome("succeeded", "all are done", "r", 1, 0)))
    with proxy_aside(shell.etcd.endpoint) as (shell.endpoint, proxy):
        answered, lost = Client.txn, [0]

        async def txn(client: Client, *args: Any) -> TxnResult:
            while lost:
                proxy(Proxy.lose_answers)
                lost.pop()
            return await answered(client, *args)

        monkeypatch.setattr(Client, "txn", txn)
        assert shell(*command) == (0, told)
