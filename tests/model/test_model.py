"""The rendezvous, explored completely: every interleaving, every crash, I1-I8 at each step."""

import pytest

from elastic_etcd.core.rules import Limits
from tests.model.explore import Search
from tests.model.world import Faults, System

FOREVER = float("inf")


def limits(least: int, most: int, restarts: int = 1) -> Limits:
    return Limits(least, most, max_restarts=restarts, settle=1.0, join_timeout=FOREVER)


# Agents, min and max nodes, and what may go wrong.
CASES = [
    (2, limits(1, 2), Faults(crash=2, back=1)),
    (2, limits(2, 2), Faults(crash=2, back=2)),
    (2, limits(1, 2), Faults(crash=1, fail=1)),
    (2, limits(1, 2), Faults(fail=2)),
    (2, limits(1, 2), Faults(expire=1)),
    (2, limits(1, 2), Faults(lost=2, fail=1)),
    (2, limits(1, 2), Faults(late=2, fail=1)),
    (2, limits(1, 2), Faults(late=1, crash=1)),
    (2, limits(1, 2), Faults(expire=1, fail=1)),
    (2, limits(1, 2, restarts=2), Faults(fail=3)),
    (2, limits(1, 2), Faults(leave=1, crash=1)),
    (2, limits(1, 2), Faults(leave=2)),
    (2, limits(1, 2), Faults(done=2, crash=1)),
    (2, limits(1, 1), Faults(crash=1, back=1)),
    (3, limits(2, 3), Faults(crash=1)),
    (3, limits(2, 2), Faults(crash=1)),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("agents", "asked", "faults"), CASES, ids=str)
def test_every_interleaving(
    agents: int, asked: Limits, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Search(System(asked), agents, faults).run()
    may = " ".join(f"{name}={n}" for name, n in faults._asdict().items() if n)
    with capsys.disabled():
        nodes = f"{asked.min_nodes}:{asked.max_nodes}"
        print(f"\n{agents} agents, --nnodes {nodes}, {may}: {result}")
    assert not result.violation
    assert result.states > 1000
