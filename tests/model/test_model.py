"""The rendezvous, explored completely: every interleaving, every fault, I1-I13 at each step."""

import pytest

from elastic_etcd.core import rules
from elastic_etcd.core.schema import Phase
from tests.model.cases import DONE_AND_LOST, LOST, MEDIUM, SMALL, Case, limits
from tests.model.explore import Search
from tests.model.invariants import round_of, world_of
from tests.model.node import Faults
from tests.model.store import KEYS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_interleaving(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    holds(case, capsys)


@pytest.mark.nightly(part="model")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", MEDIUM, ids=str)
def test_every_interleaving_of_more(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    holds(case, capsys)


def holds(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """No invariant is violated, and the search was where it had to come."""
    result = case.run()
    with capsys.disabled():
        print(f"\n{case}: {result}")
    assert not result.violation
    assert result.states > 1000
    assert not set(case.reaches) - result.reached, "the search never came there"


def test_a_lease_that_is_armed_again_outlives_a_formation() -> None:
    """As after a change of etcd's leader: a world becomes final with a node that is long dead."""
    search = Search(limits(1, 2), 2, Faults(crash=1))
    assert not search.run().violation
    worlds, stores, nodes = search.worlds, search.system.stores, search.nodes

    def dead(world: tuple[int, ...], phase: Phase) -> set[int]:
        """The dead who are ready in a round of this phase."""
        now = round_of(stores[world[0]])
        if now is None or now.phase is not phase:
            return set()
        gone = {node.lease for n in world[1:] if not (node := nodes[n]).state and node.lease}
        return {lease for lease in gone if stores[world[0]].value(KEYS.ack(now.generation, lease))}

    def taken(world: tuple[int, ...]) -> set[int]:
        return {p.lease for p in world_of(stores[world[0]])}

    steps = ((worlds[b], worlds[a]) for a, before in enumerate(search.back) for b in before)
    both = ((dead(b, Phase.FROZEN) & dead(a, Phase.FINAL), a) for b, a in steps)
    assert any(gone & taken(a) for gone, a in both)


def test_r10_who_waits_for_the_first_ranks_takes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than eight nodes some wait; here of two."""
    monkeypatch.setattr(rules, "FIRST_RANKS", 1)
    result = Search(limits(1, 2), 2, Faults(crash=1, done=1)).run()
    assert not result.violation, result
    assert not {*LOST, *DONE_AND_LOST} - result.reached


def test_a_budget_that_another_includes_leads_nowhere_else() -> None:
    """Searches leave those out, see Budgets."""
    some, all_ = (Search(limits(1, 2), 2, Faults(fail=1, lost=1)) for _ in range(2))
    all_.budgets.includes = [1 << i for i in range(len(all_.budgets.all))]
    less, more = some.run(), all_.run()
    assert len(all_.queue) > len(some.queue), "there was something to leave out"
    assert (less.states, less.reached) == (more.states, more.reached)
    assert not less.violation
    assert not more.violation
