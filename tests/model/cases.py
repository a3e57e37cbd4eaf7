"""What is searched: in each run of the tests, and once by hand (`python -m tests.model`)."""

from typing import NamedTuple

from msgspec import structs

from elastic_etcd.core.rules import Limits
from tests.model.explore import Result, Search
from tests.model.node import Faults

FOREVER = float("inf")
BEFORE_FINAL = ("setup", "joinable", "frozen")

# Labels of transitions, see world.py; a search that never takes them proves nothing of them.
LOST = tuple(f"claim: written, instead of one lost in {p}" for p in (*BEFORE_FINAL, "final"))
LEAVING = tuple(  # in frozen it has nothing to stop and is gone at once
    f"claim: written, instead of one leaving in {p}" for p in ("setup", "joinable", "final")
)
ACKED_AND_DEAD = tuple(
    f"dies in {phase}{role}, acked"
    for phase in ("joinable", "frozen", "final")
    for role in ("", ", coordinator")
)
STOPPED = tuple(
    f"stopped, its lease ends, the coordinator's in {p}" for p in (*BEFORE_FINAL, "final")
)


def limits(least: int, most: int, restarts: int = 1) -> Limits:
    return Limits(least, most, max_restarts=restarts, settle=1.0, join_timeout=FOREVER)


HASTY = structs.replace(limits(2, 2), join_timeout=1.0)


class Case(NamedTuple):
    """A search, and the labels that it must have reached."""

    agents: int
    limits: Limits
    faults: Faults
    reaches: tuple[str, ...] = ()

    def __str__(self) -> str:
        asked = self.limits
        nodes = f"--nnodes {asked.min_nodes}:{asked.max_nodes}"
        return f"{self.agents} agents, {nodes}, {asked.max_restarts} restarts: {self.faults}"

    def run(self) -> Result:
        return Search(self.limits, self.agents, self.faults).run()


CASES = [
    Case(1, limits(1, 1), Faults(expire=3, fail=1), ("learns of it while joining",)),
    Case(2, limits(1, 2), Faults(crash=2, back=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(2, 2), Faults(crash=2, back=2), LOST),
    Case(2, limits(1, 2), Faults(crash=1, fail=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2), Faults(fail=2)),
    Case(2, limits(1, 2, restarts=2), Faults(fail=3, crash=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2), Faults(fail=3, long=2), ("sees, after a long time",)),
    Case(2, limits(1, 2, restarts=2), Faults(fail=4, long=2), ("sees, after a long time",)),
    Case(2, limits(1, 2), Faults(expire=1, fail=1), LOST),
    Case(2, limits(1, 2), Faults(stop=1, crash=1), (*LOST, *STOPPED)),
    Case(2, limits(1, 2), Faults(stop=1, fail=1), (*LOST, *STOPPED)),
    Case(2, limits(1, 2), Faults(lost=2, late=1, fail=1)),
    Case(2, limits(1, 2), Faults(late=2, fail=1)),
    Case(2, limits(1, 2), Faults(late=1, crash=1), LOST),
    Case(2, limits(1, 2), Faults(slow=2, fail=1), ("hears the answer",)),
    Case(2, limits(1, 2), Faults(slow=1, crash=1), LOST),
    Case(2, limits(1, 2), Faults(leave=1, crash=1), (*LOST, *LEAVING, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2), Faults(leave=1, fail=1), LEAVING),
    Case(2, limits(1, 2), Faults(leave=2), LEAVING),
    Case(2, limits(1, 2, restarts=0), Faults(fail=1, peer=1)),
    Case(2, limits(1, 2), Faults(peer=2, crash=1), LOST),
    Case(2, limits(1, 2), Faults(done=2, crash=1), LOST),
    Case(2, limits(1, 1), Faults(crash=1, back=1), LOST),
    Case(2, limits(1, 2), Faults(newer=1, fail=1)),
    Case(2, limits(1, 2), Faults(hang=1, fail=1), ("hangs in joinable", "hangs in final, acked")),
    Case(2, limits(1, 2), Faults(tired=2, fail=1), ("has waited",)),
    Case(2, limits(1, 3), Faults(crash=1, fail=1), ("has waited",)),
    Case(2, HASTY, Faults(silent=2, crash=1), ("hears etcd again", "has waited")),
    Case(3, limits(2, 3), Faults(crash=1), (*LOST, *ACKED_AND_DEAD)),
    Case(3, limits(2, 2), Faults(crash=1), LOST),
    Case(3, limits(2, 3), Faults(fail=1)),
    Case(3, limits(2, 3), Faults(slow=1), ("hears the answer",)),
]

# Minutes and gigabytes: searched before a release.
LARGE = [
    Case(2, limits(1, 1), Faults(expire=2), LOST),
    Case(2, limits(1, 2), Faults(leave=1, stop=1), STOPPED),
    Case(2, limits(1, 2), Faults(leave=1, expire=1), LOST),
    Case(2, limits(1, 2), Faults(expire=1, late=1), LOST),
    Case(2, limits(1, 2), Faults(expire=1, lost=1, fail=1), LOST),
    Case(2, limits(1, 2), Faults(expire=1, done=2), LOST),
    Case(2, limits(1, 2), Faults(stop=1, late=1), STOPPED),
    Case(2, limits(1, 2), Faults(stop=1, slow=1, fail=1), STOPPED),
    Case(2, limits(1, 2), Faults(stop=1, done=2), STOPPED),
    Case(3, limits(1, 3), Faults(crash=1), LOST),
    Case(3, limits(1, 2), Faults(crash=1), LOST),
    Case(3, limits(2, 3), Faults(leave=1), LEAVING),
    Case(3, limits(2, 3), Faults(lost=1)),
    Case(3, limits(2, 3), Faults(fail=2)),
    Case(3, limits(2, 2), Faults(expire=1), LOST),
    Case(3, limits(2, 2), Faults(stop=1), STOPPED),
]
