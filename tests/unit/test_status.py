"""`elastic-etcd status` from the keys of a job to what its user reads."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from elastic_etcd.__main__ import main
from elastic_etcd.cli import status
from elastic_etcd.core.schema import (
    History,
    Keys,
    Ledger,
    Master,
    Member,
    Outcome,
    Participant,
    Phase,
    Round,
    Spec,
    encode,
)
from elastic_etcd.core.txn import KeyValue, Put, Snapshot, Txn
from elastic_etcd.core.view import Everything, View, view_of
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.embedded import EmbeddedEtcd

KEYS = Keys("/elastic_etcd/j")
FINAL = Round(
    generation=4,
    phase=Phase.FINAL,
    coordinator=0xA,
    reason="node2 left",
    run="r",
    participants=(Participant(0xA, "node1", 2), Participant(0xB, "node3", 1)),
    master=Master("10.0.0.1", 4242),
    restarts=1,
)
RUNNING = {
    KEYS.spec: encode(Spec("r", 1, 2, "node1")),
    KEYS.round: encode(FINAL),
    KEYS.ledger: encode(Ledger(4, 4, (0xA, 0xB), ("node1", "node3"), 1)),
    KEYS.member(0xA): encode(Member(0xA, "node1", 2, "10.0.0.1", run="r")),
    KEYS.member(0xC): encode(Member(0xC, "node4", 1, "10.0.0.4", run="r")),
    KEYS.history(3): encode(
        History(
            generation=3,
            began="first formation",
            began_at="2026-11-21T08:00:00Z",
            nodes=("node1", "node2"),
            world_size=3,
            ended="node2 left",
        )
    ),
    KEYS.history(4): encode(History(4, nodes=("node1", "node3"), world_size=3)),
}
OUTCOME = Outcome("failed", "no restarts left", "r", 4, 3, at="2026-11-21T09:00:00Z")


def view(values: Mapping[str, str]) -> View:
    kvs = {key: KeyValue(key, value, 1, 1, 0) for key, value in values.items()}
    return view_of(Snapshot(17, kvs), KEYS, Everything())


def test_a_running_job() -> None:
    state = status.describe("j", view(RUNNING))
    assert (state["phase"], state["generation"], state["reason"]) == ("final", 4, "node2 left")
    assert (state["coordinator"], state["master"]) == ("node1", "10.0.0.1:4242")
    assert (state["restarts"], state["min_nodes"], state["max_nodes"]) == (1, 1, 2)
    nodes = [(n["node"], n["state"], n["group_rank"], n["ranks"]) for n in state["nodes"]]
    assert nodes == [
        ("node1", "training", 0, [0, 1]),
        ("node3", "gone", 1, [2]),
        ("node4", "spare", None, []),
    ]
    assert [entry["generation"] for entry in state["history"]] == [3, 4]
    assert json.loads(json.dumps(state)) == state


def test_a_forming_job_has_members_that_wait() -> None:
    joinable = Round(1, Phase.JOINABLE, 0xA, "first formation", "r")
    state = status.describe("j", view(RUNNING | {KEYS.round: encode(joinable)}))
    assert [node["state"] for node in state["nodes"]] == ["waiting", "waiting"]


def test_a_finished_job() -> None:
    kept = {KEYS.outcome: encode(OUTCOME), KEYS.history(3): "not json"}
    state = status.describe("j", view(kept))
    assert (state["phase"], state["reason"], state["nodes"]) == ("closed", "no restarts left", [])
    assert state["generation"] == OUTCOME.generation
    assert state["outcome"]["exit_code"] == 3
    assert state["history"][0]["ended"].startswith("unreadable: ")


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status._show(status.describe("j", view(RUNNING | {KEYS.outcome: encode(OUTCOME)})))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "job j: final, generation 4",
        "because node2 left",
        "1 to 2 nodes, 1 restarts used",
    ]
    assert "failed at 2026-11-21T09:00:00Z: no restarts left" in lines
    assert "node1 training 0 0-1 2 10.0.0.1" in lines
    assert "node4 spare - - 1 10.0.0.4" in lines
    assert lines[-1] == "generation 4: world of 3 on node1, node3 goes on"


@pytest.mark.parametrize("odd", ["[/red]", "[bold]x", "\x1b[2Jx", "\r\n\x07", "\u202e"])
def test_what_others_call_themselves_is_shown_as_it_is(
    odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither as rich's markup nor as what steers a terminal."""
    entry = encode(History(4, nodes=(odd,), world_size=3, ended=odd))
    named = {
        KEYS.member(0xC): encode(Member(0xC, odd, 1, odd, run="r")),
        KEYS.round: encode(replace(FINAL, reason=odd)),
        KEYS.history(4): entry,
        KEYS.members + "\x1b[3J\udcff": "{}",
    }
    state = status.describe("j", view(RUNNING | named))
    status._show(state)
    out = capsys.readouterr().out
    assert {c for c in out if not c.isprintable()} == {"\n"}
    assert odd in out or "\\x" in out
    json.dumps(state).encode()


@pytest.mark.parametrize(
    "entry",
    [
        {"nodes": [1], "world_size": 3},
        {"nodes": 3, "world_size": 3},
        {"restarts": "many"},
        {"generation": None},
        {"outcome": {}},
        {"failures": [{}]},
    ],
    ids=str,
)
def test_a_malformed_entry_is_said_to_be(entry: dict[str, object]) -> None:
    text = json.dumps({"v": 1, "generation": 4, **entry})
    state = status.describe("j", view({KEYS.history(4): text}))
    assert state["history"][0]["ended"].startswith("unreadable: ")
    assert state["restarts"] == 0
    status._show(state)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    monkeypatch.delenv("ETCDCTL_ENDPOINTS", raising=False)

    def call(*argv: str) -> tuple[int, str]:
        code = main(["status", *argv])
        return code, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["j"], 2, "error: which etcd? Give --etcd HOST:2379"),
        (["a/b", "--etcd", "e"], 2, "a job id is 1 to 128"),
        (["--etcd", "e"], 2, "error: no job given"),
        (["j", "--etcd", "127.0.0.1:9", "--timeout", "1"], 5, "127.0.0.1:9"),
    ],
)
def test_errors(
    run: Callable[..., tuple[int, str]], argv: list[str], code: int, message: str
) -> None:
    returned, said = run(*argv)
    assert (returned, message in said) == (code, True), said
    assert len(said.splitlines()) <= 3


async def test_from_a_real_etcd() -> None:
    async def call(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "elastic_etcd", "status", *argv]
        env = dict(
            os.environ, PYTHONPATH=os.pathsep.join(sys.path), ETCDCTL_ENDPOINTS=etcd.endpoint
        )
        return await asyncio.to_thread(
            subprocess.run, command, env=env, capture_output=True, text=True, check=False
        )

    async with EmbeddedEtcd() as etcd, Client(EtcdConfig((etcd.endpoint,))) as client:
        await client.txn(Txn((), tuple(Put(key, value) for key, value in RUNNING.items())), 5)
        shown, nobody = await call("j", "--json"), await call("k")
    assert shown.returncode == 0, shown.stderr
    state = json.loads(shown.stdout)
    assert state | {"revision": 17} == status.describe("j", view(RUNNING))
    assert nobody.returncode == 1
    assert nobody.stderr == f"error: {etcd.endpoint} has no job at /elastic_etcd/k\n"
