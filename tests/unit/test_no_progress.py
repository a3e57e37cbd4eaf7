"""Which failures come no further than those before, and what they have in common."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core.no_progress import noted, repeated, why_final
from elastic_etcd.core.schema import Failure, Ledger, TrainingPlace, decode, encode

FAILED = Failure("n1", 0, 0, 42, 1, 100.0, "Traceback\nValueError: torn", "2026-11-26", step=7)


def at(commit: int, step: int = 0, **more: object) -> Failure:
    place = TrainingPlace(step, commit, 3, commit, (88, 12, commit))
    return replace(FAILED, place=place, **more)


def after(*failures: Failure, most: int = 3) -> tuple[Failure, ...]:
    stalled: tuple[Failure, ...] = ()
    for failure in failures:
        stalled = noted(stalled, failure, most)
    return stalled


def why(*failures: Failure, most: int = 3) -> str:
    return why_final(after(*failures, most=most), most)


def test_the_failure_that_came_furthest_does_not_count_and_so_many_after_it_do() -> None:
    assert why(at(5), at(5), at(5)) == ""
    assert why(at(5), at(5), at(5), at(5)) == (
        "3 restarts in a row have come no further (--stop-after-no-progress); the last 3 failures "
        "were in batch 5 of epoch 3 (indices 88, 12, 5), of rank 0 on n1, by ValueError: torn"
    )
    assert why(at(5), at(5), most=1).startswith("1 restart has come no further")
    assert why(at(5), at(5), at(5), at(5), most=0) == ""


@pytest.mark.parametrize("further", [at(6), at(5, 3), at(6, 0, code=-9)])
def test_a_failure_that_comes_further_begins_the_count_anew(further: Failure) -> None:
    assert why(at(5, 2), at(4, 9), at(5, 1), further) == ""
    assert why(at(5, 2), at(4, 9), at(5, 1), further, at(5, 2), at(5, 2)) == ""
    assert why(at(5, 2), at(4, 9), at(5, 1), further, at(5, 2), at(5, 2), at(5, 2))


def test_a_failure_without_a_place_neither_counts_nor_is_it_progress() -> None:
    assert why(*[FAILED] * 9) == ""
    assert why(at(5), FAILED, at(5), FAILED, FAILED, at(5)) == ""
    assert why(at(5), FAILED, at(5), FAILED, FAILED, at(5), at(5))


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
    assert repeated(()) == repeated(after(at(5))) == ""
    assert repeated(after(at(5), at(5))).startswith("the last 2 failures were in batch 5 of")
    assert repeated(after(at(5), at(5, message="KeyError: 1"))) == ""
    assert repeated(after(at(5), at(4), at(4))).startswith("the last 2 failures were in batch 4")


def test_it_is_remembered_in_few_characters_and_can_be_read_again() -> None:
    place = TrainingPlace(7, 1 << 40, 10**6, 10**6, tuple(range(10**9, 10**9 + 32)))
    long = replace(FAILED, message="x" * 8192, place=place)
    ledger = Ledger(4, 4, stalled=after(*[long] * 20, most=20))
    assert decode(Ledger, encode(ledger)) == ledger
    assert len(encode(ledger)) < 30_000
    assert isinstance(ledger.stalled, tuple)
    assert (ledger.stalled[0].pid, ledger.stalled[0].step) == (0, UNSET)
