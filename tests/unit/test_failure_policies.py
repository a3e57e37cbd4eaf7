"""What is decided from a run's failures, by logs of them and by what workers have said."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.failures import failure_message
from elastic_etcd.core.failure_policies import (
    LONGEST,
    Suspect,
    after,
    backoff,
    doubted,
    final_error,
    is_usage_error,
    left_out,
    no_progress,
    rapid_failures,
    repeated,
    restarts_used,
    seconds_since_restart,
    stalled,
    suspects,
    trusted,
    why_left_out,
    with_failure,
    with_gone,
)
from elastic_etcd.core.peers import was_left
from elastic_etcd.core.rules import Elapsed, Freeze, Local, _freeze
from elastic_etcd.core.schema import (
    MOST_FAILURES,
    MOST_PAST,
    Drain,
    Failure,
    FailureKind,
    Ledger,
    Limits,
    Member,
    Participant,
    Past,
    Phase,
    Requests,
    Round,
    TrainingPlace,
    decode,
    encode,
)
from elastic_etcd.core.view import Everything, View

NEW: Past = Ledger(4, 4)
LIMITS = Limits(1, 2)
FAILED = Failure("n1", 0, 0, 42, 1, 100.0, "Traceback\nValueError: torn", "2026-11-26", step=7)
RAPID = replace(FAILED, uptime=1.5)


def noted(*failures: Failure, limits: Limits = LIMITS, past: Past = NEW) -> Past:
    for failure in failures:
        past = with_failure(past, failure, limits)
    return past


# --- the log ------------------------------------------------------------------------------


def test_a_rack_that_goes_at_once_makes_no_failure_forgotten() -> None:
    past = noted(*[FAILED] * 2 * MOST_FAILURES)
    assert len(past.failures) == MOST_FAILURES
    past = with_gone(past, [f"n{i:03}" for i in range(100)], LIMITS)
    assert len(past.failures) == MOST_PAST
    kinds = [failure.kind for failure in past.failures]
    assert kinds.count(FailureKind.ERROR) == MOST_FAILURES
    assert [f.node for f in past.failures[-2:]] == ["n098", "n099"], "the newest are remembered"
    assert len(with_gone(NEW, [f"n{i:03}" for i in range(100)], LIMITS).failures) == MOST_PAST


def test_it_is_remembered_in_few_characters_and_can_be_read_again() -> None:
    place = TrainingPlace(7, 1 << 40, 10**6, 10**6, tuple(range(10**9, 10**9 + 32)))
    past = noted(*[replace(FAILED, message="x" * 8192, place=place)] * MOST_FAILURES)
    past = with_gone(past, [f"n{i:03}" for i in range(100)], LIMITS)
    assert decode(Ledger, encode(past)) == past
    assert len(encode(past)) < 30_000


def test_a_ledger_of_version_1_says_how_many_restarts_are_used() -> None:
    counters = '"early": "trained", "stalled": [], "suspects": [], "rapid_failures": 2'
    last = '"final": 3, "generation": 4, "nodes": 2, "restarts": 2, "trained": 7.5'
    of_1 = f'{{{last}, {counters}, "v": 1}}'
    assert decode(Ledger, of_1) == Ledger(4, 3, 2, restarts=2, trained=7.5)


# --- the budget, and back-off -------------------------------------------------------------


def test_used_restarts_are_forgiven_after_a_time_without_one_that_another_is_used_for() -> None:
    past = replace(after(noted(FAILED), 3599.0), restarts=99)
    assert restarts_used(past, LIMITS) == 99, "more than the log could count"
    gone = after(with_gone(past, ["n1"], LIMITS), 1.0)
    assert restarts_used(gone, LIMITS) == 0, "nodes that go do not matter"
    free = after(with_failure(past, FAILED, LIMITS, free=True), 1.0)
    assert restarts_used(free, LIMITS) == 0
    assert restarts_used(after(noted(FAILED, past=past), 1.0), LIMITS) == 99
    assert seconds_since_restart(after(NEW, 7.0)) == 7.0


def test_rapid_failures_in_a_row_back_off_for_twice_as_long_each_time() -> None:
    waits = [backoff(noted(*[RAPID] * times)) for times in (0, 1, 2, 3, 4, 7, 8, 9)]
    assert waits == [0, 0, 1, 2, 4, 32, 60, 60]
    assert backoff(noted(*[RAPID] * 5000)) == 60
    assert rapid_failures(noted(RAPID, RAPID, FAILED, RAPID)) == 1
    row = with_gone(noted(RAPID, RAPID), ["n2"], LIMITS)
    assert rapid_failures(noted(RAPID, past=row)) == 3, "nodes that go end no row"
    free = with_failure(row, RAPID, LIMITS, free=True)
    assert rapid_failures(free) == 0, "a node that is left out ends it"
    assert rapid_failures(noted(RAPID, past=free)) == 1


# --- suspects -----------------------------------------------------------------------------


def test_who_goes_is_held_off_for_twice_as_long_each_time() -> None:
    past, seconds = NEW, []
    for _ in range(10):
        past = with_gone(past, ["n1"], LIMITS)
        seconds.append(left_out(past, LIMITS).get("n1", 0.0))
    assert seconds == [0, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert "n2" not in left_out(past, LIMITS)
    assert not doubted(past, LIMITS), "where a world begins anyway it takes part"
    assert why_left_out(past, "n1", LIMITS).endswith("it went 10 times lately (--suspect-after)")


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("failure", [RAPID, replace(FAILED, hang="it hangs")], ids=str)
def test_whose_workers_fail_is_held_off_for_the_longest_at_once(
    most: int, failure: Failure
) -> None:
    limits, past = replace(LIMITS, suspect_after=most), NEW
    for _ in range(most):
        assert not doubted(past, limits)
        past = noted(failure, past=past)
    assert doubted(past, limits) == {"n1"}
    assert not doubted(after(past, LONGEST), limits)
    assert f"failed {most} time" in why_left_out(past, "n1", limits)


def test_a_failure_that_is_not_rapid_ends_the_row() -> None:
    assert suspects(noted(RAPID, FAILED), LIMITS) == {}
    both = with_gone(noted(RAPID), ["n1"], LIMITS)
    assert suspects(both, LIMITS) == {"n1": Suspect("n1", 1, 1)}
    assert suspects(noted(FAILED, past=both), LIMITS) == {"n1": Suspect("n1", 0, 1)}


def test_it_is_forgotten_long_after_its_time() -> None:
    once = replace(LIMITS, suspect_after=1)
    late = after(noted(RAPID), 2 * LONGEST - 1)
    assert "n1" not in left_out(late, once)
    assert suspects(late, once)["n1"].since == 2 * LONGEST - 1
    assert suspects(noted(RAPID, past=late), once)["n1"].failed == 2, "it has not been forgotten"
    later = after(late, 1)
    assert not suspects(later, once)
    assert suspects(noted(RAPID, past=later), once)["n1"].failed == 1
    assert not suspects(noted(RAPID), replace(LIMITS, suspect_after=0))


def test_two_agents_of_one_node_go_at_once() -> None:
    assert suspects(with_gone(NEW, ["n1", "n1"], LIMITS), LIMITS) == {"n1": Suspect("n1", went=1)}


def test_nobody_in_particular_is_no_suspect() -> None:
    assert not suspects(noted(replace(RAPID, node="")), LIMITS)


def test_only_as_many_suspects_as_are_needed_take_part_survivors_first() -> None:
    a, b, c, d = (Member(lease, f"n{lease}", 1) for lease in (1, 2, 3, 4))
    doubt = frozenset(("n1", "n2"))
    assert trusted([a, b, c, d], doubt, (2,), 2) == [c, d]
    assert trusted([a, b, c], doubt, (2,), 2) == [c, b]
    assert trusted([a, b], doubt, (2,), 2) == [b, a]
    assert trusted([a], doubt, (), 2) == [a]


def frozen(view: View, limits: Limits) -> dict[str, Suspect]:
    """The suspects in the round that a freeze writes on such a view."""
    now = Round(4, Phase.JOINABLE, 1, "why", "r")
    ready = list(view.members)
    decision = _freeze(view, now, Local("r", 1), ready, limits, Elapsed(0.0, 0.0))
    assert isinstance(decision, Freeze)
    return suspects(decision.round, replace(limits, suspect_after=2))


@pytest.mark.parametrize(("lease", "most", "known"), [(1, 2, 1), (7, 2, 0)])
def test_they_are_forgotten_when_nobody_of_the_last_world_is_there(
    lease: int, most: int, known: int
) -> None:
    """The last world was of the member with lease 1."""
    ledger = noted(replace(RAPID, node="n2"), past=Ledger(3, 3, 1))
    assert isinstance(ledger, Ledger)
    world = (Participant(1, "n1", 1, 0, 0),)
    view = View(9, Everything(), members=(Member(lease, "n1", 1),), world=world, ledger=ledger)
    assert len(frozen(view, replace(LIMITS, suspect_after=most))) == known


@pytest.mark.parametrize("most", [2, 0])
def test_a_node_that_people_drain_is_no_suspect(most: int) -> None:
    """Nor does anything go into the log of who goes where nobody asked for suspects."""
    nodes = ((1, "n1"), (2, "n2"), (3, "n3"))
    world = tuple(Participant(lease, node, 1, lease - 1, lease - 1) for lease, node in nodes)
    asked = Requests((Drain("n2"),))
    members = (Member(1, "n1", 1),)
    view = View(9, Everything(), members=members, world=world, ledger=Ledger(3, 3, 3), wanted=asked)
    found = frozen(view, replace(LIMITS, suspect_after=most))
    assert found == ({"n3": Suspect("n3", went=1)} if most else {})


# --- an error that another start would only repeat ----------------------------------------

USAGE = """
from elastic_etcd.errors import UsageError, WrongHere
import atexit
atexit.register(lambda: __import__("sys").stderr.write("tracker: 3 records were written\\n"))
try:
    1 / 0
except ZeroDivisionError:
    raise {}("two lines:\\nmore of it")
"""
ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.parse_args()
"""
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"
TRAINED = noted(FAILED)  # a step


def failed(folder: Path, script: str) -> Failure:
    """The failure of a worker that runs this script."""
    path = folder / "train.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, check=False)
    said = failure_message(done.returncode, "", done.stderr, 0)
    return Failure("n1", 1, 1, 42, done.returncode, 1.5, said)


def final(*failures: Failure, past: Past = NEW) -> str:
    return final_error(noted(*failures, past=past))


def test_t13_a_usage_error_is_final_at_once(tmp_path: Path) -> None:
    failure = failed(tmp_path, USAGE.format("UsageError"))
    assert is_usage_error(noted(failure).failures[-1])
    assert final(failure) == "a UsageError, which no restart mends"
    assert final(replace(failure, step=1000), past=after(TRAINED, 9999.0))


def test_t13_what_is_wrong_on_one_node_or_once_is_not(tmp_path: Path) -> None:
    failure = failed(tmp_path, USAGE.format("WrongHere"))
    assert final(failure) == ""
    (told,) = noted(failure).failures
    assert not is_usage_error(told)
    assert told.what == "elastic_etcd.errors.WrongHere: two lines:"


@pytest.mark.parametrize(
    "script", ["train(", "def train():\nreturn 1", "if True:\n\tx = 1\n        y = 2"]
)
def test_t13_a_script_that_cannot_be_read_is_final_at_once(tmp_path: Path, script: str) -> None:
    failure = failed(tmp_path, script)
    assert final(failure) == "a script that can't be read, which no restart mends"
    assert final(failure, past=TRAINED) == "", "somebody may be about to write it"


@pytest.mark.parametrize(
    "script", ["import no_such_module", "import sys\nsys.exit('no data')", ARGUMENTS]
)
def test_t13_the_same_error_twice_is_final_before_the_first_step(
    tmp_path: Path, script: str
) -> None:
    failure = failed(tmp_path, script)
    assert final(failure) == ""
    before = noted(failure)
    assert final(failure, past=before) == "the same error twice before the first step"
    assert final(replace(failure, node="n2", rank=7, pid=43), past=before)
    assert final(replace(failure, message=failure.message + "0"), past=before) == ""
    assert final(failure, failure, past=TRAINED) == "", "what has run once may run again"
    for later in (replace(failure, step=1), replace(failure, code=3)):
        assert final(later, past=before) == ""
    left = was_left(replace(failure, step=11), "rank 1 on n2 ended")
    assert final(left, failure, failure, past=before) == "", "it has trained by then"
    long = after(before, 600.0)
    assert final(failure, failure, past=long) == "", "nobody may see its steps"
    assert final(failure, past=after(before, 599.0))
    assert final(failure, past=with_gone(before, ["n2"], LIMITS)), "nodes that go end no row"


def test_t13_the_same_error_elsewhere_is_another(tmp_path: Path) -> None:
    first = failed(tmp_path, "def load():\n    raise OSError('no answer')\nload()")
    second = failed(tmp_path, "\ndef load():\n    raise OSError('no answer')\nload()")
    assert final(first, second) == ""
    assert final(first, first)


@pytest.mark.parametrize(
    "failure",
    [
        Failure("n1", 1, 1, 42, -9, 1.5, "out of memory: the kernel has killed it"),
        Failure("n1", 1, 1, 42, 1, 1.5, ""),
        Failure("n1", 1, 1, 42, 1, 1.5, GLOO),
        Failure("n1", 1, 1, 42, 1, 1.5, "RuntimeError: CUDA error: all devices are busy"),
        Failure("", 0, 0, 0, 0, 1.5, "", hang="the store server on n1 was killed by SIGKILL"),
    ],
)
def test_t13_what_may_have_another_cause_each_time_is_tried_again(failure: Failure) -> None:
    assert final(failure) == final(failure, failure) == ""


# --- restarts that come no further --------------------------------------------------------


def at(commit: int, step: int = 0, **more: object) -> Failure:
    place = TrainingPlace(step, commit, 3, commit, (88, 12, commit))
    return replace(FAILED, place=place, **more)


def why(*failures: Failure, most: int = 3) -> str:
    limits = replace(LIMITS, stop_after_no_progress=most)
    return no_progress(noted(*failures, limits=limits), limits)


def test_the_failure_that_came_furthest_does_not_count_and_so_many_after_it_do() -> None:
    assert why(at(5), at(5), at(5)) == ""
    assert why(at(5), at(5), at(5), at(5)) == (
        "3 restarts in a row have come no further (--stop-after-no-progress); the last 3 failures "
        "were in batch 5 of epoch 3 (indices 88, 12, 5), of rank 0 on n1, by ValueError: torn"
    )
    assert why(at(5), at(5), most=1).startswith("1 restart has come no further")
    assert why(at(5), at(5), at(5), at(5), most=0) == ""
    assert why(*[at(5)] * 20, most=20) == ""
    assert why(*[at(5)] * 21, most=20)


@pytest.mark.parametrize("further", [at(6), at(5, 3), at(6, 0, code=-9)])
def test_a_failure_that_comes_further_begins_the_count_anew(further: Failure) -> None:
    assert why(at(5, 2), at(4, 9), at(5, 1), further) == ""
    assert why(at(5, 2), at(4, 9), at(5, 1), further, at(5, 2), at(5, 2)) == ""
    assert why(at(5, 2), at(4, 9), at(5, 1), further, at(5, 2), at(5, 2), at(5, 2))


def test_a_failure_without_a_place_neither_counts_nor_is_it_progress() -> None:
    assert why(*[FAILED] * 9) == ""
    assert why(at(5), FAILED, at(5), FAILED, FAILED, at(5)) == ""
    assert why(at(5), FAILED, at(5), FAILED, FAILED, at(5), at(5))


def test_a_failure_that_used_no_restart_counts_neither_way() -> None:
    past = with_failure(noted(at(5)), at(7), LIMITS, free=True)
    assert [f.place for f in stalled(past)] == [at(5).place]


def test_places_that_are_told_otherwise_cannot_be_compared() -> None:
    told = replace(FAILED, place=TrainingPlace(1000))
    assert why(told, at(5), told, at(5), told, at(5), told, at(5), most=1) == ""
    assert "were after step 1000, of rank 0" in why(told, told, told, told)


def test_only_what_is_the_same_is_told() -> None:
    first, last = at(5, node="n2", message="ValueError: torn"), at(5, rank=1, code=-11, message="")
    shared = "the last 2 failures were in batch 5 of epoch 3 (indices 88, 12, 5)"
    assert why(at(9), first, last, most=2).endswith(shared)
    hung = at(5, hang="rank 0 on n1 is in step 7 for 300 s", node="n1")
    assert why(at(9), hung, replace(hung, hang="for 301 s"), most=2).endswith("on n1, by a hang")
    others = at(5), at(4, rank=1, node="n2")
    assert "in batches with indices 88, 12, by ValueError" in why(at(9), *others, most=2)
    apart = replace(FAILED, place=TrainingPlace(2, 1), node="n3", rank=2, code=-9, message="")
    assert why(at(9), at(5), apart, most=2).endswith("; these failures have nothing in common")
    many = replace(FAILED, place=TrainingPlace(2, 1, 0, 4, tuple(range(32))))
    assert "in batch 4 of epoch 0 (indices 0, 1, 2, 3, …)" in why(*[many] * 4)
    bare = replace(FAILED, place=TrainingPlace(2, 1), message="")
    assert "were in step 3 after commit 1, of rank 0 on n1, by exit code 1" in why(*[bare] * 4)


def test_the_same_error_at_the_same_step_is_told_before_the_end() -> None:
    assert repeated(NEW) == repeated(noted(at(5))) == ""
    assert repeated(noted(at(5), at(5))).startswith("the last 2 failures were in batch 5 of")
    assert repeated(noted(at(5), at(5, message="KeyError: 1"))) == ""
    assert repeated(noted(at(5), at(4), at(4))).startswith("the last 2 failures were in batch 4")
