"""What is remembered of nodes that fail or go: how often, for how long, and of how many."""

import pytest

from elastic_etcd.core.rules import Elapsed, _remembered
from elastic_etcd.core.schema import Drain, Ledger, Limits, Member, Participant, Requests, Suspect
from elastic_etcd.core.suspects import (
    LONGEST,
    MOST,
    Suspects,
    aged,
    doubted,
    failed,
    left,
    trusted,
    went,
    why_left_out,
)
from elastic_etcd.core.view import Everything, View


def test_who_goes_is_held_off_for_twice_as_long_each_time() -> None:
    suspects: Suspects = ()
    seconds = []
    for _ in range(10):
        suspects = went(suspects, ["n1"])
        seconds.append(left(suspects, "n1", 2))
    assert seconds == [0, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert left(suspects, "n2", 2) == 0
    assert not doubted(suspects, 2), "where a world begins anyway it takes part"


@pytest.mark.parametrize("after", [1, 2, 3])
def test_whose_workers_fail_is_held_off_for_the_longest_at_once(after: int) -> None:
    suspects: Suspects = ()
    for _ in range(after):
        assert not doubted(suspects, after)
        suspects = failed(suspects, "n1", rapid=True)
    assert doubted(suspects, after) == {"n1"}
    assert not doubted(aged(suspects, LONGEST, after), after)
    assert f"failed {after} time" in why_left_out(suspects, "n1", after)


def test_a_failure_that_is_not_rapid_ends_the_row() -> None:
    suspects = failed(failed((), "n1", rapid=True), "n1", rapid=False)
    assert suspects == ()
    both = failed(went((), ["n1"]), "n1", rapid=True)
    assert failed(both, "n1", rapid=False) == went((), ["n1"])


def test_it_is_forgotten_long_after_its_time() -> None:
    suspects = failed((), "n1", rapid=True)
    late = aged(suspects, 2 * LONGEST - 1, 1)
    assert left(late, "n1", 1) == 0
    assert why_left_out(failed(late, "n1", rapid=True), "n1", 2), "it has not been forgotten"
    assert not aged(late, 1, 1)
    assert not aged(suspects, 0, 0), "--suspect-after 0"


def test_of_too_many_the_oldest_is_forgotten() -> None:
    names = [f"n{i:03}" for i in range(MOST + 1)]
    suspects = went(went((), names[:2]), names[1:])
    assert [s.node for s in suspects] == names[1:]
    assert suspects[0] == Suspect("n001", went=2)
    assert [s.node for s in went(suspects, ["n001"])] == [*names[2:], "n001"]


def test_two_agents_of_one_node_go_at_once() -> None:
    assert went((), ["n1", "n1"]) == (Suspect("n1", went=1),)


def test_only_as_many_suspects_as_are_needed_take_part_survivors_first() -> None:
    a, b, c, d = (Member(lease, f"n{lease}", 1) for lease in (1, 2, 3, 4))
    doubt = frozenset(("n1", "n2"))
    assert trusted([a, b, c, d], doubt, (2,), 2) == [c, d]
    assert trusted([a, b, c], doubt, (2,), 2) == [c, b]
    assert trusted([a, b], doubt, (2,), 2) == [b, a]
    assert trusted([a], doubt, (), 2) == [a]


@pytest.mark.parametrize(("lease", "after", "known"), [(1, 2, 1), (7, 2, 0), (1, 0, 0), (7, 0, 0)])
def test_they_are_forgotten_when_nobody_of_the_last_world_is_there(
    lease: int, after: int, known: int
) -> None:
    """Or where nobody asked for them; the last world was of the member with lease 1."""
    ledger = Ledger(3, final=3, nodes=1, suspects=(Suspect("n2", failed=2),))
    world = (Participant(1, "n1", 1, 0, 0),)
    view = View(9, Everything(), members=(Member(lease, "n1", 1),), world=world, ledger=ledger)
    limits = Limits(1, 2, suspect_after=after)
    assert len(_remembered(view, [], None, limits, Elapsed(0.0, 0.0))) == known


def test_a_node_that_people_drain_is_no_suspect() -> None:
    world = (
        Participant(1, "n1", 1, 0, 0),
        Participant(2, "n2", 1, 1, 1),
        Participant(3, "n3", 1, 2, 2),
    )
    asked = Requests((Drain("n2"),))
    members = (Member(1, "n1", 1),)
    view = View(9, Everything(), members=members, world=world, ledger=Ledger(3, 3, 3), wanted=asked)
    limits = Limits(1, 2, suspect_after=2)
    assert _remembered(view, ["n2", "n3"], None, limits, Elapsed(0.0, 0.0)) == (
        Suspect("n3", went=1),
    )
