"""`elastic-etcd status` from the keys of a job to what its user reads."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace

from elastic_etcd.__main__ import main
from elastic_etcd.cli import status
from elastic_etcd.core.schema import (
    History,
    Ledger,
    Limits,
    Master,
    Member,
    Outcome,
    Page,
    Participant,
    Phase,
    Ready,
    Round,
    Spec,
    Suspect,
    encode,
)
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.embedded import EmbeddedEtcd
from elastic_etcd.protocol.messages import UNCOUNTED
from tests.support.jobs import KEYS, view

FINAL = Round(
    generation=4,
    phase=Phase.FINAL,
    coordinator=0xA,
    reason="node2 left",
    run="r",
    node="node1",
    nodes=2,
    world_size=3,
    master=Master("10.0.0.1", 4242),
    restarts=1,
)
RUNNING = {
    KEYS.spec: encode(Spec("r", Limits(1, 2), "node1")),
    KEYS.round: encode(FINAL),
    KEYS.ledger: encode(Ledger(4, 4, restarts=1)),
    KEYS.page(0): encode(
        Page(4, (Participant(0xA, "node1", 2, 0, 0), Participant(0xB, "node3", 1, 1, 2)))
    ),
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


def test_a_running_job() -> None:
    state = status.describe("j", view(RUNNING))
    assert (state["phase"], state["generation"], state["reason"]) == ("final", 4, "node2 left")
    assert (state["coordinator"], state["master"]) == ("node1", "10.0.0.1:4242")
    limits = state["limits"]
    assert (state["restarts"], limits["min_nodes"], limits["max_nodes"]) == (1, 1, 2)
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
    acked = {KEYS.ack(1, 0xA): encode(Ready(0xA))}
    state = status.describe("j", view(RUNNING | acked | {KEYS.round: encode(joinable)}))
    told = [(node["state"], node["why"]) for node in state["nodes"]]
    assert told == [("waiting", "ready"), ("waiting", "not ready yet")]


C = Member(0xC, "node4", 1, "10.0.0.4", run="r")
D, E, F = (Member(lease, f"node{lease:x}", 1, run="r") for lease in (0xD, 0xE, 0xF))
SUSPECTS = (Suspect("noded", failed=2), Suspect("nodee", went=3, since=5), Suspect("gone", went=2))


def waiting(limits: Limits, *members: Member, acked: Iterable[Member] = ()) -> dict[str, str]:
    """Two nodes train, these wait: what is said of each."""
    final = replace(FINAL, suspects=SUSPECTS)
    keys = {KEYS.spec: encode(Spec("r", limits)), KEYS.round: encode(final)}
    keys |= {KEYS.member(m.lease): encode(m) for m in members}
    keys |= {KEYS.ack(4, m.lease): encode(Ready(m.lease)) for m in acked}
    nodes = status.describe("j", view(RUNNING | keys))["nodes"]
    return {node["node"]: node["why"] for node in nodes}


def test_why_each_spare_waits() -> None:
    left_out = (
        "spare, until it is needed: {} is left out for {} s of training, {} (--suspect-after)"
    )
    told = waiting(Limits(1, 3), D, E, F, acked=(C, D, E))
    assert told == {
        "node1": "",
        "node3": "",
        "node4": "waiting to be taken in",
        "noded": left_out.format(
            "noded", 600, "workers failed 2 times right after their start or hung"
        ),
        "nodee": left_out.format("nodee", 15, "it went 3 times lately"),
        "nodef": "not ready yet",
    }
    assert waiting(Limits(1, 2), F, acked=[F])["nodef"].startswith("spare: 2 nodes train, this one")
    sizes = waiting(Limits(2, 8, sizes=(2, 4, 8)), F, acked=[F])
    assert sizes["nodef"].startswith("spare: 2 nodes train, the next size is 4, ")
    rare = waiting(Limits(1, 3, join_interval=600), F, acked=[F])
    assert rare["nodef"] == "waiting to be taken in, once in 600 s at most (--join-interval)"


def test_suspects_are_told_also_while_they_are_away(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(5, 4, suspects=SUSPECTS)
    state = status.describe("j", view({KEYS.spec: RUNNING[KEYS.spec], KEYS.ledger: encode(ledger)}))
    assert [s["node"] for s in state["suspects"]] == ["noded", "nodee", "gone"]
    status._show_one(state)
    out = capsys.readouterr().out
    assert "gone is left out for 10 s of training, it went 2 times lately (--suspect-after)" in out


def test_a_job_that_asks_for_a_newer_format(capsys: pytest.CaptureFixture[str]) -> None:
    spec = encode(Spec("r", Limits(1, 2), min_version=2))
    state = status.describe("j", view(RUNNING | {KEYS.spec: spec}))
    assert state["newer"] == 2
    status._show_one(state)
    assert "(format 2); this one knows format 1" in capsys.readouterr().out


def test_a_finished_job() -> None:
    kept = {KEYS.outcome: encode(OUTCOME), KEYS.history(3): "not json"}
    state = status.describe("j", view(kept))
    assert (state["phase"], state["reason"], state["nodes"]) == ("closed", "no restarts left", [])
    assert state["generation"] == OUTCOME.generation
    assert state["outcome"]["exit_code"] == 3
    assert state["history"][0]["ended"].startswith("unreadable: ")


def test_of_restarts_that_torchrun_counts_no_budget_is_shown() -> None:
    spec = encode(Spec("r", Limits(1, 2, max_restarts=UNCOUNTED), "node1"))
    state = status.describe("j", view(RUNNING | {KEYS.spec: spec}))
    assert "  1 to 2 nodes, 1 restarts used" in list(status.summary(state))


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status._show_one(status.describe("j", view(RUNNING | {KEYS.outcome: encode(OUTCOME)})))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "job j: failed, generation 4",
        "because node2 left",
        "1 to 2 nodes, 1 of 3 restarts used",
    ]
    assert "failed at 2026-11-21T09:00:00Z: no restarts left" in lines
    assert "node1 training 0 0-1 2 10.0.0.1" in lines
    assert "node4 spare - - 1 10.0.0.4" in lines
    assert lines[-1] == "generation 4: world of 3 on node1, node3 goes on"


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(2, 8, sizes=(2, 4, 8)), "2, 4 or 8 nodes"),
        (Limits(4, 64, multiple_of=4), "4 to 64 (multiples of 4) nodes"),
    ],
)
def test_how_many_nodes_may_train(
    limits: Limits, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status._show_one(status.describe("j", view({KEYS.spec: encode(Spec("r", limits))})))
    assert told in capsys.readouterr().out


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
    status._show_one(state)
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
    status._show_one(state)


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
    told = f"error: {etcd.endpoint} has no job at /elastic_etcd/k; elastic-etcd status --all shows"
    assert nobody.stderr.startswith(told)
