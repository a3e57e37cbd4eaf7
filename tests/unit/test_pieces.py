"""The plans by which pieces go from rank to rank: each rank makes its own part of them."""

import random
from itertools import pairwise
from math import prod

import pytest

from elastic_etcd.train.sharded.pieces import Holder, Piece, transfers

Wanted = list[list[Piece]]


def boxes(name: str, shape: tuple[int, ...], ranks: int, draws: random.Random) -> list[Piece]:
    """The parts of a tensor, one for each rank: some rows each, or none; halves of columns."""
    halves = 2 if len(shape) > 1 and ranks % 2 == 0 and draws.random() < 0.5 else 1
    rows = -(-shape[0] * halves // ranks)
    found = []
    for rank in range(ranks):
        begin = min(shape[0], rank // halves * rows)
        end = min(shape[0], begin + rows)
        left = (
            [0, *(shape[1] * half // halves for half in range(1, halves + 1))] if halves > 1 else []
        )
        columns = list(pairwise(left))[rank % halves] if left else None
        offset = (begin, columns[0]) if columns else (begin, *(0 for _ in shape[1:]))
        size = (end - begin, columns[1] - columns[0]) if columns else (end - begin, *shape[1:])
        found.append(Piece(name, offset, size))
    return found


def drawn(seed: int) -> tuple[list[Holder], Wanted, dict[str, int]]:
    """What ranks of a world have of an earlier one, with two copies, and need in theirs."""
    draws = random.Random(seed)
    before, ranks = draws.randint(1, 8), draws.randint(1, 8)
    shapes = {"a": (draws.randint(1, 20), 6), "b": (draws.randint(1, 20),)}
    had = [
        [],
        *zip(*(boxes(name, shape, before, draws) for name, shape in shapes.items()), strict=True),
    ]
    need = [
        *zip(*(boxes(name, shape, ranks, draws) for name, shape in shapes.items()), strict=True)
    ]
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    for pieces in had:
        for rank in draws.sample(range(ranks), min(2, ranks)):
            held[rank] += [each for each in pieces if each.size]
    holders = [Holder(draws.randrange(3), pieces) for pieces in held]
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    return holders, [list(each) for each in need], sizes


@pytest.mark.parametrize("seed", range(200))
def test_both_sides_of_each_transfer_know_it_and_all_that_is_needed_comes(seed: int) -> None:
    holders, needs, sizes = drawn(seed)
    plans = [transfers(holders, needs, sizes, rank) for rank in range(len(holders))]
    for sender, sends in enumerate(plans):
        for receiver, takes in enumerate(plans):
            one = [each for each in sends if (each.sender, each.receiver) == (sender, receiver)]
            assert one == [e for e in takes if (e.sender, e.receiver) == (sender, receiver)]
            assert all(each.source in holders[sender].pieces for each in one)
    for rank, plan in enumerate(plans):
        assert all(rank in (each.sender, each.receiver) for each in plan)
        for target in needs[rank]:
            parts = [e.part for e in plan if e.receiver == rank and e.target == target]
            assert sum(part.size for part in parts) == target.size
        own = [
            each for each in plan if each.receiver == rank and each.source in holders[rank].pieces
        ]
        assert all(each.sender == rank for each in own)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_nowhere_is_missed_by_all_alike(seed: int) -> None:
    holders, needs, sizes = drawn(seed)
    gone = next(piece for holder in holders for piece in holder.pieces)
    left = [Holder(node, [p for p in pieces if p != gone]) for node, pieces in holders]
    for rank in range(len(holders)):
        with pytest.raises(KeyError, match=gone.name):
            transfers(left, needs, sizes, rank)
