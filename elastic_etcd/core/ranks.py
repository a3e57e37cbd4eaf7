"""Who takes part in a world, and at which place.

Survivors keep their place, a newcomer takes a free place, else places close up, so that a
change moves as few ranks as can be and rank 0 stays where it is (pytorch#67615, #99684).
Place 0 is a survivor's as long as there is one: DDP begins with what rank 0 has.
Newcomers come in the order of topology label and natural node name: node2 before node10
(pytorch#191190).
"""

import re
from collections.abc import Iterable, Sequence

from elastic_etcd.core.values import Member

_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which runs of digits compare as numbers."""
    parts = _NUMBER.split(name)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts if p)


def order(members: Iterable[Member]) -> list[Member]:
    """Newcomers in the order in which they take places."""
    return sorted(members, key=lambda m: (natural(m.topology), natural(m.node), m.lease))


def choose(
    ready: Sequence[Member], places: Sequence[int], coordinator: int, most: int
) -> list[Member]:
    """At most `most` of `ready`: survivors of `places` first, then the coordinator, then others.

    The coordinator always takes part, so that its end is never a spare's end: a spare's
    death must not cost the others a restart.
    """
    seat = {lease: place for place, lease in enumerate(places)}
    survivors = [m for m in ready if m.lease in seat]
    survivors.sort(key=lambda m: seat[m.lease])
    others = [m for m in order(ready) if m.lease not in seat]
    others.sort(key=lambda m: m.lease != coordinator)
    return (survivors + others)[:most]


def assign(chosen: Sequence[Member], places: Sequence[int]) -> tuple[Member, ...]:
    """`chosen` in rank order, given the leases of the last world in rank order."""
    by_lease = {m.lease: m for m in chosen}
    seats = [by_lease.get(lease) for lease in places]
    first = next((i for i, seat in enumerate(seats) if seat is not None), 0)
    if first:
        seats[0], seats[first] = seats[first], None
    survivors = frozenset(places)
    newcomers = iter(order(m for m in chosen if m.lease not in survivors))
    filled = [seat if seat is not None else next(newcomers, None) for seat in seats]
    return (*(seat for seat in filled if seat is not None), *newcomers)
