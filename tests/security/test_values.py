"""Whatever stands in a job's keys: no agent falls, and what it writes then is well-formed."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from elastic_etcd.core import lifecycle, writes
from elastic_etcd.core.lifecycle import Life, ReportEnd, State, ViewChanged, Write
from elastic_etcd.core.rules import Claim, Local
from elastic_etcd.core.schema import (
    LONGEST,
    MOST_PAST,
    FailureKind,
    History,
    Ledger,
    Limits,
    Member,
    Outcome,
    PastFailure,
    Phase,
    Report,
    Requests,
    Round,
    Spec,
    Value,
    decode,
    encode,
)
from elastic_etcd.core.txn import Compare, KeyValue, Put, Snapshot, Txn
from elastic_etcd.core.view import Everything, Narrow, view_of
from elastic_etcd.etcd import wire
from tests.support.spoilt import (
    FAILURE,
    JOBS,
    KEYS,
    LOCAL,
    MASTER,
    MEMBERS,
    A,
    B,
    acts,
    job,
    step,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=4)  # surrogates, too
    | st.sampled_from([-1, 1 << 63, 10**30, 1e308, "", "-1", "x" * (LONGEST + 1), "\ud800", "[/x]"])
)
odd: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


LEDGER, HISTORY, PAGE = (
    job(Phase.SETUP)[key] for key in (KEYS.ledger, KEYS.history(3), KEYS.page(0))
)
PARTS = json.loads(PAGE)["participants"]
SETUP, FROZEN = (job(phase)[KEYS.round] for phase in (Phase.SETUP, Phase.FROZEN))


OUTCOME = Outcome("failed", "no restart is allowed", "r", 1, 1, FAILURE)


def spoil(value: str, **fields: Any) -> str:
    """The value with other fields."""
    return json.dumps(json.loads(value) | fields)


@st.composite
def spoilt(draw: st.DrawFn) -> dict[str, str]:
    """A job of which some values are something else."""
    found = dict(draw(st.sampled_from(JOBS)))
    for key in draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=3, unique=True)):
        fields = json.loads(found[key])
        fields[draw(st.sampled_from(sorted(fields)))] = draw(odd)
        whole: list[Any] = ["", "[" * 10_000, "{}", json.dumps(draw(odd)), json.dumps(fields)]
        found[key] = draw(st.sampled_from([*whole, *[whole[-1]] * 5]))
    return found


locals_ = st.builds(
    Local,
    run=st.just("r"),
    lease=st.just(A),
    created=st.just(2),
    spec=st.just(2),
    acked=st.sampled_from([0, 3, 4]),
    running=st.sampled_from([0, 3, 4]),
    ran=st.sampled_from([0, 3, 4]),
)


@settings(max_examples=400)
@given(spoilt(), locals_)
@example(job(Phase.JOINABLE) | {KEYS.ledger: spoil(LEDGER, nodes=1 << 62)}, LOCAL)
@example(job(Phase.JOINABLE, failed=True) | {KEYS.page(0): spoil(PAGE, participants=[])}, LOCAL)
@example(job(Phase.FINAL) | {KEYS.page(0): spoil(PAGE, participants=PARTS * 2)}, LOCAL)
@example(job(Phase.FINAL) | {KEYS.page(0): "x"}, LOCAL)
@example(job(Phase.FROZEN) | {KEYS.round: spoil(FROZEN, phase="final")}, LOCAL)
@example(job(Phase.SETUP) | {KEYS.round: spoil(SETUP, reason="")}, LOCAL)
@example(job(Phase.FINAL) | {KEYS.ack(10**17, A) + "0" * 5000: "", KEYS.round: "x"}, LOCAL)
@example(job(Phase.FINAL) | {KEYS.acks() + "1" * 5000 + "/a": ""}, LOCAL)
@example(
    job(Phase.SETUP) | {KEYS.history(3): '{"v": 1, "x": ' + "[" * 800 + "]" * 800 + "}"}, LOCAL
)
@example(job(Phase.SETUP) | {KEYS.history(3): spoil(HISTORY, x="x" * 1_400_000)}, LOCAL)
@example(job(Phase.FINAL) | {KEYS.member(B): '{"v": 1, "node": "\\ud800"}'}, LOCAL)
def test_what_anybody_may_write_makes_no_agent_fall(found: dict[str, str], local: Local) -> None:
    acts(found, local)


def test_many_rapid_failures_still_back_off() -> None:
    rapid = PastFailure("n2", FailureKind.ERROR, 0.0, rapid=True)
    ledger = Ledger(4, 3, restarts=5000, failures=MOST_PAST * (rapid,))
    failure = structs.replace(FAILURE, uptime=0.1)
    found = job(Phase.JOINABLE) | {
        KEYS.ledger: encode(ledger),
        KEYS.report(3, B): encode(Report(B, 0, failure)),
    }
    acts(found, LOCAL)


def test_a_round_and_a_ledger_that_are_spoilt_together_begin_no_generation_again() -> None:
    """Its acks would be taken for those of the new one, and its workers for started."""
    found = job(Phase.FINAL) | {KEYS.round: "x", KEYS.ledger: "x"}
    kvs = {k: KeyValue(k, v, 2, 3, 0) for k, v in found.items()}
    view = view_of(Snapshot(99, kvs), KEYS, Narrow())
    local = structs.replace(LOCAL, ran=4)
    state = State(local, 1, Life.MEMBER, limits=Limits(1, 2))
    _, actions = lifecycle.step(state, ViewChanged(view), 0.0)
    (claim,) = [a for a in actions if isinstance(a, Write)]
    assert isinstance(claim.what, Claim)
    assert claim.what.round.generation == 5


@pytest.mark.parametrize("phase", [Phase.JOINABLE, Phase.FINAL])
def test_an_ack_or_a_report_that_is_written_over_begins_the_next_generation(phase: Phase) -> None:
    """Its writer knows that it was written, and would be waited for without end."""
    key = KEYS.ack(4, B) if phase is Phase.JOINABLE else KEYS.report(4, B)
    (claim,) = step(job(phase) | {key: "x"}, structs.replace(LOCAL, ran=4, running=0))
    assert isinstance(claim.what, Claim)
    assert "of nb can't be read" in claim.what.reason


@pytest.mark.parametrize("text", ["x", '{"v": 1}'])
@pytest.mark.parametrize("again", [False, True])
def test_a_spec_that_cannot_be_read_ends_no_run(again: bool, text: str) -> None:
    """Neither a node that joins at that moment begins another nor one that joins again."""
    found = job(Phase.FINAL) | {KEYS.spec: text}
    seen = Snapshot(99, {k: KeyValue(k, v, 2, 3, 0) for k, v in found.items()})
    spec = Spec("r" if again else "another", Limits(1, 2))
    txn = writes.join(KEYS, seen, Member(0xC, "nc", 1), spec, again=again)
    assert isinstance(txn, Txn)
    mine, repaired = txn.then
    assert isinstance(mine, Put)
    assert isinstance(repaired, Put)
    assert decode(Member, mine.value, lease=0xC).run == "r"
    assert decode(Spec, repaired.value).run == "r"


@pytest.mark.parametrize("key", [KEYS.ack(4, B), KEYS.report(3, B), KEYS.history(4)])
def test_a_world_that_trains_needs_no_acks_and_no_older_reports(key: str) -> None:
    assert not step(job(Phase.FINAL) | {KEYS.report(4, B): encode(Report(B, 0, None))}, LOCAL)
    assert not step(
        job(Phase.FINAL) | {KEYS.report(4, B): encode(Report(B, 0, None)), key: "x"}, LOCAL
    )


def test_an_outcome_that_cannot_be_read_stops_no_report() -> None:
    found = job(Phase.FINAL) | {KEYS.outcome: "x"}
    (report, *_) = step(found, structs.replace(LOCAL, ran=4), finished=True)
    kvs = {k: KeyValue(k, v, 2, 77, 0) for k, v in found.items()}
    view = view_of(Snapshot(99, kvs), KEYS, Everything())
    txn = writes.build(
        KEYS, State(LOCAL, 1, Life.MEMBER, view=view), report, MEMBERS[A], MASTER, "now"
    )
    assert isinstance(report.what, ReportEnd)
    assert Compare(KEYS.outcome, "mod", 77) in txn.compare


@pytest.mark.parametrize(
    "value", ['{"v": 1, "x": "\\ud800"}', '{"v": 1, "x": "\udcff"}', '{"v": 1, "\\uDFFF": 1}']
)
def test_half_a_character_is_no_value(value: str) -> None:
    with pytest.raises(ValueError, match=r"UTF-8|utf-16|truncated"):
        decode(History, value)


def test_a_whole_character_in_two_halves_is_one() -> None:
    value = '{"v": 1, "generation": 1, "began": "\\ud83d\\ude00"}'
    assert decode(History, value).began == "\U0001f600"


def test_what_a_worker_said_is_written_whatever_it_is() -> None:
    told = Report(
        B, 0, structs.replace(FAILURE, message="no file \udcff or \ud800" + "x" * 100_000)
    )
    value = encode(told)
    wire.encode(value)
    read = decode(Report, value, lease=B, revision=0)
    assert read.failure
    assert read.failure.message.startswith("no file ? or ?x")


@pytest.mark.parametrize(
    "damage",
    [
        {"nodes": 0},
        {"nodes": 3},
        {"world_size": 1},
        {"master": None},
        {"master": {"addr": "a", "port": True}},
        {"coordinator": "-1"},
        {"coordinator": "f" * 1000},
        {"coordinator": 10},
        {"coordinator": "0" * 16},
        {"generation": -1},
        {"generation": 1.5},
        {"generation": "4"},
        {"generation": True},
        {"generation": 1 << 63},
        {"cause": "weather"},
        {"joins": 1},
        {"reason": "x" * (LONGEST + 1)},
        {"restarts": -3},
        {"reason": ""},
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_what_is_no_round(damage: dict[str, Any]) -> None:
    fields = json.loads(job(Phase.FINAL)[KEYS.round]) | damage
    (name, *_) = damage
    with pytest.raises(ValueError, match=name):
        decode(Round, json.dumps(fields))


@pytest.mark.parametrize(
    "damage",
    [
        {"min_nodes": 0},
        {"min_nodes": 3},
        {"max_nodes": 1 << 63},
        {"max_nodes": 2.5},
        {"multiple_of": 0},
        {"multiple_of": 4},
        {"sizes": [1]},
        {"sizes": [2, 1]},
        {"sizes": [1, 1, 2]},
        {"sizes": [0, 1, 2]},
        {"sizes": "12"},
        {"sizes": list(range(1, 2000)), "max_nodes": 1999},
        {"max_restarts": -1},
        {"max_restarts": 10**30},
        {"settle": -0.5},
        {"settle": 1e12},
        {"join_timeout": "600"},
        {"join_timeout": None},
        {"patience": True},
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_what_are_no_limits(damage: dict[str, Any]) -> None:
    fields = json.loads(job(Phase.FINAL)[KEYS.spec])
    with pytest.raises(ValueError, match=r"limits|nodes|sizes|multiple"):
        decode(Spec, json.dumps(fields | {"limits": fields["limits"] | damage}))


@pytest.mark.parametrize("odd", ["Infinity", "NaN", "-Infinity", "1e400"])
def test_seconds_without_an_end_are_no_limits(odd: str) -> None:
    value = job(Phase.FINAL)[KEYS.spec].replace('"settle": 3.0', f'"settle": {odd}')
    with pytest.raises(ValueError, match=r"malformed|limits|range|invalid"):
        decode(Spec, value)


def test_the_outcome_of_a_long_story_is_short() -> None:
    outcome = Outcome("failed", "x" * 200_000, "r", 1, 1, FAILURE)
    assert decode(Outcome, encode(outcome)).reason == "x" * LONGEST


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Requests, {"drains": [{"node": "n1", "by": "ann\nelastic_etcd[n1]: n2 is dead"}]}),
        (Requests, {"stop": {"run": "r", "by": "\n"}}),
        (Requests, {"scale": {"run": "r", "instead_of": "1:2", "by": "a\n", "min_nodes": 1}}),
        (Round, json.loads(job(Phase.FINAL)[KEYS.round]) | {"reason": "n1 left\nn2 left"}),
        (Outcome, json.loads(encode(OUTCOME)) | {"reason": "x\ny"}),
    ],
)
def test_o8_what_a_log_has_in_one_line_has_no_second(
    kind: type[Value], value: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="regex"):
        decode(kind, json.dumps({"v": 1} | value))


def test_o8_what_is_written_in_more_lines_can_be_read() -> None:
    told = structs.replace(OUTCOME, reason="n1 hangs in a\nb")
    assert decode(Outcome, encode(told)).reason == "n1 hangs in a b"
    traceback = structs.replace(OUTCOME, failure=structs.replace(FAILURE, message="a\nb"))
    assert decode(Outcome, encode(traceback)) == traceback
