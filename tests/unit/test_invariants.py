"""What an agent that debugs finds wrong with its own step, were the rules wrong."""

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_etcd.core.invariants import violated
from elastic_etcd.core.lifecycle import StartWorkers, State, Write
from elastic_etcd.core.rules import Finalise, Local
from elastic_etcd.core.schema import (
    Ledger,
    Limits,
    Master,
    Participant,
    Phase,
    Requests,
    Round,
    Scale,
)
from elastic_etcd.core.view import Everything, View

FINAL = Round(3, Phase.FINAL, 0xA, "why", "r", "n1", 2, 3, Master("n1", 80))
A, B = Participant(0xA, "n1", 2, 0, 0), Participant(0xB, "n2", 1, 1, 2)
VIEW = View(9, Everything(), round=FINAL)
IDLE = State(Local("r", 0xA, 1, 1, ran=2), 2, view=VIEW, limits=Limits(2, 3))
TRAINS = replace(IDLE, local=replace(IDLE.local, running=3, ran=3))
OTHER = replace(TRAINS, local=replace(TRAINS.local, ran=2))


def begins(*world: Participant, **more: Any) -> Write:
    final = replace(FINAL, **more)
    return Write(Finalise("why", final, Ledger(3, 3, len(world)), world), 0xA, 3)


@dataclass
class Broken:
    """A step, and how what is found begins."""

    found: str
    action: Any
    after: State = TRAINS


BROKEN = {
    "of another start": Broken("I3: ", None, after=OTHER),
    "frozen": Broken("I8: ", StartWorkers(replace(FINAL, phase=Phase.FROZEN), A)),
    "in setup": Broken("I8: ", StartWorkers(Round(3, Phase.SETUP, 0xA, "why", "r"), A)),
    "another member's": Broken("I2: ", StartWorkers(FINAL, B)),
    "a group rank too high": Broken("I8: ", StartWorkers(FINAL, replace(A, group_rank=2))),
    "a rank too high": Broken("I8: ", StartWorkers(FINAL, replace(A, first_rank=2))),
    "too few": Broken("I4: ", begins(A, nodes=1, world_size=2)),
    "one twice": Broken("I4: ", begins(A, replace(A, group_rank=1, first_rank=2), world_size=4)),
    "another number": Broken("I4: ", begins(A, B, nodes=3)),
    "a gap between ranks": Broken("I8: ", begins(A, replace(B, first_rank=3), world_size=4)),
    "group ranks in another order": Broken("I8: ", begins(B, A)),
    "more ranks": Broken("I8: ", begins(A, B, world_size=4)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_an_invariant_is_found(name: str) -> None:
    broken = BROKEN[name]
    actions = [broken.action] if broken.action else []
    assert violated(broken.after, actions).startswith(broken.found)


def test_what_is_right_is_not() -> None:
    assert violated(TRAINS, [StartWorkers(FINAL, A)]) == ""
    assert violated(IDLE, [begins(A, B)]) == violated(TRAINS, []) == ""
    wanted = Requests(scale=Scale(1, 1, run="r", instead_of="2:3"))
    scaled = replace(IDLE, view=replace(VIEW, wanted=wanted))
    assert violated(scaled, [begins(A, nodes=1, world_size=2)]) == ""
    assert violated(scaled, [begins(A, B)]).startswith("I4: ")
