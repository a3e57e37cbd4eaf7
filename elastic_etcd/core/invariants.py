"""Checks of I2, I3, I4 and I8 (rules.py) on one agent: after each step, under --log-level debug.

tests/model checks far more, and this on each step of theirs; a real job has other views.
"""

from collections.abc import Sequence

from elastic_etcd.core.lifecycle import Action, StartWorkers, State, Write
from elastic_etcd.core.requests import scaled
from elastic_etcd.core.rules import Finalise
from elastic_etcd.core.schema import Participant, Phase, Round


def violated(after: State, actions: Sequence[Action]) -> str:
    """Say which invariant a step to the state `after` has broken, "" if none. Pure."""
    local = after.local
    if local.running and local.running != local.ran:
        return f"I3: workers of generation {local.running} live, {local.ran} was started last"
    for action in actions:
        match action:
            case StartWorkers(begins, part):
                if why := _wrong_start(after, begins, part):
                    return why
            case Write(Finalise(_, final, _, world)):
                if why := _wrong_size(after, len(world)) or _wrong_world(final, world):
                    return why
    return ""


def _wrong_start(after: State, begins: Round, part: Participant) -> str:
    if begins.phase is not Phase.FINAL or begins.master is None:
        return f"I8: workers start on a round that is {begins.phase}"
    if part.lease != after.local.lease:
        return f"I2: workers start as another member's: {part}"
    fits = part.group_rank < begins.nodes and part.first_rank + part.nproc <= begins.world_size
    return "" if fits else f"I8: {part} has no place in a world of {begins.nodes} nodes"


def _wrong_size(state: State, nodes: int) -> str:
    if state.view is None or state.limits is None:
        return "I4: a world begins that nobody has seen"
    limits = scaled(state.view, state.local.run, state.limits)
    return "" if limits.largest(nodes) == nodes else f"I4: a world of {nodes}: {limits.nnodes}"


def _wrong_world(final: Round, world: Sequence[Participant]) -> str:
    """Whether not each incarnation is in it once, or its ranks leave a gap."""
    leases = {p.lease for p in world}
    if len(leases) != len(world) or final.nodes != len(world):
        return f"I4: {len(leases)} members in a world of {final.nodes}: {world}"
    ranks = 0
    for group_rank, part in enumerate(world):
        if (part.group_rank, part.first_rank) != (group_rank, ranks):
            return f"I8: {part} comes at group rank {group_rank}, rank {ranks}"
        ranks += part.nproc
    return "" if ranks == final.world_size else f"I8: {ranks} ranks, not {final.world_size}"
