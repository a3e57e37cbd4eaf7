"""What a Txn writes of the last world, and what a report is fenced by."""

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core import writes
from elastic_etcd.core.lifecycle import ReportEnd, State, Writable, Write
from elastic_etcd.core.peers import was_left
from elastic_etcd.core.rules import Close, Finalise, Freeze, Local, Verdict
from elastic_etcd.core.schema import (
    LARGEST,
    Failure,
    History,
    Keys,
    Ledger,
    Master,
    Member,
    Participant,
    Phase,
    Report,
    Round,
    Spent,
    decode,
    encode,
)
from elastic_etcd.core.txn import Compare, Delete, Put, Txn
from elastic_etcd.core.view import Everything, View

KEYS = Keys("/elastic_etcd/j")
LOCAL = Local("r", lease=1, created=5)
FAILURES = tuple(Failure("n", rank, rank, 1, 1, 2.0, f"why of {rank}") for rank in range(3))
REPORTS = tuple(Report(lease, 0, failure) for lease, failure in enumerate(FAILURES, 1))
FREEZE = Freeze("reason", Round(4, Phase.FROZEN, 1, "a worker failed", "r", "n"))


def view(**more: Any) -> View:
    return View(9, Everything(), ledger=Ledger(3, final=3), ledger_mod=7, outcome_mod=8, **more)


def written(what: Writable, seen: View | None, spent: Spent | None = None) -> Txn:
    state = State(LOCAL, 1, view=seen)
    return writes.build(KEYS, state, Write(what, 1, 3), Member(1, "n", 1), None, "now", spent)


def history(txn: Txn, generation: int) -> History:
    put = next(p for p in txn.then if isinstance(p, Put) and p.key == KEYS.history(generation))
    return decode(History, put.value)


@pytest.mark.parametrize(
    ("end", "seen", "fences"),
    [
        (ReportEnd(FAILURES[0]), view(), {Compare(KEYS.ledger, "mod", 7)}),
        (ReportEnd(FAILURES[0], victim=True), view(), {Compare(KEYS.report(3, 1), "version", 0)}),
        (ReportEnd(None), view(), set()),
        (ReportEnd(FAILURES[0]), None, set()),
    ],
)
def test_t23_what_a_report_is_fenced_by(
    end: ReportEnd, seen: View | None, fences: set[Compare]
) -> None:
    """By the outcome too: a report after the end of a job would stay for ever."""
    always = {
        Compare(KEYS.member(1), "create", 5),
        Compare(KEYS.outcome, "mod", 8 if seen else 0),
    }
    assert set(written(end, seen).compare) == always | fences


@pytest.mark.parametrize("entry", [encode(History(3, began="began")), "garbage"])
def test_t23_history_has_the_culprit_in_full_and_victims_in_short(entry: str) -> None:
    put = written(FREEZE, view(reports=REPORTS, history=((3, entry),))).then[-1]
    assert isinstance(put, Put)
    assert put.key == KEYS.history(3)
    found = decode(History, put.value)
    assert isinstance(found.failures, tuple)
    assert [f.message for f in found.failures] == ["why of 0", "", ""]
    assert [f.rank for f in found.failures] == [0, 1, 2]
    assert found.ended == "a worker failed"
    assert found.began == ("began" if entry != "garbage" else History(3).began)


def test_t23_a_world_without_an_entry_gets_none() -> None:
    """Its own is written when it is final, so it has been removed, or is too old."""
    txn = written(FREEZE, view(reports=REPORTS, history=((2, encode(History(2))),)))
    assert [put.key for put in txn.then if isinstance(put, Put)] == [KEYS.round]


@pytest.mark.parametrize("outcome", [Verdict.SUCCEEDED, Verdict.STOPPED])
def test_the_end_of_a_run_leaves_what_outlives_it_and_no_more(outcome: Verdict) -> None:
    told = outcome.outcome("r", 3, "why", None)
    ends = {
        Verdict.SUCCEEDED: written(Close("why", FREEZE.round, told), view()),
        Verdict.STOPPED: writes.stop(KEYS, view(), LOCAL, "now"),
    }
    removed = [each for each in ends[outcome].then if isinstance(each, Delete)]

    def is_removed(key: str) -> bool:
        return any(key == d.key or (d.prefix and key.startswith(d.key)) for d in removed)

    of_the_run = (
        *(KEYS.spec, KEYS.ledger, KEYS.page(0), KEYS.ack(3, 1), KEYS.report(3, 1)),
        *(KEYS.step(3, 1), KEYS.step_time(1), KEYS.hang, KEYS.stragglers, KEYS.divergence),
    )
    outliving = (KEYS.outcome, KEYS.history(3), KEYS.member(1), KEYS.wanted)
    assert [key for key in (*of_the_run, *outliving) if is_removed(key)] == list(of_the_run)


SPENT = Spent(steps=7, trained=70.0, detect=2.5, stop=1.0, pause=4.0)


def test_what_was_measured_of_a_world_is_in_its_history() -> None:
    entry = encode(History(3, run="r"))
    seen = view(reports=REPORTS, history=((3, entry),))
    assert history(written(FREEZE, seen, SPENT), 3).spent == SPENT
    known = encode(History(3, run="r", spent=SPENT))
    unseen = view(history=((3, known),))  # of a coordinator that has not trained
    assert history(written(FREEZE, unseen), 3).spent == SPENT
    hung = replace(FAILURES[0], hang="rank 0 on n is in step 8")
    seen = view(reports=(Report(1, 0, hung),), history=((3, entry),))
    spent = history(written(FREEZE, seen, SPENT), 3).spent
    assert spent == replace(SPENT, detect=0.0, hang=2.5)
    left = was_left(FAILURES[0], "rank 1 on n ended")  # which is no hang
    seen = view(reports=(Report(1, 0, left),), history=((3, entry),))
    assert history(written(FREEZE, seen, SPENT), 3).spent == SPENT


WORLD = (Participant(1, "n", 1, 0, 0),)
FINALISE = Finalise(
    "all are ready",
    Round(4, Phase.FINAL, 1, "why", "r", "n", 1, 1, Master("n", 80)),
    Ledger(),
    WORLD,
)


@pytest.mark.parametrize(
    ("last", "before"),
    [
        (History(3, run="r", spent=SPENT), SPENT),
        (History(3, run="r"), Spent()),  # by a coordinator that knew nothing
        (
            History(3, run="r", spent=SPENT, spent_before=Spent(3, 1, trained=30.0, pause=9.0)),
            replace(SPENT, worlds=4, planned=1, trained=100.0, pause=9.0),
        ),
        (History(3, run="older", spent=SPENT), UNSET),
        (History(3, run="r", spent=replace(SPENT, worlds=LARGEST, trained=9e11)), ...),
    ],
)
def test_a_world_begins_with_the_sum_of_those_before(last: History, before: object) -> None:
    found = history(written(FINALISE, view(history=((3, encode(last)),))), 4).spent_before
    if before is ...:  # still one that can be read
        assert isinstance(found, Spent)
        assert found.plus(found).worlds == LARGEST
    else:
        assert found == before
