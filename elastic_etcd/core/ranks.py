"""Assigns ranks: chooses the members of a world, and says which group rank each gets.

Survivors keep their group rank, a newcomer takes a free one, else ranks close up, so that a
change moves as few of them as can be and rank 0 stays where it is (pytorch#67615, #99684).
Group rank 0 is a survivor's as long as there is one: DDP begins with what rank 0 has.
Newcomers come in the order of topology label and natural node name: node2 before node10
(pytorch#191190).
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.core.schema import Lease, Member, Participant

_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which runs of digits compare as numbers."""
    parts = _NUMBER.split(name)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts if p)


def order(members: Iterable[Member]) -> list[Member]:
    """The newcomers in the order in which they take free group ranks."""
    return sorted(members, key=lambda m: (natural(m.topology), natural(m.node), m.lease))


def choose(
    ready: Sequence[Member], group_ranks: Sequence[int], coordinator: int, most: int
) -> list[Member]:
    """At most `most` of `ready`: survivors first, then the coordinator, then others.

    `group_ranks` are the leases of the last world in rank order. The coordinator takes part
    where it can, before other survivors, too, so that it is one node that can be lost and not two.
    """
    rank_of = {lease: rank for rank, lease in enumerate(group_ranks)}
    survivors = [m for m in ready if m.lease in rank_of]
    survivors.sort(key=lambda m: (m.lease != coordinator, rank_of[m.lease]))
    others = [m for m in order(ready) if m.lease not in rank_of]
    others.sort(key=lambda m: m.lease != coordinator)
    return (survivors + others)[:most]


def assign(chosen: Sequence[Member], group_ranks: Sequence[int]) -> tuple[Member, ...]:
    """`chosen` in rank order, given the leases of the last world in rank order."""
    by_lease = {m.lease: m for m in chosen}
    world = [by_lease.get(lease) for lease in group_ranks]
    first = next((rank for rank, member in enumerate(world) if member), 0)
    if first:
        world[0], world[first] = world[first], None
    survivors = frozenset(group_ranks)
    newcomers = iter(order(m for m in chosen if m.lease not in survivors))
    filled = [member or next(newcomers, None) for member in world]
    return (*(member for member in filled if member), *newcomers)


def ranked(world: Sequence[Member]) -> tuple[Participant, ...]:
    """`world`, which is in rank order, with each node's group rank and first rank."""
    sizes: Counter[str] = Counter()
    participants = []
    for group_rank, m in enumerate(world):
        at = Lease(m.lease), m.node, m.nproc, group_rank, sizes.total(), sizes[m.role]
        participants.append(Participant(*at))
        sizes[m.role] += m.nproc
    if len(sizes) == 1:
        return tuple(replace(part, role_rank=UNSET) for part in participants)
    both = zip(world, participants, strict=True)
    return tuple(replace(part, role_size=sizes[m.role]) for m, part in both)
