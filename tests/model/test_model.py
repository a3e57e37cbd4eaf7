"""The rendezvous, explored completely: every interleaving, every fault, I1-I8 at each step."""

import pytest

from elastic_etcd.core.schema import Phase
from tests.model.cases import CASES, Case, limits
from tests.model.explore import Search
from tests.model.invariants import round_of
from tests.model.node import Faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_interleaving(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
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
        """The dead whose leases are in a round of this phase."""
        now = round_of(stores[world[0]])
        gone = {node.lease for n in world[1:] if not (node := nodes[n]).state and node.lease}
        return gone & {p.lease for p in now.participants} if now and now.phase is phase else set()

    steps = ((worlds[b], worlds[a]) for a, before in enumerate(search.back) for b in before)
    assert any(dead(a, Phase.FINAL) & dead(b, Phase.FROZEN) for b, a in steps)


def test_a_budget_that_another_includes_leads_nowhere_else() -> None:
    """Searches leave those out, see Budgets."""
    some, all_ = (Search(limits(1, 2), 2, Faults(fail=1, lost=1)) for _ in range(2))
    all_.budgets.includes = [1 << i for i in range(len(all_.budgets.all))]
    less, more = some.run(), all_.run()
    assert len(all_.queue) > len(some.queue), "there was something to leave out"
    assert (less.states, less.reached) == (more.states, more.reached)
    assert not less.violation
    assert not more.violation
