"""The flight recorder: what it keeps, and that its file replays."""

import gc
from pathlib import Path

import pytest

import tests.support.replay
from elastic_etcd.agent.followers import recorder
from elastic_etcd.agent.followers.recorder import FlightRecorder
from elastic_etcd.core.lifecycle import (
    Action,
    Event,
    Fatal,
    Finding,
    Joined,
    LeaseLost,
    Over,
    Published,
    Rejoin,
    Signalled,
    State,
    Tick,
    ViewChanged,
    step,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Limits, Member
from elastic_etcd.core.txn import Compare, Put, Txn
from elastic_etcd.core.view import Narrow, View
from tests.support.replay import replay

LIMITS = Limits(1, 2)
MEMBER = Member(0xA, "n1", 1, run="r")
EVENTS: list[Event] = [
    Joined("r", 3, 0xA, 4, LIMITS),
    ViewChanged(View(5, Narrow(), members=(MEMBER,))),
    Tick(),
    LeaseLost("it expired"),
    Joined("r", 3, 0xB, 9, LIMITS),
    Signalled(),
    Fatal(Over("the job ended")),
]


def test_it_keeps_as_many_steps_as_the_documents_say() -> None:
    assert recorder.STEPS == 10_000


def recorded(events: list[Event]) -> FlightRecorder:
    flight = FlightRecorder()
    state = State(Local(""), 1)
    for at, event in enumerate(events):
        entry = flight.record(state, float(at), event)
        state, entry.actions = step(state, event, float(at))
    return flight


def test_a_file_replays(tmp_path: Path) -> None:
    path = recorded(EVENTS).write(str(tmp_path))
    assert len(path.read_text().splitlines()) == 1 + len(EVENTS)
    assert replay(path) == ""


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    path = recorded(EVENTS).write(str(tmp_path))
    lines = path.read_text().splitlines()
    lost = next(n for n, line in enumerate(lines) if "LeaseLost" in line)
    lines[lost] = lines[lost].replace('[{"type":"Rejoin"}]', "[]")
    path.write_text("\n".join(lines))
    difference = replay(path)
    assert difference.startswith(f"line {lost + 1}: LeaseLost(reason='it expired')")
    assert "recorded: []" in difference
    assert f"now:      [{Rejoin()}]" in difference


def test_a_step_that_raised_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(state: State, event: Event, now: float) -> tuple[State, list[Action]]:
        if isinstance(event, LeaseLost):
            raise ZeroDivisionError
        return step(state, event, now)

    flight = recorded(EVENTS[:3])
    flight.record(State(Local(""), 1), 3.0, LeaseLost("it expired"))
    path = flight.write(str(tmp_path))
    assert replay(path).startswith("line 5: LeaseLost(reason='it expired')\n  recorded: it raised")
    monkeypatch.setattr(tests.support.replay, "step", fails)
    assert replay(path).startswith("line 5: LeaseLost(reason='it expired')\n  as recorded")


def test_it_keeps_the_last_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recorder, "STEPS", 3)
    flight = recorded(EVENTS)
    path = flight.write(str(tmp_path))
    assert [line.count("LeaseLost") for line in path.read_text().splitlines()[1:]] == [0, 0, 0]
    assert replay(path) == ""


def test_views_of_a_large_job_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MEMBERS", 25)
    members = tuple(Member(lease, "n1", 1) for lease in range(1, 11))
    flight = FlightRecorder()
    for revision in range(9):
        view = View(revision, Narrow(), members=members)
        flight.record(State(Local(""), 1), 0.0, ViewChanged(view))
    assert len(flight._steps) == 2


def test_findings_keep_no_views() -> None:
    """A coordinator of 10,000 nodes may have another one of half a megabyte for each."""
    flight = FlightRecorder()
    revisions = range(10**9, 10**9 + 50)
    for revision in revisions:
        state = State(Local(""), 1, view=View(revision, Narrow(), members=(MEMBER,)))
        flight.record(state, 0.0, HANG)
    views = [each for each in gc.get_objects() if type(each) is View]
    assert sum(view.revision in revisions for view in views) == 1, "this test's own"


HANG = Finding("hangs", Txn((Compare("/j/round", "mod", 7),), (Put("/j/hang", "{}"),)))


def test_what_a_follower_has_found_is_in_the_file_and_replays(tmp_path: Path) -> None:
    told: list[Event] = [HANG, Published("hangs", ok=True)]
    path = recorded([*EVENTS[:2], *told, *EVENTS[2:]]).write(str(tmp_path))
    lines = path.read_text().splitlines()
    assert '"actions":[{"type":"Publish","by":"hangs","txn"' in lines[3]
    assert '"type":"Published"' in lines[4]
    assert replay(path) == ""
    path.write_text("\n".join(lines).replace('"key":"/j/hang"', '"key":"/j/other"', 1))
    assert replay(path).startswith("line 4: Finding(by='hangs'")


def test_findings_push_nothing_else_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recorder, "STEPS", 3)
    monkeypatch.setattr(recorder, "_FINDINGS", 2)
    path = recorded([HANG, *EVENTS[:5], *[HANG] * 9, EVENTS[5], HANG]).write(str(tmp_path))
    kinds = [line.split('"type":"')[1].split('"')[0] for line in path.read_text().splitlines()[1:]]
    assert kinds == ["LeaseLost", "Joined", "Finding", "Signalled", "Finding"]
    assert replay(path) == ""


def test_nothing_recorded_is_a_file_too(tmp_path: Path) -> None:
    assert replay(FlightRecorder().write(str(tmp_path))) == ""
