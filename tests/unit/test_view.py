"""Views: what is encoded is decoded, and whatever else is found does no harm."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_etcd.core.keys import Keys, decode, encode, hexed
from elastic_etcd.core.rules import Act, Elapsed, Limits, Me, decide
from elastic_etcd.core.txn import Get, KeyValue, Snapshot
from elastic_etcd.core.values import (
    Ack,
    Failure,
    Ledger,
    Member,
    Outcome,
    Participant,
    Phase,
    Report,
    Round,
    Spec,
)
from elastic_etcd.core.view import EVERYTHING, Coverage, View, covered, view_of

KEYS = Keys("/elastic_etcd/j")

leases = st.integers(1, (1 << 63) - 1)
numbers = st.integers(0, 1 << 53)
words = st.text(max_size=8)
hosts = st.from_regex(r"[A-Za-z0-9.:%_-]{1,255}", fullmatch=True)
masters = st.none() | st.tuples(hosts, st.integers(1, 65535))
nprocs = st.integers(1, 4096)
specs = st.builds(Spec, words, numbers, numbers, words)
members = st.builds(
    Member, leases, words, nprocs, words, words, words, numbers, words, st.booleans()
)
participants = st.lists(
    st.builds(Participant, leases, words, nprocs), max_size=3, unique_by=lambda p: p.lease
).map(tuple)
rounds = st.builds(
    Round,
    numbers,
    st.sampled_from(Phase),
    leases,
    words,
    words,
    participants,
    masters,
    numbers,
    numbers,
    st.booleans(),
).filter(
    lambda r: (
        (r.participants or r.phase not in ("frozen", "final")) and (r.master or r.phase != "final")
    )
)
places = st.lists(st.tuples(leases, words), max_size=3)
ledgers = st.builds(
    lambda of, last, final, *rest: Ledger(
        last, final, tuple(p for p, _ in of), tuple(n for _, n in of), *rest
    ),
    places,
    *[numbers] * 4,
)
acks = st.builds(Ack, leases, masters)
failures = st.builds(
    Failure,
    words,
    numbers,
    numbers,
    numbers,
    st.integers(-64, 255),
    st.floats(0, 1e9, allow_nan=False),
    words,
    words,
)
reports = st.builds(Report, leases, numbers, st.none() | failures)
outcomes = st.builds(
    Outcome,
    st.sampled_from(["succeeded", "failed", "stopped"]),
    words,
    words,
    numbers,
    numbers,
    st.none() | failures,
    words,
)


@given(specs)
def test_spec(spec: Spec) -> None:
    assert Spec.decode(decode(spec.encode())) == spec


@given(members)
def test_member(member: Member) -> None:
    assert Member.decode(member.lease, decode(member.encode())) == member


@given(rounds)
def test_round(now: Round) -> None:
    assert Round.decode(decode(now.encode())) == now


@given(ledgers)
def test_ledger(ledger: Ledger) -> None:
    assert Ledger.decode(decode(ledger.encode())) == ledger


@given(acks)
def test_ack(ack: Ack) -> None:
    assert Ack.decode(ack.lease, decode(ack.encode())) == ack


@given(reports)
def test_report(report: Report) -> None:
    assert Report.decode(report.lease, report.revision, decode(report.encode())) == report


@given(outcomes)
def test_outcome(outcome: Outcome) -> None:
    assert Outcome.decode(decode(outcome.encode())) == outcome


@pytest.mark.parametrize(
    "master", [{"addr": "a\0b", "port": 1}, {"addr": "", "port": 1}, {"addr": "a", "port": 0}]
)
def test_no_address_for_the_workers_environment(master: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no address|port is no number"):
        Ack.decode(1, {"master": master})


@pytest.mark.parametrize("nproc", [0, -1, 4097])
def test_no_number_of_workers(nproc: int) -> None:
    fields = {"lease": "a", "node": "n", "nproc": nproc}
    whole = decode(Round(1, Phase.FINAL, 1, "", "").encode()) | {"participants": [fields]}
    with pytest.raises(ValueError, match="nproc is no number from 1 to 4096"):
        Round.decode(whole)


def test_a_failure_is_told_in_one_line() -> None:
    assert str(Failure("n1", 3, 1, 42, 7, 1.0)) == "worker 3 on n1 exited 7"
    assert str(Failure("n1", 3, 1, 42, -9, 1.0)) == "worker 3 on n1 was killed by signal 9"


# --- snapshots


def snapshot(values: dict[str, str], revision: int = 9) -> Snapshot:
    kvs = {k: KeyValue(k, v, 2, 3 + i, 0) for i, (k, v) in enumerate(values.items())}
    return Snapshot(revision, kvs)


def keys_of(gets: Iterable[Get]) -> set[str]:
    return {get.key for get in gets}


MEMBER = Member(0xA, "n1", 2, "10.0.0.1", run="r")
ROUND = Round(4, Phase.FINAL, 0xA, "why", "r", (Participant(0xA, "n1", 2),), ("10.0.0.1", 1))
FAILURE = Failure("n1", 1, 1, 42, -9, 12.5, "Traceback", "now")
JOB = {
    KEYS.spec: Spec("r", 1, 2).encode(),
    KEYS.member(0xA): MEMBER.encode(),
    KEYS.member(0xB): Member(0xB, "n2", 1, run="r").encode(),
    KEYS.generation: Ledger(4, 4, (0xA,), ("n1",)).encode(),
    KEYS.round: ROUND.encode(),
    KEYS.ack(4, 0xA): Ack(0xA).encode(),
    KEYS.ack(4, 0xB): Ack(0xB).encode(),
    KEYS.report(4, 0xB): Report(0xB, 0, None).encode(),
    KEYS.report(4, 0xA): Report(0xA, 0, FAILURE).encode(),
    KEYS.history(4): encode({"generation": 4}),
    KEYS.outcome: Outcome("failed", "why", "r", 4, 1, FAILURE).encode(),
}


def test_the_view_of_everything() -> None:
    view = view_of(snapshot(JOB), KEYS, EVERYTHING)
    assert view.round == ROUND
    assert view.coordinator == MEMBER
    assert [m.node for m in view.members] == ["n1", "n2"]
    assert [a.lease for a in view.acks] == [0xA, 0xB]
    assert [(r.lease, r.failure) for r in view.reports] == [(0xB, None), (0xA, FAILURE)]
    assert view.reports[0].revision < view.reports[1].revision
    assert view.history == ((4, encode({"generation": 4})),)
    assert view.outcome
    assert view.outcome.failure == FAILURE
    assert view.round_mod == 3 + list(JOB).index(KEYS.round)
    assert view.ledger_mod == 3 + list(JOB).index(KEYS.generation)
    assert not view.malformed


def test_nothing_is_a_view_too() -> None:
    for coverage in (None, 0xA, EVERYTHING):
        assert view_of(Snapshot(5, {}), KEYS, coverage) == View(5, coverage)


def test_acks_and_reports_of_other_generations_are_only_counted() -> None:
    old = {KEYS.ack(3, 0xB): Ack(0xB).encode(), KEYS.report(2, 0xB): Report(0xB, 0, None).encode()}
    view = view_of(snapshot(JOB | old), KEYS, EVERYTHING)
    assert len(view.acks) == len(view.reports) == 2
    assert view.acked == (3, 4)
    assert view.reported == (2, 4)


def test_members_of_another_run_are_left_out() -> None:
    stranger = {KEYS.member(0xC): Member(0xC, "n3", 1, run="other").encode()}
    view = view_of(snapshot(JOB | stranger), KEYS, EVERYTHING)
    assert [m.node for m in view.members] == ["n1", "n2"]


def test_what_is_mirrored_does_not_grow_with_the_job() -> None:
    few = {KEYS.round, KEYS.generation, KEYS.outcome, KEYS.member(0xB)}
    assert keys_of(covered(KEYS, None, 0xB)) == few
    assert keys_of(covered(KEYS, 0xB, 0xB)) == few
    assert keys_of(covered(KEYS, 0xA, 0xB)) == {*few, KEYS.member(0xA)}
    (everything,) = covered(KEYS, EVERYTHING, 0xB)
    assert everything == Get("/elastic_etcd/j/", prefix=True)


@pytest.mark.parametrize("key", [k for k in JOB if "/history/" not in k])
def test_unknown_fields_are_ignored(key: str) -> None:
    later = json.dumps({**json.loads(JOB[key]), "later": {"x": [1]}})
    plain = view_of(snapshot(JOB), KEYS, EVERYTHING)
    assert view_of(snapshot(JOB | {key: later}), KEYS, EVERYTHING) == plain


@pytest.mark.parametrize("key", [k for k in JOB if "/history/" not in k])
@pytest.mark.parametrize("value", ["", "garbage", "[]", "{}", '{"v": 1}', '{"v": 2}'])
def test_a_malformed_value_is_named_and_absent(key: str, value: str) -> None:
    view = view_of(snapshot(JOB | {key: value}), KEYS, EVERYTHING)
    assert any(line.startswith(f"{key}: ") for line in view.malformed)
    without = view_of(snapshot({k: v for k, v in JOB.items() if k != key}), KEYS, EVERYTHING)
    assert view.round == without.round
    assert view.members == without.members
    assert view.outcome == without.outcome


# --- whatever is found

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
values = st.text(max_size=8) | json_values.map(json.dumps)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real value, of which one field is something else or missing."""
    fields = json.loads(draw(st.sampled_from(list(JOB.values()))))
    name = draw(st.sampled_from(sorted(fields)))
    fields[name] = draw(json_values)
    if draw(st.booleans()):
        del fields[name]
    return json.dumps(fields)


names = st.sampled_from(
    [
        *JOB,
        *(KEYS.root + "/" + rest for rest in ("members/", "members/x", "members/a/b", "acks/4/")),
        *(KEYS.root + "/" + rest for rest in ("acks/x/a", "reports/4/zz", "history/", "history/x")),
        *(KEYS.root + "/" + rest for rest in ("acks/4", "reports/4/a/b", "history", "", "other")),
        *(KEYS.root + "/" + rest for rest in ("acks/\u0664/a", "history/\u00b2", "members/-1")),
    ]
)
coverages: st.SearchStrategy[Coverage] = st.sampled_from([None, 0xA, 0xB, EVERYTHING])


@settings(max_examples=200)
@given(st.dictionaries(names, values | damaged() | st.sampled_from(list(JOB.values()))), coverages)
@example({KEYS.root + "/history": ""}, EVERYTHING)
@example({KEYS.round: "[" * 100_000}, None)
@example({KEYS.member(0xA): encode({**json.loads(MEMBER.encode()), "nproc": float("inf")})}, None)
def test_nothing_that_is_found_raises(found: dict[str, str], coverage: Coverage) -> None:
    view = view_of(snapshot(found), KEYS, coverage)
    assert all(": " in line for line in view.malformed)
    hash(view)


# --- decide is total


@st.composite
def views(draw: st.DrawFn) -> View:
    """Any combination of values, with few leases, so that they meet."""
    lease = st.sampled_from([0xA, 0xB, 0xC])
    few = st.integers(0, 4)
    run = st.sampled_from(["r", "s"])
    member = st.builds(
        Member, lease, st.just("n"), st.just(1), run=run, joined=few, leaving=st.booleans()
    )
    world = st.lists(
        st.builds(Participant, lease, st.just("n"), st.just(1)), min_size=1, max_size=3
    ).map(tuple)
    now = st.builds(Round, few, st.sampled_from(Phase), lease, words, run, world, masters, few, few)
    places = draw(st.lists(lease, max_size=3).map(tuple))
    return View(
        revision=9,
        coverage=draw(st.sampled_from([None, 0xA, 0xB, EVERYTHING])),
        round=draw(st.none() | now),
        ledger=Ledger(draw(few), draw(few), places, ("n",) * len(places), draw(few), draw(few)),
        coordinator=draw(st.none() | member),
        members=draw(st.lists(member, max_size=3).map(tuple)),
        acks=draw(st.lists(st.builds(Ack, lease, masters), max_size=3).map(tuple)),
        reports=draw(
            st.lists(st.builds(Report, lease, few, st.none() | failures), max_size=3).map(tuple)
        ),
        outcome=draw(st.none() | st.builds(Outcome, st.just("failed"), words, run, few, few)),
    )


mes = st.builds(
    Me,
    run=st.just("r"),
    lease=st.sampled_from([0xA, 0xB]),
    created=st.just(2),
    acked=st.integers(0, 4),
    running=st.integers(0, 4),
    ran=st.integers(0, 4),
    stopping=st.booleans(),
    leaving=st.booleans(),
)
times = st.floats(0, 1e6)


@settings(max_examples=300)
@given(views(), mes, st.integers(1, 3), st.builds(Elapsed, times, times, times))
def test_decide_has_an_answer_to_every_view(
    view: View, me: Me, least: int, elapsed: Elapsed
) -> None:
    decision = decide(view, me, Limits(least, 3, max_restarts=2), elapsed)
    assert decision.reason
    assert decision == decide(view, me, Limits(least, 3, max_restarts=2), elapsed)
    if decision.act in (Act.CLAIM, Act.OPEN, Act.FREEZE, Act.FINALISE, Act.CLOSE):
        assert decision.round
        assert decision.round.run == "r" or view.round
    if decision.until is not None:
        assert decision.act is Act.WAIT
        assert decision.until > 0
    if decision.act is Act.CLAIM:
        assert decision.round
        assert decision.round.coordinator == me.lease
        assert not view.round or decision.round.generation > view.round.generation
    assert hexed(me.lease)
