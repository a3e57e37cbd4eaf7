"""What scenarios and the model, of a few nodes, do not ask of the rules: turns, and saving."""

import pytest

from elastic_etcd.core.rules import FIRST_RANKS, Local, _turn, may_still_save
from elastic_etcd.core.schema import Ledger, Master, Page, Participant, Phase, Round
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
