"""Whatever happens to an agent, what it does and what it is can be recorded and read again."""

from typing import Any, get_args

import pytest
from msgspec import structs

from elastic_etcd.core import lifecycle, rules
from elastic_etcd.core.lifecycle import (
    Action,
    Answered,
    Error,
    Event,
    Exit,
    Failed,
    Fatal,
    Finding,
    Finished,
    Grace,
    Held,
    JobEnded,
    Joined,
    Lasted,
    LeaseLost,
    Left,
    Life,
    Log,
    MarkLeaving,
    Outdated,
    Over,
    PeerDead,
    Publish,
    Published,
    Rejoin,
    Relist,
    Relisted,
    ReportEnd,
    SetTimer,
    Signalled,
    Silent,
    StartWorkers,
    State,
    StopWorkers,
    Tick,
    ViewChanged,
    WorkerEnded,
    WorkersDiverged,
    WorkersElastic,
    WorkersFinished,
    WorkersGone,
    WorkersHang,
    Writable,
    Write,
    WriteDone,
    from_json,
    step,
    to_json,
)
from elastic_etcd.core.rules import Decision, Local, Verdict
from elastic_etcd.core.schema import Limits, Phase
from elastic_etcd.core.txn import Compare, Delete, Get, Put, Txn
from elastic_etcd.core.view import Everything, Narrow, View, view_of
from tests.support.spoilt import FAILURE, JOBS, KEYS, LEDGER, MASTER, ROUND, WORLD, A, snapshot

VIEWS = [view_of(snapshot(job), KEYS, Everything()) for job in JOBS]
DECISIONS: list[Decision] = [
    rules.Claim("why", ROUND, LEDGER),
    rules.TakeOver("why", ROUND),
    rules.Open("why", ROUND),
    rules.Freeze("why", ROUND),
    rules.Ack("why", 4),
    rules.Finalise("why", ROUND, LEDGER, WORLD),
    rules.Run("why", ROUND, WORLD[0]),
    rules.Stop("why", planned=True),
    rules.Stop("why", planned=True, patient=True),
    rules.Wait("why"),
    rules.Wait("why", 2.5),
    rules.Close("why", ROUND, Verdict.FAILED.outcome("r", 4, "why", FAILURE)),
    rules.Leave("why"),
]
OUTCOME = Verdict.FAILED.outcome("r", 4, "why", FAILURE)
TOLD = Txn(
    (Compare("/j/member", "create", 3), Compare("/j/", "version", 0, prefix=True)),
    (Put("/j/hang", '{"line": "why"}', A), Delete("/j/steps/", prefix=True), Get("/j/round")),
)
EVENTS: list[Event] = [
    *(ViewChanged(view) for view in VIEWS),
    ViewChanged(View(9, Narrow(A))),
    Joined("r", 2, A, 3, Limits(1, 2, settle=0.0)),
    LeaseLost("expired"),
    Relisted(5, 10.0),
    WriteDone(ok=True),
    WorkerEnded(4, None),
    WorkerEnded(4, FAILURE, by_peer=True),
    WorkersGone(4),
    WorkersHang(4, FAILURE),
    WorkersElastic(4, elastic=True),
    WorkersFinished(4, finished=True),
    PeerDead(A),
    Signalled(),
    Silent(1.5),
    Answered(),
    Tick(),
    Fatal(Over("the job ended")),
    Fatal(Error("etcd denies it")),
    Finding("hangs", TOLD),
    Published("hangs", ok=True),
    WorkersDiverged(4, 1, "replicas differ: ...", named=True, alone=False),
    JobEnded(OUTCOME),
]
WRITES: list[Writable] = [
    *(d for d in DECISIONS if isinstance(d, get_args(Writable))),
    ReportEnd(FAILURE, victim=True),
    ReportEnd(None),
    MarkLeaving(),
]
ACTIONS: list[Action] = [
    *(Write(what, A, 4) for what in WRITES),
    Publish("hangs", TOLD),
    StartWorkers(ROUND, WORLD[0]),
    *(StopWorkers(grace) for grace in Grace),
    StopWorkers(Grace.LEAVE, seconds=120.0),
    Rejoin(),
    Relist(),
    *(Exit(why) for why in (Left(), Over("done"), Error("denied"), Outdated(2))),
    SetTimer(12.5),
    SetTimer(None),
    *(Log(decision) for decision in DECISIONS),
]
STATES = [
    State(Local(""), 1),
    *(State(Local("r", A), 2, life, view=VIEWS[0]) for life in Life),
    State(Local("r", A), 2, Life.LEAVING, Over("done")),
    *(State(Local("r"), 1, result=end) for end in (Held(FAILURE, 3.5), Failed(FAILURE))),
    State(Local("r"), 1, result=Finished(), lasted=Lasted(4, 12.5), timer=9.0, logged="why"),
    *(State(Local("r"), 1, pending=Write(what, A), tried=("Claim", 3, 4, 0)) for what in WRITES),
]


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Event, EVENTS), (Action, ACTIONS), (State, STATES), (Limits, [Limits(1, 2)])],
    ids=["events", "actions", "states", "limits"],
)
def test_what_is_recorded_is_read_again(kind: Any, values: list[Any]) -> None:
    for value in values:
        line = to_json(value)
        assert b"\n" not in line
        read = from_json(kind, line)
        assert read == value
        assert hash(read) == hash(value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Event, EVENTS), (Action, ACTIONS), (Decision, DECISIONS), (Writable, WRITES)],
    ids=["events", "actions", "decisions", "writes"],
)
def test_none_is_left_out(kind: Any, values: list[Any]) -> None:
    assert {type(value) for value in values} == set(get_args(kind))


@pytest.mark.parametrize("line", [b"", b"{", b"{}", b'{"type": "Never"}', b'{"type": "LeaseLost"}'])
def test_what_is_no_record(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - told in msgspec's words
        from_json(Event, line)


def test_what_a_worker_said_is_recorded_whatever_it_is() -> None:
    odd = WorkerEnded(4, structs.replace(FAILURE, message="no file \udcff\n"))
    read = from_json(Event, to_json(odd))
    assert read.failure.message == "no file ?\n"


@pytest.mark.parametrize("now", STATES)
def test_a_finding_is_written_and_changes_nothing(now: State) -> None:
    """I9: but not in a job of a newer format, whatever it is."""
    outdated = structs.replace(now, life=Life.LEAVING, ending=Outdated(2))
    assert step(now, Finding("hangs", TOLD), 1.0) == (now, [Publish("hangs", TOLD)])
    assert step(outdated, Finding("hangs", TOLD), 1.0) == (outdated, [])


def test_a_record_replays() -> None:
    """The same events lead through the same actions to the same state."""
    first = State(Local("r", A, 2, 2), 1, Life.MEMBER, limits=Limits(1, 2, settle=0.0))
    events = EVENTS[:12]
    lines, state = [], first
    for at, event in enumerate(events):
        state, actions = step(state, event, at)
        lines.append((to_json(event), [to_json(action) for action in actions], to_json(state)))
    again = from_json(State, to_json(first))
    for at, (happened, acted, became) in enumerate(lines):
        again, actions = step(again, from_json(Event, happened), at)
        assert [to_json(action) for action in actions] == acted
        assert to_json(again) == became
    assert again == state


@pytest.mark.parametrize("state", STATES)
def test_the_rules_know_nothing_of_followers(state: State) -> None:
    """So that the model, which has none, explores all states."""
    found, published, ended = (
        Finding("hangs", TOLD),
        Published("hangs", ok=False),
        JobEnded(OUTCOME),
    )
    assert step(state, found, 1e9) == (state, [Publish("hangs", TOLD)])
    assert step(state, published, 1e9) == (state, [])
    assert step(state, WorkersDiverged(4, 0, "", named=True, alone=True), 1e9) == (state, [])
    assert step(state, ended, 1e9) == (state, [])


def test_phases_and_masters_are_in_the_record() -> None:
    round_ = from_json(Action, to_json(StartWorkers(ROUND, WORLD[0]))).round
    assert (round_.phase, round_.master) == (Phase.FINAL, MASTER)
    assert lifecycle.coverage(State(Local("r", A), 1, view=VIEWS[0])) == Everything()
