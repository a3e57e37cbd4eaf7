"""Views: what is encoded is decoded, and whatever else is found does no harm."""

import gc
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core.rules import (
    Claim,
    Close,
    Elapsed,
    Finalise,
    Freeze,
    Local,
    Open,
    Verdict,
    Wait,
    decide,
)
from elastic_etcd.core.schema import (
    LONGEST,
    Cause,
    Contact,
    Divergence,
    Failure,
    FailureKind,
    Hang,
    History,
    Keys,
    Labels,
    Lasting,
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
    Report,
    Requests,
    Round,
    Spec,
    StepTime,
    Stragglers,
    TrainingPlace,
    Unfit,
    decode,
    encode,
    hexed,
)
from elastic_etcd.core.txn import Get, KeyValue, Snapshot
from elastic_etcd.core.view import Coverage, Everything, Narrow, View, covered, view_of
from elastic_etcd.errors import BudgetUsedUp, NoProgress, RendezvousTimeout, TrainingFailed

KEYS = Keys("/elastic_etcd/j")

leases = st.integers(1, (1 << 63) - 1)
numbers = st.integers(0, 1 << 53)
words = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=8)
addresses = st.from_regex(r"[A-Za-z0-9.:%_-]{1,255}", fullmatch=True)
masters = st.none() | st.builds(Master, addresses, st.integers(1, 65535))
nprocs = st.integers(1, 4096)
labels = st.builds(Labels, st.just(UNSET) | words)
contacts = st.builds(
    Contact,
    st.ip_addresses().map(str),
    st.integers(1, 65535),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
)
members = st.builds(
    Member,
    leases,
    words,
    nprocs,
    words,
    labels,
    words,
    numbers,
    words,
    st.booleans(),
    st.none() | contacts,
)
participants = st.lists(
    st.builds(Participant, leases, words, nprocs, numbers, numbers),
    max_size=3,
    unique_by=lambda p: p.lease,
).map(tuple)
pages = st.builds(Page, numbers, participants)
reasons = words.filter(bool)
spans = st.floats(0, 1e11)
places = st.builds(TrainingPlace, numbers, numbers | st.just(UNSET), indices=st.just((88, 12)))
past_failures = st.builds(
    PastFailure,
    words,
    st.sampled_from(FailureKind),
    spans,
    numbers,
    st.integers(-64, 255),
    words,
    words,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    places | st.just(UNSET),
)
pasts = st.lists(past_failures, max_size=3).map(tuple)


@st.composite
def asked(draw: st.DrawFn) -> Limits:
    """A range of nodes, multiples or a list, and the other limits."""
    several = st.lists(st.integers(1, 1 << 53), min_size=1, max_size=4, unique=True)
    nodes = sorted(draw(several))
    step = draw(st.integers(1, 9))
    listed = step == 1 and draw(st.booleans())
    fields = Limits.__struct_fields__[4:]
    whole = ("max_restarts", "suspect_after")
    policy: dict[str, Any] = {f: draw(numbers if f in whole else spans) for f in fields}
    policy["hang_action"] = draw(st.sampled_from(["report", "restart"]))
    policy["compare_every"] = draw(st.sampled_from(["auto", "off", "1", "500"]))
    policy["on_divergence"] = draw(st.sampled_from(["report", "restart", "drain"]))
    policy["copies"] = draw(st.integers(1, 9))
    policy["stop_after_no_progress"] = draw(st.integers(0, 20))
    sizes = tuple(nodes) if listed else ()
    return Limits(nodes[0] * step, nodes[-1] * step, sizes, step, **policy)


specs = st.builds(Spec, words, asked(), words)


@st.composite
def built(draw: st.DrawFn) -> Round:
    """Of every phase, with what that has to have."""
    phase = draw(st.sampled_from(Phase))
    nodes = draw(st.integers(1, 1 << 40))
    return Round(
        generation=draw(numbers),
        phase=phase,
        coordinator=draw(leases),
        reason=draw(reasons),
        run=draw(words),
        node=draw(words),
        nodes=nodes,
        world_size=nodes + draw(st.integers(0, 1 << 40)),
        master=draw(masters.filter(lambda m: m or phase is not Phase.FINAL)),
        restarts=draw(numbers),
        trained=draw(spans),
        failures=draw(pasts),
        cause=draw(st.sampled_from(Cause)),
        joins=draw(st.booleans()),
    )


rounds = built()
ledgers = st.builds(
    *(Ledger, numbers, numbers, st.integers(1, 64)), restarts=numbers, trained=spans, failures=pasts
)
acks = st.builds(Ready, leases, masters)
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
    st.just(UNSET) | words,
)
rank_steps = st.builds(RankStep, numbers, numbers, st.sampled_from(RankDoing), spans, words)
steps = st.builds(NodeSteps, leases, numbers, st.lists(rank_steps, max_size=3).map(tuple))
hangs = st.builds(
    Hang, numbers, numbers, spans, st.booleans(), words, st.booleans(), st.none() | numbers
)
step_times = st.builds(StepTime, leases, numbers, spans, spans)
stragglers = st.builds(Stragglers, numbers, numbers, words, st.lists(words, max_size=3).map(tuple))
divergences = st.builds(Divergence, numbers, st.lists(words, max_size=8).map(tuple))
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


@pytest.mark.parametrize(
    ("values", "of_its_key"),
    [
        pytest.param(specs, (), id="specs"),
        pytest.param(members, ("lease",), id="members"),
        pytest.param(rounds, (), id="rounds"),
        pytest.param(pages, (), id="pages"),
        pytest.param(ledgers, (), id="ledgers"),
        pytest.param(acks, ("lease",), id="acks"),
        pytest.param(reports, ("lease", "revision"), id="reports"),
        pytest.param(steps, ("lease",), id="steps"),
        pytest.param(hangs, (), id="hangs"),
        pytest.param(step_times, ("lease",), id="step_times"),
        pytest.param(stragglers, (), id="stragglers"),
        pytest.param(divergences, (), id="divergences"),
        pytest.param(outcomes, (), id="outcomes"),
    ],
)
@given(data=st.data())
def test_what_is_encoded_is_decoded(
    values: st.SearchStrategy[Any], of_its_key: tuple[str, ...], data: st.DataObject
) -> None:
    value = data.draw(values)
    from_key = {name: getattr(value, name) for name in of_its_key}
    assert decode(type(value), encode(value), **from_key) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"addr": "n1.example.org"},
        {"addr": "fe80::1%eth0"},
        {"port": 0},
        {"nonce": ""},
        {"nonce": "0" * 31 + "G"},
        {"nonce": "0" * 33},
    ],
    ids=str,
)
def test_a_contact_is_an_ip_address_a_port_and_a_nonce(wrong: dict[str, object]) -> None:
    contact = {"addr": "10.0.0.1", "port": 1, "nonce": "0" * 32}
    member = {"v": 1, "node": "n", "nproc": 1, "address": "", "run": "", "contact": contact}
    assert decode(Member, json.dumps(member), lease=1).contact
    with pytest.raises(ValueError, match=r"at `\$\.contact\.(addr|port|nonce)`"):
        decode(Member, json.dumps(member | {"contact": contact | wrong}), lease=1)


@pytest.mark.parametrize(
    "damage",
    [
        ["n1"],
        [{"lease": "a", "node": "n", "nproc": 1, "group_rank": 0, "first_rank": 0}],
        [{"lease": hexed(1), "node": "n", "nproc": 1, "group_rank": 0, "first_rank": 0}] * 2,
        [{"lease": hexed(1), "node": "n", "nproc": 1, "group_rank": -1, "first_rank": 0}],
        [{"lease": hexed(1), "node": "n", "nproc": 1, "group_rank": 0}],
    ],
)
def test_no_page(damage: list[object]) -> None:
    with pytest.raises(ValueError, match="participants"):
        decode(Page, json.dumps({"v": 1, "generation": 1, "participants": damage}))


@pytest.mark.parametrize(
    "master", [{"addr": "a\0b", "port": 1}, {"addr": "", "port": 1}, {"addr": "a", "port": 0}]
)
def test_no_address_for_the_workers_environment(master: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"at `\$\.master\.(addr|port)`"):
        decode(Ready, json.dumps({"v": 1, "master": master}), lease=1)


@pytest.mark.parametrize("nproc", [0, -1, 4097])
def test_no_number_of_workers(nproc: int) -> None:
    value = encode(PAGE).replace('"nproc": 2', f'"nproc": {nproc}')
    with pytest.raises(ValueError, match=r"at `\$\.participants\[0\]\.nproc`"):
        decode(Page, value)


def test_a_round_without_a_reason_is_refused() -> None:
    """Each decision on it has a reason: `open` repeats the round's, and so does who leaves it."""
    spoilt = json.dumps(json.loads(encode(ROUND)) | {"reason": ""})
    view = view_of(snapshot(JOB | {KEYS.round: spoilt}), KEYS, Everything())
    (malformed,) = view.malformed
    assert malformed.startswith(f"{KEYS.round}: ")
    assert malformed.endswith("at `$.reason`")
    assert view.round is None


def test_a_failure_is_told_in_one_line() -> None:
    assert str(Failure("n1", 3, 1, 42, 7, 1.0)) == "rank 3 on n1 exited 7"
    assert str(Failure("n1", 3, 1, 42, -9, 1.0)) == "rank 3 on n1 was killed by SIGKILL"


# --- snapshots


def snapshot(values: dict[str, str], revision: int = 9) -> Snapshot:
    kvs = {k: KeyValue(k, v, 2, 3 + i, 0) for i, (k, v) in enumerate(values.items())}
    return Snapshot(revision, kvs)


def keys_of(gets: Iterable[Get]) -> set[str]:
    return {get.key for get in gets}


MEMBER = Member(0xA, "n1", 2, "10.0.0.1", run="r")
ROUND = Round(4, Phase.FINAL, 0xA, "why", "r", "n1", 1, 2, Master("10.0.0.1", 1))
PAGE = Page(4, (Participant(0xA, "n1", 2, 0, 0),))
FAILURE = Failure("n1", 1, 1, 42, -9, 12.5, "Traceback", "now")
JOB = {
    KEYS.spec: encode(Spec("r", Limits(1, 2))),
    KEYS.member(0xA): encode(MEMBER),
    KEYS.member(0xB): encode(Member(0xB, "n2", 1, run="r")),
    KEYS.ledger: encode(Ledger(4, 4)),
    KEYS.page(0): encode(PAGE),
    KEYS.round: encode(ROUND),
    KEYS.ack(4, 0xA): encode(Ready(0xA)),
    KEYS.ack(4, 0xB): encode(Ready(0xB)),
    KEYS.report(4, 0xB): encode(Report(0xB, 0, None)),
    KEYS.report(4, 0xA): encode(Report(0xA, 0, FAILURE)),
    KEYS.history(4): encode(History(4)),
    KEYS.outcome: encode(Outcome("failed", "why", "r", 4, 1, FAILURE)),
    KEYS.step_time(0xA): encode(StepTime(0xA, 4, 0.5, 0.6)),
    KEYS.unfit_node("n3"): encode(Unfit("n3", "no link", "now")),
    KEYS.divergence: encode(Divergence(4, ("replicas differ: ...",))),
    KEYS.stragglers: encode(Stragglers(4, 1, "n2 is slow ...", ("n2",))),
}


def test_the_view_of_everything() -> None:
    view = view_of(snapshot(JOB), KEYS, Everything())
    assert view.round == ROUND
    assert view.world == PAGE.participants
    assert view.coordinator == MEMBER
    assert [m.node for m in view.members] == ["n1", "n2"]
    assert [a.lease for a in view.acks] == [0xA, 0xB]
    assert [(r.lease, r.failure) for r in view.reports] == [(0xB, None), (0xA, FAILURE)]
    assert view.reports[0].revision < view.reports[1].revision
    assert view.divergence == Divergence(4, ("replicas differ: ...",))
    assert view.history == ((4, encode(History(4))),)
    assert view.unfit == (Unfit("n3", "no link", "now"),)
    assert view.outcome
    assert view.outcome.failure == FAILURE
    assert view.round_mod == 3 + list(JOB).index(KEYS.round)
    assert view.ledger_mod == 3 + list(JOB).index(KEYS.ledger)
    assert not view.malformed


def test_nothing_is_a_view_too() -> None:
    for coverage in (Narrow(), Narrow(0xA), Everything()):
        assert view_of(Snapshot(5, {}), KEYS, coverage) == View(5, coverage)


def test_acks_and_reports_of_other_generations_are_only_counted() -> None:
    old = {KEYS.ack(3, 0xB): encode(Ready(0xB)), KEYS.report(2, 0xB): encode(Report(0xB, 0, None))}
    view = view_of(snapshot(JOB | old), KEYS, Everything())
    assert len(view.acks) == len(view.reports) == 2
    assert view.acked == (3, 4)
    assert view.reported == (2, 4)


def test_members_of_another_run_are_left_out() -> None:
    stranger = {KEYS.member(0xC): encode(Member(0xC, "n3", 1, run="other"))}
    view = view_of(snapshot(JOB | stranger), KEYS, Everything())
    assert [m.node for m in view.members] == ["n1", "n2"]


@pytest.mark.parametrize(
    "name", ["members/a", "acks/4/a", "reports/4/a", "acks/04/000000000000000b"]
)
def test_no_key_is_another_one_written_differently(name: str) -> None:
    """Else a member would be there twice."""
    kind, value = name.partition("/")[0], {"members": MEMBER, "acks": Ready(0xA)}
    text = encode(value.get(kind, Report(0xA, 0, None)))
    view = view_of(snapshot(JOB | {f"{KEYS.root}/{name}": text}), KEYS, Everything())
    plain = view_of(snapshot(JOB), KEYS, Everything())
    assert (view.members, view.acks) == (plain.members, plain.acks)
    assert view.reports == plain.reports


def test_what_is_mirrored_does_not_grow_with_the_job() -> None:
    whole = {KEYS.round, KEYS.ledger, KEYS.outcome, KEYS.hang, KEYS.wanted, KEYS.watched}
    few = {*whole, KEYS.stragglers, KEYS.page(0), KEYS.member(0xB)}
    assert keys_of(covered(KEYS, Narrow(), 0xB)) == few
    assert keys_of(covered(KEYS, Narrow(page=3), 0xB)) == {*few, KEYS.page(3)} - {KEYS.page(0)}
    assert keys_of(covered(KEYS, Narrow(0xB), 0xB)) == few
    assert keys_of(covered(KEYS, Narrow(0xA), 0xB)) == {*few, KEYS.member(0xA)}
    (everything,) = covered(KEYS, Everything(), 0xB)
    assert everything == Get("/elastic_etcd/j/", prefix=True)


@pytest.mark.parametrize(
    "value",
    [ROUND, Ledger(4, 4), Spec("r", Limits(1, 2)), History(4), Requests()],
    ids=lambda value: type(value).__name__,
)
def test_unknown_fields_stay_in_what_several_agents_change(value: Lasting) -> None:
    later = json.loads(encode(value)) | {"new": {"x": [1, None]}}
    text = json.dumps(later, sort_keys=True)
    forged = json.dumps(later | {"later": [["v", "9"]]})
    assert encode(decode(type(value), text)) == encode(decode(type(value), forged)) == text
    long = json.dumps(later | {"long": "x" * LONGEST})
    assert encode(decode(type(value), long)) == encode(value), "it would be too much for a Txn"


def test_unknown_fields_are_the_same_in_whatever_order_they_come() -> None:
    """What is written again has its keys sorted."""
    told = '{"generation": 3, "future": {"b": 1, "a": {"d": 1, "c": 2}}, "v": 2}'
    read = decode(History, told)
    assert decode(History, encode(read)) == read


@pytest.mark.parametrize("key", [k for k in JOB if "/history/" not in k])
def test_unknown_fields_change_nothing(key: str) -> None:
    later = json.dumps({**json.loads(JOB[key]), "new": {"x": [1]}})
    plain = view_of(snapshot(JOB), KEYS, Everything())
    view = view_of(snapshot(JOB | {key: later}), KEYS, Everything())
    assert _without_unknown(view) == plain


def _without_unknown(view: View) -> View:
    of_a_run = {name: getattr(view, name) for name in ("spec", "round", "ledger")}
    return replace(
        view, **{name: replace(value, later=()) for name, value in of_a_run.items() if value}
    )


@pytest.mark.parametrize("key", [k for k in JOB if "/history/" not in k])
@pytest.mark.parametrize("value", ["", "garbage", "[]", "{}", '{"v": 1}', '{"v": 3}'])
def test_a_malformed_value_is_named_and_absent(key: str, value: str) -> None:
    view = view_of(snapshot(JOB | {key: value}), KEYS, Everything())
    assert any(line.startswith(f"{key}: ") for line in view.malformed)
    without = view_of(snapshot({k: v for k, v in JOB.items() if k != key}), KEYS, Everything())
    assert view.round == without.round
    assert view.members == without.members
    assert view.outcome == without.outcome


OF_A_RUN = (KEYS.spec, KEYS.round, KEYS.ledger, KEYS.outcome)


@pytest.mark.parametrize("key", [*JOB, KEYS.root + "/a key/of the future", KEYS.history(1)])
def test_r13_a_newer_format_is_seen_in_what_a_run_has_once(key: str) -> None:
    newer = json.dumps({"a field": "of the future", "v": 7})
    found = view_of(snapshot(JOB | {key: newer}), KEYS, Everything()).newer
    assert found == (7 if key in OF_A_RUN else 0)
    assert view_of(snapshot(JOB), KEYS, Everything()).newer == 0


@pytest.mark.parametrize(
    ("fields", "newer"),
    [
        ({"min_version": 3}, 3),
        ({"min_version": 2}, 0),
        ({"v": 4, "min_version": 3}, 4),
        ({"v": 3, "min_version": "two"}, 3),
        ({"min_version": "two"}, 0),
        ({"min_version": True}, 0),
        ({"min_version": 3.5}, 0),
        ({"min_version": -2}, 0),
        ({"min_version": 10**30}, 0),
        ({"limits": "as the future has them", "min_version": 3}, 3),
    ],
    ids=str,
)
def test_r13_a_newer_format_is_asked_for(fields: dict[str, object], newer: int) -> None:
    spec = json.dumps(json.loads(JOB[KEYS.spec]) | fields)
    assert view_of(snapshot(JOB | {KEYS.spec: spec}), KEYS, Everything()).newer == newer


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
coverages: st.SearchStrategy[Coverage] = st.sampled_from(
    [Narrow(), Narrow(0xA), Narrow(0xB, 1), Everything()]
)


@settings(max_examples=200)
@given(st.dictionaries(names, values | damaged() | st.sampled_from(list(JOB.values()))), coverages)
@example({KEYS.root + "/history": ""}, Everything())
@example({KEYS.round: "[" * 100_000}, Narrow())
@example({KEYS.member(0xA): encode(MEMBER).replace('"nproc": 2', '"nproc": Infinity')}, Narrow())
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
        st.builds(Participant, lease, st.just("n"), st.just(1), few, few),
        min_size=1,
        max_size=3,
        unique_by=lambda p: p.lease,
    ).map(tuple)
    phase = draw(st.sampled_from(Phase))
    master = masters.filter(lambda m: m or phase is not Phase.FINAL)
    nodes, sizes = st.integers(1, 3), st.integers(3, 4)
    now = st.builds(Round, few, st.just(phase), lease, reasons, run, words, nodes, sizes, master)
    return View(
        revision=9,
        coverage=draw(coverages),
        round=draw(st.none() | now),
        ledger=draw(st.builds(Ledger, few, few, nodes, restarts=few, failures=pasts)),
        page=draw(st.none() | st.builds(Page, few, world)),
        world=draw(world),
        coordinator=draw(st.none() | member),
        members=draw(st.lists(member, max_size=3, unique_by=lambda m: m.lease).map(tuple)),
        acks=draw(st.lists(st.builds(Ready, lease, masters), max_size=3).map(tuple)),
        reports=draw(
            st.lists(st.builds(Report, lease, few, st.none() | failures), max_size=3).map(tuple)
        ),
        outcome=draw(st.none() | st.builds(Outcome, st.just("failed"), words, run, few, few)),
    )


locals_ = st.builds(
    Local,
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
@given(views(), locals_, st.integers(1, 3), st.builds(Elapsed, times, times, times))
def test_decide_has_an_answer_to_every_view(
    view: View, local: Local, least: int, elapsed: Elapsed
) -> None:
    decision = decide(view, local, Limits(least, 3, max_restarts=2), elapsed)
    assert decision.reason
    assert decision == decide(view, local, Limits(least, 3, max_restarts=2), elapsed)
    match decision:
        case Claim(_, now):
            assert now.run == "r"
            assert now.coordinator == local.lease
            assert not view.round or now.generation > view.round.generation
        case Open() | Freeze() | Finalise() | Close():
            assert view.round
        case Wait(_, until):
            assert until is None or until > 0


def test_a_verdict_s_exit_code_is_that_of_the_error_for_the_user() -> None:
    assert Verdict.FAILED.exit_code == TrainingFailed.exit_code
    assert Verdict.BUDGET_USED_UP.exit_code == BudgetUsedUp.exit_code
    assert Verdict.NO_PROGRESS.exit_code == NoProgress.exit_code
    assert Verdict.TOO_FEW_NODES.exit_code == RendezvousTimeout.exit_code
    assert Verdict.SUCCEEDED.exit_code == Verdict.STOPPED.exit_code == 0


def test_the_worlds_of_a_long_run_take_bounded_memory() -> None:
    generations = range(10**9, 10**9 + 1000)
    for generation in generations:
        page = Page(generation, (Participant(0xA, "n1", 1, 0, 0),))
        kv = KeyValue(KEYS.page(0), encode(page), 1, generation, 0)
        view_of(Snapshot(generation, {kv.key: kv}), KEYS, Narrow())
    gc.collect()  # what is garbage is not kept
    pages = [each for each in gc.get_objects() if isinstance(each, Page)]
    assert sum(page.generation in generations for page in pages) < 500
