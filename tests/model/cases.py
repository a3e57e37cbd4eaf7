"""The searches: in each run of the tests, every night, and before a release."""

from typing import NamedTuple

from msgspec import structs

from elastic_etcd.core.schema import Limits
from tests.model.explore import Result, Search
from tests.model.node import Faults

FOREVER = float("inf")
BEFORE_FINAL = ("setup", "joinable", "frozen")

# Labels of transitions, see world.py; a search that never takes them proves nothing of them.
LOST = (
    *(f"claim: written, instead of one lost in {p}" for p in BEFORE_FINAL),
    "takeover: written, instead of one lost in final",
)
DONE_AND_LOST = ("takeover: written, instead of one done and lost in final",)
LEAVING = tuple(  # in frozen it has nothing to stop and is gone at once
    f"claim: written, instead of one leaving in {p}" for p in ("setup", "joinable", "final")
)
ACKED_AND_DEAD = tuple(
    f"dies in {phase}{role}, acked"
    for phase in ("joinable", "frozen", "final")
    for role in ("", ", coordinator")
)
TAKEN = (  # revoked under a live agent, which an agent that takes it for dead may do at any time
    "its lease is taken",
    *(f"its lease is taken, the coordinator's in {p}" for p in (*BEFORE_FINAL, "final")),
)
STOPPED = tuple(
    f"stopped, its lease ends, the coordinator's in {p}" for p in (*BEFORE_FINAL, "final")
)
LISTED_AGAIN = ("is listed again", "is not listed again")  # after its lease has ended
RESTORED = ("finds an older etcd", "its lease was never")
LEFT_OUT = ("has waited, the time of a suspect",)

DRAINED = ("is drained", "is undrained", "comes back")
HALTED = "is told to stop the job"
FEWER, MORE = (f"is told of {fault} nodes" for fault in ("fewer", "more"))

CUT_OFF = ("hears nothing of etcd", "has waited", "old lease ends, the coordinator's in final")


def limits(least: int, most: int, restarts: int = 1) -> Limits:
    return Limits(least, most, max_restarts=restarts, settle=1.0, join_timeout=FOREVER)


def in_vain(restarts: int = 3, most: int = 1) -> Limits:
    """So many restarts that come no further end the job."""
    return structs.replace(limits(1, 2, restarts), stop_after_no_progress=most)


STRICT = structs.replace(limits(1, 2), cut_off=3.0)
LISTED = structs.replace(limits(1, 3), sizes=(1, 3))


def wary(least: int, most: int, restarts: int = 1, after: int = 1) -> Limits:
    """Each failure is a rapid one, and after so many a node is a suspect."""
    asked = limits(least, most, restarts)
    return structs.replace(asked, min_uptime=FOREVER, suspect_after=after)


HASTY = structs.replace(limits(2, 2), join_timeout=1.0)


class Case(NamedTuple):
    """A search, and the labels that it must have reached."""

    agents: int
    limits: Limits
    faults: Faults
    reaches: tuple[str, ...] = ()

    def __str__(self) -> str:
        asked = f"--nnodes {self.flags}, {self.limits.max_restarts} restarts"
        return f"{self.agents} agents, {asked}: {self.faults}"

    @property
    def flags(self) -> str:
        """What --nnodes is given, and the other flags that matter here."""
        asked = self.limits
        cut_off = "" if asked.cut_off is None else " --when-cut-off stop"
        wary = f" --suspect-after {asked.suspect_after}" if asked.min_uptime == FOREVER else ""
        most = asked.stop_after_no_progress
        vain = (
            f" --stop-after-no-progress {most}"
            if most != Limits(1, 1).stop_after_no_progress
            else ""
        )
        return f"{asked.nnodes}{cut_off}{wary}{vain}"

    def run(self) -> Result:
        return Search(self.limits, self.agents, self.faults).run()


# In each run of the tests.
SMALL = [
    Case(1, limits(1, 1), Faults(expire=3, fail=1), ("learns of it while joining",)),
    Case(2, limits(1, 1), Faults(expire=1), LISTED_AGAIN),
    Case(2, limits(1, 2), Faults(expire=1), LISTED_AGAIN),
    Case(2, limits(1, 2), Faults(crash=1, fail=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2), Faults(fail=2)),
    Case(2, limits(1, 2), Faults(fail=3, long=2), ("sees, after a long time",)),
    Case(2, limits(1, 2, restarts=3), Faults(early=2, crash=1), LOST),
    Case(2, in_vain(), Faults(poison=2, crash=1), LOST),
    Case(2, limits(1, 2), Faults(stop=1), STOPPED),
    Case(2, limits(1, 2), Faults(late=1, crash=1), LOST),
    Case(2, limits(1, 2), Faults(slow=2, fail=1), ("hears the answer",)),
    Case(2, limits(1, 2), Faults(slow=1, crash=1), LOST),
    Case(2, limits(1, 2), Faults(leave=1, crash=1), (*LOST, *LEAVING, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2), Faults(leave=1, fail=1), LEAVING),
    Case(2, limits(1, 2), Faults(leave=2), LEAVING),
    Case(2, limits(1, 2), Faults(leave=1, hang=1, tired=1), ("has waited",)),
    Case(2, limits(1, 2, restarts=0), Faults(fail=1, peer=1)),
    Case(2, limits(1, 2), Faults(peer=1, done=1)),
    Case(2, limits(1, 2), Faults(done=2, crash=1), (*LOST, *DONE_AND_LOST)),
    Case(2, limits(1, 2), Faults(done=1, crash=1, fail=1), DONE_AND_LOST),
    Case(2, limits(1, 2), Faults(done=1, leave=1, crash=1), DONE_AND_LOST),
    Case(2, limits(1, 1), Faults(crash=1, back=1), LOST),
    Case(2, limits(1, 2), Faults(newer=1, fail=1)),
    Case(2, limits(1, 2), Faults(hang=1, fail=1), ("hangs in joinable", "hangs in final, acked")),
    Case(2, limits(1, 2), Faults(tired=2, fail=1), ("has waited",)),
    Case(2, limits(1, 3), Faults(crash=1, fail=1), ("has waited",)),
    Case(2, HASTY, Faults(silent=2, crash=1), ("hears etcd again", "has waited")),
    Case(2, wary(1, 2), Faults(fail=2), LEFT_OUT),
    Case(2, wary(1, 2), Faults(fail=1, crash=1), (*LEFT_OUT, *LOST)),
    Case(2, wary(2, 2), Faults(fail=2)),
    Case(2, STRICT, Faults(silent=1, crash=1), CUT_OFF),
    Case(2, limits(1, 2), Faults(elastic=1, crash=1), (*LOST, "is elastic")),
    Case(2, limits(1, 2), Faults(elastic=1, fail=1, done=1), ("is elastic",)),
    Case(2, limits(1, 2), Faults(elastic=1, leave=1), ("is elastic",)),
    Case(2, limits(1, 2), Faults(elastic=1, finish=1, fail=1), ("finishes",)),
    Case(2, limits(1, 2), Faults(drain=1, crash=1), (*LOST, "is drained")),
    Case(2, limits(1, 2), Faults(halt=1, crash=1), (*LOST, HALTED)),
    Case(2, limits(1, 2), Faults(fewer=1, fail=1), (FEWER,)),
    Case(2, limits(1, 2), Faults(fewer=1, elastic=1), (FEWER, "is elastic")),
    Case(2, limits(1, 2), Faults(more=1, crash=1), (*LOST, MORE)),
    Case(2, limits(1, 1), Faults(restore=1), RESTORED),
]

# Seconds each: searched every night, with the small ones.
MEDIUM = [
    Case(2, limits(1, 2), Faults(expire=1, crash=1), (*LOST, *LISTED_AGAIN)),
    Case(2, limits(1, 2, restarts=3), Faults(early=2, fail=1)),
    Case(2, in_vain(), Faults(poison=2, fail=1)),
    Case(2, limits(1, 2), Faults(stop=1, crash=1), (*LOST, *STOPPED)),
    Case(2, limits(1, 2), Faults(late=2, fail=1)),
    Case(2, limits(1, 2), Faults(peer=2, crash=1), LOST),
    Case(2, limits(1, 2), Faults(done=1, crash=1, late=1), DONE_AND_LOST),
    Case(2, wary(1, 2, restarts=2, after=2), Faults(fail=3), LEFT_OUT),
    Case(2, limits(1, 2), Faults(crash=2, back=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(2, 2), Faults(crash=2, back=2), LOST),
    Case(2, limits(1, 2, restarts=2), Faults(fail=3, crash=1), (*LOST, *ACKED_AND_DEAD)),
    Case(2, limits(1, 2, restarts=2), Faults(fail=4, long=2), ("sees, after a long time",)),
    Case(2, in_vain(restarts=1, most=2), Faults(poison=3, long=2)),
    Case(2, limits(1, 2), Faults(expire=1, fail=1), (*LOST, *TAKEN)),
    Case(2, limits(1, 2), Faults(expire=2), (*TAKEN, *LISTED_AGAIN)),
    Case(2, limits(1, 2), Faults(expire=1, late=1), (*LOST, *LISTED_AGAIN)),
    Case(2, limits(1, 2), Faults(expire=1, lost=1), ("is listed again, its answer lost",)),
    Case(2, limits(1, 2), Faults(stop=1, fail=1), (*LOST, *STOPPED)),
    Case(2, limits(1, 2), Faults(lost=2, late=1, fail=1)),
    Case(2, wary(1, 2), Faults(crash=2, back=1), LOST),
    Case(2, STRICT, Faults(silent=1, fail=1), CUT_OFF),
    Case(2, STRICT, Faults(silent=1, leave=1), CUT_OFF),
    Case(2, limits(1, 2), Faults(drain=1, back=1), DRAINED),
    Case(2, limits(1, 2), Faults(halt=1, fail=1), (HALTED,)),
    Case(2, limits(1, 2), Faults(restore=1), RESTORED),
    Case(3, limits(1, 3), Faults(elastic=2), ("is elastic",)),
    Case(3, limits(2, 3), Faults(crash=1), (*LOST, *ACKED_AND_DEAD)),
    Case(3, limits(2, 2), Faults(crash=1), LOST),
    Case(3, limits(2, 3), Faults(fail=1)),
    Case(3, limits(2, 3), Faults(slow=1), ("hears the answer",)),
    Case(3, LISTED, Faults(crash=1), (*LOST, *ACKED_AND_DEAD, "has waited")),
    Case(3, wary(2, 3), Faults(fail=1), LEFT_OUT),
]

# Minutes and gigabytes: searched before a release.
LARGE = [
    Case(2, limits(1, 1), Faults(expire=2), LOST),
    Case(2, limits(1, 2), Faults(leave=1, stop=1), STOPPED),
    Case(2, limits(1, 2), Faults(leave=1, expire=1), LOST),
    Case(2, limits(1, 2), Faults(expire=1, lost=1, fail=1), LOST),
    Case(2, limits(1, 2), Faults(expire=1, done=2), (*LOST, *DONE_AND_LOST)),
    Case(2, limits(1, 2), Faults(stop=1, late=1), STOPPED),
    Case(2, limits(1, 2), Faults(stop=1, slow=1, fail=1), STOPPED),
    Case(2, limits(1, 2), Faults(stop=1, done=2), (*STOPPED, *DONE_AND_LOST)),
    Case(2, limits(1, 2), Faults(drain=1, fail=1), ("is drained",)),
    Case(2, limits(1, 2), Faults(drain=2), ("is drained",)),
    Case(2, limits(1, 2), Faults(drain=1, tired=1, hang=1), ("is drained", "has waited")),
    Case(2, limits(1, 2), Faults(drain=1, halt=1), ("is drained", HALTED)),
    Case(2, limits(1, 2), Faults(fewer=1, crash=1, back=1), (*LOST, FEWER)),
    Case(2, limits(1, 2), Faults(more=1, leave=1, back=1), (MORE,)),
    Case(2, limits(1, 2), Faults(fewer=1, drain=1), ("is drained", FEWER)),
    Case(2, limits(1, 2), Faults(restore=1, fail=1), RESTORED),
    Case(3, limits(2, 3), Faults(fewer=1), (FEWER,)),
    Case(3, limits(1, 3), Faults(crash=1), LOST),
    Case(3, limits(1, 2), Faults(crash=1), LOST),
    Case(3, limits(2, 3), Faults(leave=1), LEAVING),
    Case(3, limits(1, 3), Faults(elastic=2, crash=1), ("is elastic",)),
    Case(3, limits(1, 3), Faults(elastic=2, fail=1), ("is elastic",)),
    Case(3, limits(2, 3), Faults(lost=1)),
    Case(3, limits(2, 3), Faults(fail=2)),
    Case(3, limits(2, 2), Faults(expire=1), (*LOST, *TAKEN)),
    Case(3, limits(2, 2), Faults(stop=1), STOPPED),
]
