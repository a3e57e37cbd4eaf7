"""`elastic-etcd status` from the keys of a job to what its user reads."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.__main__ import main
from elastic_etcd.cli import events, query, status
from elastic_etcd.core.schema import (
    Failure,
    FailureKind,
    Hang,
    History,
    Ledger,
    Limits,
    Master,
    Member,
    NodeSteps,
    Outcome,
    Page,
    Participant,
    PastFailure,
    Phase,
    RankDoing,
    RankStep,
    Ready,
    Round,
    Spec,
    TrainingPlace,
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


def shown(values: Mapping[str, str]) -> str:
    """What `status` prints of a job with these keys, where there is no terminal."""
    seen = view(values)
    lines = status._lines_of(status.describe("j", seen), events.lines("j", seen))
    return "".join(f"{query.in_one_line(line)}\n" for line in lines)


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
SUSPECTS: dict[str, Any] = {
    "trained": 9.0,
    "failures": (
        *(2 * (PastFailure("noded", FailureKind.ERROR, 9.0, rapid=True),)),
        *(3 * (PastFailure("nodee", FailureKind.GONE, 4.0),)),
        *(2 * (PastFailure("gone", FailureKind.GONE, 9.0),)),
    ),
}


def waiting(limits: Limits, *members: Member, acked: Iterable[Member] = ()) -> dict[str, str]:
    """Two nodes train, these wait: what is said of each."""
    final = replace(FINAL, **SUSPECTS)
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
    full = waiting(Limits(1, 2), D, F, acked=[D, F])
    assert full["nodef"].startswith("spare: 2 nodes train, this one")
    assert full["noded"].startswith("spare: 2 nodes train, this one"), "that binds it"
    sizes = waiting(Limits(2, 8, sizes=(2, 4, 8)), F, acked=[F])
    assert sizes["nodef"].startswith("spare: 2 nodes train, the next size is 4, ")
    rare = waiting(Limits(1, 3, join_interval=600), F, acked=[F])
    assert rare["nodef"] == "waiting to be taken in, once in 600 s at most (--join-interval)"


def test_o1_restarts_are_told_while_the_next_world_forms() -> None:
    """The round has none of its own yet."""
    forming = Round(5, Phase.JOINABLE, 0xA, "node2 is lost", "r")
    assert status.describe("j", view(RUNNING | {KEYS.round: encode(forming)}))["restarts"] == 1


def test_suspects_are_told_also_while_they_are_away() -> None:
    ledger = Ledger(5, 4, **SUSPECTS)
    values = {KEYS.spec: RUNNING[KEYS.spec], KEYS.ledger: encode(ledger)}
    state = status.describe("j", view(values))
    assert [s["node"] for s in state["suspects"]] == ["noded", "nodee", "gone"]
    told = "gone is left out for 10 s of training, it went 2 times lately (--suspect-after)"
    assert told in shown(values)


def test_the_same_error_at_the_same_step_is_told_while_the_job_goes_on() -> None:
    place, what = TrainingPlace(4, 120), "ValueError: torn"
    failure = PastFailure("n1", FailureKind.ERROR, 9.0, code=1, what=what, place=place)
    values = RUNNING | {KEYS.ledger: encode(Ledger(2, 2, failures=(failure, failure)))}
    told = "the last 2 failures were in step 5 after commit 120, of rank 0 on n1, by ValueError"
    assert told in shown(values)
    assert told not in shown(values | {KEYS.outcome: encode(OUTCOME)}), "its reason says that"
    once = values | {KEYS.ledger: encode(Ledger(2, 2, failures=(failure,)))}
    assert "the last" not in shown(once)


def test_a_job_that_asks_for_a_newer_format() -> None:
    newer = RUNNING | {KEYS.spec: encode(Spec("r", Limits(1, 2), min_version=3))}
    assert status.describe("j", view(newer))["newer"] == 3
    assert "(format 3); this one knows format 2" in shown(newer)


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
    assert "  1 to 2 nodes, 1 restart used" in list(status.summary(state))
    alone = status.describe("j", view(RUNNING | {KEYS.spec: encode(Spec("r", Limits(1, 1)))}))
    assert "  1 node, 1 of 3 restarts used" in list(status.summary(alone))


def test_o1_its_first_lines_say_what_it_does_since_when_and_why() -> None:
    lines = [" ".join(line.split()) for line in shown(RUNNING).splitlines()]
    assert lines[:3] == [
        "job j: training, generation 4",
        "because node2 left",
        "1 to 2 nodes, 1 of 3 restarts used",
    ]
    assert "node1 training 0 0-1 2 10.0.0.1" in lines
    assert "node4 spare - - 1 10.0.0.4" in lines
    assert lines[-2:] == [
        "2026-11-21T08:00:00Z generation 3: first formation; world of 3 on node1, node2",
        "- generation 3: node2 left",
    ]


CAUSE = Failure("n2", 1, 0, 7, 1, 1.9, "Traceback:\n  x\nValueError: batch 17\n", "")
KILLED = replace(CAUSE, code=-9, message="out of memory: the kernel has killed it\nlast line")
FAILED = replace(OUTCOME, failure=CAUSE)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {KEYS.outcome: encode(FAILED)},
            (
                "job j: failed since 2026-11-21T09:00:00Z, generation 4\n"
                "  because no restarts left\n  last words: ValueError: batch 17\n"
            ),
        ),
        (
            {
                KEYS.round: encode(replace(FINAL, reason=str(KILLED))),
                KEYS.history(3): encode(
                    History(3, "r", ended=str(KILLED), failures=(CAUSE, KILLED))
                ),
                KEYS.history(4): encode(History(4, "r", began_at="2026-11-21T10:00:00.5+01:00")),
            },
            (
                "job j: training since 2026-11-21T09:00:00Z, generation 4\n"
                f"  because {KILLED}\n  last words: out of memory: the kernel has killed it\n"
            ),
        ),
        (
            {
                KEYS.spec: encode(Spec("r", Limits(3, 4))),
                KEYS.round: encode(Round(5, Phase.JOINABLE, 0xA, "node2 is lost", "r")),
                KEYS.ack(5, 0xA): encode(Ready(0xA)),
                KEYS.history(4): encode(History(4, "r", ended_at="2026-11-21T09:00:00Z")),
            },
            (
                "job j: forming since 2026-11-21T09:00:00Z, generation 5\n"
                "  because node2 is lost; 1 node is ready, node4 is not yet; at least 3 must be"
            ),
        ),
    ],
    ids=["failed", "after a failure", "forming"],
)
def test_o1_the_cause_has_its_last_words(more: dict[str, str], told: str) -> None:
    assert shown(RUNNING | more).startswith(told)
    of_all = status.jobs_table([status.in_short(status.describe("j", view(RUNNING | more)))], 200)
    assert (
        told.splitlines()[-1].removeprefix("  last words: ").removeprefix("  because ") in of_all[1]
    )


def test_a_run_that_has_had_no_world_yet_has_nothing_of_the_one_before() -> None:
    """It was "forming since Friday", the end of the former run's last world."""
    former = History(4, "former", restarts=2, ended_at="2026-11-21T09:00:00Z")
    began = {KEYS.spec: encode(Spec("r", Limits(3, 4))), KEYS.history(4): encode(former)}
    of_it = {key: value for key, value in RUNNING.items() if key.startswith(KEYS.members)}
    state = status.describe("j", view(began | of_it))
    assert (state["state"], state["since"], state["restarts"]) == ("forming", None, 0)
    stopped = encode(replace(OUTCOME, state="stopped"))
    assert status.describe("j", view(began | {KEYS.outcome: stopped}))["restarts"] == 0


def test_a_job_that_has_failed_shows_what_its_worker_said() -> None:
    told = shown(RUNNING | {KEYS.outcome: encode(FAILED)})
    assert told.endswith("rank 1 on n2 said:\n  Traceback:\n    x\n  ValueError: batch 17\n")
    silent = replace(FAILED, failure=replace(CAUSE, code=-9, message=""))
    told = shown(RUNNING | {KEYS.outcome: encode(silent)})
    assert "  last words: none; if n2 ran out of memory, its dmesg says so\n" in told


def test_a_hang_is_told_where_one_looks_first() -> None:
    line = "rank 2 on node3 is in step 7 for 16 s, 2 others wait in 7"
    hang = Hang(4, 2, 16.0, line=line, alarm=True, rank=2, at="2026-11-26T11:30:17.250+00:00")
    hung = {KEYS.hang: encode(hang)}
    lines = shown(RUNNING | hung).splitlines()
    assert lines[:2] == [
        "job j: training, hangs since 2026-11-26T11:30:01Z, generation 4",
        f"  because {line}, as of 2026-11-26T11:30:17Z",
    ]
    short = status.in_short(status.describe("j", view(RUNNING | hung)))
    assert status.jobs_table([short], 200)[1].split()[:2] == ["j", "hangs"]
    assert "as of" in status.jobs_table([short], 200)[1]
    steps = tuple(RankStep(n, 7, RankDoing.STEP, 16.0, file=f"/tmp/{n}.txt") for n in range(3))
    node1 = NodeSteps(0xA, 2, (steps[0], replace(steps[1], file=UNSET)))
    node3 = NodeSteps(0xB, 2, steps[2:])
    stand = {KEYS.step(4, 0xA): encode(node1), KEYS.step(4, 0xB): encode(node3)}
    where = [f"  where rank {n} stands is in /tmp/{n}.txt on node{n + 1}" for n in (0, 2)]
    assert shown(RUNNING | hung | stand).splitlines()[2] == where[1]
    nobody = {KEYS.hang: encode(replace(hang, rank=None))}
    assert shown(RUNNING | nobody | stand).splitlines()[2:4] == where
    late = {KEYS.hang: encode(replace(hang, number=3))}
    assert "where rank" not in shown(RUNNING | late | stand)
    untimed = {KEYS.hang: encode(replace(hang, at=""))}
    assert shown(RUNNING | untimed).startswith(
        f"job j: training, hangs, generation 4\n  because {line}\n"
    )
    for other in (replace(hang, alarm=False), replace(hang, generation=3)):
        assert "where rank" not in shown(RUNNING | stand | {KEYS.hang: encode(other)})
        assert "because node2 left" in shown(RUNNING | {KEYS.hang: encode(other)})
    over = hung | {KEYS.outcome: encode(OUTCOME)}
    assert "hangs" not in shown(RUNNING | over)


def test_o1_who_has_gone_without_a_word_is_told() -> None:
    gone = {key: value for key, value in RUNNING.items() if not key.startswith(KEYS.members)}
    assert "job j: deserted, generation 4\n  because no node is there any more" in shown(gone)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(2, 8, sizes=(2, 4, 8)), "2, 4 or 8 nodes"),
        (Limits(4, 64, multiple_of=4), "4 to 64 (multiples of 4) nodes"),
    ],
)
def test_how_many_nodes_may_train(limits: Limits, told: str) -> None:
    assert told in shown({KEYS.spec: encode(Spec("r", limits))})


@pytest.mark.parametrize("odd", ["[/red]", "[bold]x", "\x1b[2Jx", "\r\n\x07", "\u202e"])
def test_what_others_call_themselves_is_shown_as_it_is(odd: str) -> None:
    """Nothing of it steers a terminal."""
    entry = encode(History(4, nodes=(odd,), world_size=3, ended=odd))
    named = {
        KEYS.member(0xC): encode(Member(0xC, odd, 1, odd, run="r")),
        KEYS.round: encode(replace(FINAL, reason=odd)),
        KEYS.history(4): entry,
        KEYS.members + "\x1b[3J\udcff": "{}",
    }
    state = status.describe("j", view(RUNNING | named))
    out = shown(RUNNING | named)
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
    assert "generation 4: unreadable: " in shown({KEYS.history(4): text})


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
        there, nobody = await call("j", "--json"), await call("k")
    assert there.returncode == 0, there.stderr
    state = json.loads(there.stdout)
    assert state | {"revision": 17} == {"version": 1, **status.describe("j", view(RUNNING))}
    assert nobody.returncode == 1
    told = f"error: {etcd.endpoint} has no job at /elastic_etcd/k; elastic-etcd status --all shows"
    assert nobody.stderr.startswith(told)
