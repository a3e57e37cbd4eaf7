"""The pieces of sharded tensors: their places, and the parts that ranks pass on for another world.

A piece is a box of a tensor: an offset and a length in each dimension. All here is a function of
what all ranks know alike, so that they agree on each transfer without a word.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A part of a tensor."""

    name: str
    offset: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    def overlap(self, other: "Piece") -> "Piece | None":
        """The part that is in both, if any."""
        if self.name != other.name:
            return None
        begin, shape = [], []
        boxes = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        for own, length, its, its_length in boxes:
            start = max(own, its)
            stop = min(own + length, its + its_length)
            if stop <= start:
                return None
            begin.append(start)
            shape.append(stop - start)
        return Piece(self.name, tuple(begin), tuple(shape))

    def within(self, outer: "Piece") -> tuple[slice, ...]:
        """The slices by which it is found in the piece around it."""
        starts = [own - its for own, its in zip(self.offset, outer.offset, strict=True)]
        return tuple(
            slice(start, start + length) for start, length in zip(starts, self.shape, strict=True)
        )


class Transfer(NamedTuple):
    """A part that a rank takes from a piece which it holds, and gives to a rank: maybe itself."""

    part: Piece
    source: Piece
    target: Piece
    sender: int
    receiver: int


class Holder(NamedTuple):
    """A rank, and the pieces of a commit that it has in memory: its own and copies of others'."""

    node: int
    pieces: Sequence[Piece]


def transfers(
    holders: Sequence[Holder],
    needs: Sequence[Iterable[Piece]],
    sizes: Mapping[str, int],
    rank: int,
) -> list[Transfer]:
    """The transfers from this rank and to it, between two ranks in an order that both know.

    needs: of each rank; sizes: the number of elements of each tensor. A rank takes what it has
    itself, then what its node has; the others are asked in turn. Raises KeyError, on all ranks
    alike, with the name, for a tensor of which a part is nowhere.
    """
    found: dict[str, dict[Piece, list[int]]] = {name: {} for name in sizes}
    for other, holder in enumerate(holders):
        for piece in holder.pieces:
            found[piece.name].setdefault(piece, []).append(other)
    for name, size in sizes.items():
        if sum(piece.size for piece in found[name]) != size:
            raise KeyError(name)
    every = {name: list(enumerate(pieces.items())) for name, pieces in found.items()}
    own = {name: [each for each in pieces if rank in each[1][1]] for name, pieces in every.items()}
    made = []
    for receiver, wanted in enumerate(needs):
        sources = every if receiver == rank else own
        for target in wanted:
            for n, (source, ranks) in sources[target.name]:
                if part := source.overlap(target):
                    sender = _nearest(ranks, holders, receiver, receiver + n)
                    if rank in (sender, receiver):
                        made.append(Transfer(part, source, target, sender, receiver))
    return made


def _nearest(ranks: list[int], holders: Sequence[Holder], receiver: int, turn: int) -> int:
    if receiver in ranks:
        return receiver
    near = [rank for rank in ranks if holders[rank].node == holders[receiver].node]
    return (near or ranks)[turn % len(near or ranks)]


class Place(NamedTuple):
    """A rank that is about to commit, as the others know it."""

    node: int
    label: int  # a checksum of its node's topology label
    table: int  # a checksum of its pieces: ranks with the same are replicas of each other
    leaves: bool  # with its node, after this commit


def partners(places: Sequence[Place], copies: int) -> list[list[int]]:
    """For each rank the ranks on other nodes that are to keep a copy of its pieces.

    copies: how many nodes, of those that stay, are to have each piece, replicas among them. Nodes
    with another topology label come first, then those that keep less, then those that are far: in
    the order of ranks neighbours are likely to fail together.
    """
    order = {n: at for at, n in enumerate(sorted({place.node for place in places}))}
    labels = {place.node: place.label for place in places}
    having = _nodes_by_table(places)
    staying: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        if not place.leaves:
            staying.setdefault(place.node, []).append(rank)
    far = {step: turn for turn, step in enumerate(_far_first(len(order), copies))}
    kept, seen = Counter[int](), Counter[int]()
    found: list[list[int]] = []
    for node, _, table, _ in places:
        nodes, local = having[table], seen[node]
        seen[node] += 1
        targets = {
            other: ranks[local % len(ranks)]
            for other, ranks in staying.items()
            if other not in nodes and other != node
        }
        found.append([])
        while targets and len(nodes) < copies:
            taken = {labels[each] for each in nodes}
            best = min(
                targets,
                key=lambda other: (
                    labels[other] in taken,
                    kept[targets[other]],
                    far[(order[other] - order[node]) % len(order)],
                ),
            )
            nodes.add(best)
            kept[targets[best]] += 1
            found[-1].append(targets.pop(best))
    return found


def _nodes_by_table(places: Sequence[Place]) -> dict[int, set[int]]:
    """The nodes that have the pieces of each table, and stay."""
    found: dict[int, set[int]] = {place.table: set() for place in places}
    for place in places:
        if not place.leaves:
            found[place.table].add(place.node)
    return found


def _far_first(nodes: int, copies: int) -> list[int]:
    """Steps from a node to all others: those that part the circle evenly first."""
    several = max(2, min(copies, nodes))
    even = [k * nodes // several for k in range(1, several)]
    return list(dict.fromkeys([*even, *range(1, nodes)]))
