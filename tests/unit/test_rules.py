"""What scenarios and the model, of a few nodes, do not ask of the rules: turns, and saving."""

import pytest
from msgspec.structs import replace

from elastic_etcd.core.peers import was_left
from elastic_etcd.core.rules import FIRST_RANKS, Local, _culprit, _turn, may_still_save
from elastic_etcd.core.schema import (
    Failure,
    Ledger,
    Master,
    Page,
    Participant,
    Phase,
    Report,
    Round,
)
from elastic_etcd.core.view import Everything, View
from elastic_etcd.times import LEAD_TURN


def turn(nodes: int, group_rank: int | None) -> float:
    """The turn of a node of the last world, which had so many, or of one that was not in it."""
    own = () if group_rank is None else (Participant(1, "n", 1, group_rank, group_rank),)
    view = View(9, Everything(), ledger=Ledger(3, final=3, nodes=nodes), page=Page(3, own))
    return _turn(view, Local("r", lease=1)) / LEAD_TURN


@pytest.mark.parametrize(
    ("group_rank", "turns"), [(0, 0), (7, 0), (8, 1), (31, 1), (32, 2), (127, 2), (128, 3)]
)
def test_each_turn_is_of_four_times_as_many_ranks(group_rank: int, turns: int) -> None:
    assert FIRST_RANKS == 8
    assert turn(1000, group_rank) == turns


@pytest.mark.parametrize(("nodes", "turns"), [(0, 0), (1, 0), (2, 1), (8, 1), (31, 1), (32, 2)])
def test_who_was_not_in_the_world_comes_after_all_who_were(nodes: int, turns: int) -> None:
    """Where there was another: of one node there is no other that could come before."""
    assert turn(nodes, None) == turns


@pytest.mark.parametrize(
    ("phase", "may"),
    [
        (None, True),
        (Phase.SETUP, True),
        (Phase.JOINABLE, True),
        (Phase.FROZEN, False),
        (Phase.FINAL, False),
    ],
)
def test_who_leaves_may_save_until_the_next_world_begins(phase: Phase | None, may: bool) -> None:
    now = Round(4, phase, 1, "why", "r", "n", 1, 1, Master("n", 80)) if phase else None
    view = View(9, Everything(), round=now, ledger=Ledger(4, final=3))
    assert may_still_save(view, 3) is may
    assert not may_still_save(view, 2)


LOST = Failure("n1", 1, 1, 42, 1, 9.0, "it lost its peers: Connection reset", "now", step=11)
WORLD = (Participant(0xA, "n1", 2, 0, 0), Participant(0xB, "n2", 2, 1, 2))


def culprit(*reports: Report) -> Failure | None:
    return _culprit(View(9, Everything(), world=WORLD, reports=reports))


def test_t11_the_rank_that_ended_before_the_others_is_named() -> None:
    lost, done = Report(0xA, 5, LOST), Report(0xB, 6, None)
    assert culprit(lost) == LOST
    found = culprit(lost, done)
    assert str(found) == "ranks 2-3 on n2 ended while rank 1 on n1 was in step 11"
    assert found
    assert (found.node, found.pid, found.code, found.message) == ("", 0, 0, LOST.message)
    assert str(culprit(Report(0xA, 5, replace(LOST, step=0)), done)).endswith(" was at work")


def test_t11_the_agent_of_the_one_that_ended_knows_it_better() -> None:
    """It may say so when the others' failure has begun the next generation."""
    left = was_left(replace(LOST, node="n2", rank=2), "rank 3 on n2 ended")
    found = culprit(Report(0xA, 5, LOST), Report(0xB, 6, left, victim=True))
    assert found == left
    assert str(found) == "rank 3 on n2 ended while rank 2 on n2 was in step 11"


@pytest.mark.parametrize(
    "failure",
    [
        replace(LOST, message="ValueError: a mistake of the user's"),
        replace(LOST, hang="rank 1 on n1 is in step 6 for 9 s"),
        replace(LOST, message="", code=-9),
    ],
)
def test_t11_a_cause_of_its_own_stays_the_cause(failure: Failure) -> None:
    assert culprit(Report(0xA, 5, failure), Report(0xB, 6, None)) == failure
