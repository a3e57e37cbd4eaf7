"""Sharded values of which bits flip in memory: none is loaded that is not as it was written."""

import os
import random
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.errors import MalformedState, PiecesLost, WrongHere
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_memfds import HEADER, Memfd
from tests.support.forked import ranks
from tests.support.sharded_worlds import builder, is_same, train, whole

FIRST = 1000  # the epoch of a state that begins
MANY = [pytest.mark.nightly(part="sharded"), pytest.mark.timeout(3600)]


def begun(rank: int) -> ElasticState:
    """A state of a node's only rank."""
    os.environ["GROUP_RANK"] = str(rank)
    return ElasticState(build=builder(3), first=set_first, epoch=0)


def set_first(state: ElasticState) -> None:
    state.epoch = FIRST


def store_of(state: ElasticState) -> Any:
    assert state._built
    return state._built._shards


def flip(memfd: Memfd, draws: random.Random) -> tuple[int, int]:
    """Flip a bit of a snapshot; where that was."""
    snapshot = memfd.snapshot()
    assert snapshot
    # As often in the header as in all the rest, which is much longer.
    end = len(snapshot.header.pack())
    body = range(HEADER, HEADER + snapshot.header.size)
    place = draws.choice([draws.randrange(end), draws.choice(body)])
    bit = 1 << draws.randrange(8)
    memfd.memory[place] ^= bit
    return place, bit


def flipped(rank: int, count: int) -> tuple[int, int]:
    """How often a piece with a flipped bit was not taken, and how often another one was."""
    draws = random.Random(rank)
    state = begun(rank)
    state.sync()
    for _ in range(2):
        train(state, rank)
        state.commit()
    store, version = store_of(state), state._snapshots.version()
    intact = {piece: each.clone() for piece, each in store._pieces_of(version).items()}
    memfds = [*store._own, *(memfd for pair in store._kept for memfd in pair)]
    refused = wrong = 0
    for _ in range(count):
        memfd = draws.choice(memfds)
        place, bit = flip(memfd, draws)
        found = store._pieces_of(version)
        refused += len(found) < len(intact)
        wrong += not all(is_same({"": each}, {"": intact[piece]}) for piece, each in found.items())
        memfd.memory[place] ^= bit
        assert len(store._pieces_of(version)) == len(intact)
    return refused, wrong


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=MANY)])
def test_no_piece_with_a_flipped_bit_is_taken(tmp_path: Path, count: int) -> None:
    for refused, wrong in ranks(2, tmp_path, flipped, count):
        assert wrong == 0
        assert count / 3 < refused < count * 2 / 3  # half of them are of the commit before


def synchronised(rank: int, count: int) -> list[str]:
    """What becomes of bits that flip in one or two of the four places where pieces are."""
    draws, own = random.Random(0), random.Random(rank)
    state = begun(rank)
    state.sync()
    became = []
    for _ in range(count):
        train(state, rank)
        state.commit()
        before, store = whole(state), store_of(state)
        places = draws.sample([(at, of) for at in (0, 1) for of in (0, 1)], draws.randint(1, 2))
        for at, of in places:
            if at == rank:
                flip(newest(store._own if of == rank else store._kept[0]), own)
        lost = len({of for _, of in places}) < len(places)  # a piece and its copy
        try:
            state.sync()
        except PiecesLost:
            assert lost
            state.sync()
            assert state.epoch == FIRST
        else:
            assert not lost
            assert is_same(whole(state), before)
        became.append("lost" if lost else "whole")
    return became


def newest(memfds: Sequence[Memfd]) -> Memfd:
    held = [
        (snapshot.header.version.age(), each) for each in memfds if (snapshot := each.snapshot())
    ]
    return max(held, key=lambda each: each[0])[1]


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=MANY)])
def test_a_copy_counts_where_a_bit_has_flipped(tmp_path: Path, count: int) -> None:
    one, other = ranks(2, tmp_path, synchronised, count)
    assert one == other
    assert {*one} == {"whole", "lost"}


def restored(rank: int) -> str:
    """What restore() says of damaged pieces; a sync then takes the copy."""
    state = begun(rank)
    state.sync()
    train(state, rank)
    state.commit()
    before, said = whole(state), ""
    train(state, rank)
    if rank == 1:
        flip(newest(store_of(state)._own), random.Random(1))
    try:
        state.restore()
    except MalformedState as error:
        said = str(error)
    state.sync()
    assert is_same(whole(state), before)
    return said


def test_damaged_pieces_are_not_restored_but_synchronised(tmp_path: Path) -> None:
    assert ranks(2, tmp_path, restored) == ["", "they are of another world, or damaged"]


def refused(rank: int) -> list[str]:
    """What commits say where one rank has no memory: first for its own pieces, then for a copy."""
    state = begun(rank)
    state.sync()
    train(state, rank)
    said = []
    for lacking in ("own", "copy"):
        store = store_of(state)
        memfds = store._own if lacking == "own" else [each for pair in store._kept for each in pair]
        for memfd in memfds:
            memfd.release()
        before = state._snapshots.version()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(Memfd, "clear", lacks)
            with pytest.raises((WrongHere, OSError)) as error:
                state.commit()
        said.append(str(error.value))
        assert state._snapshots.version() == before
        state.commit()
        after = whole(state)
        train(state, rank)
        state.restore()
        assert is_same(whole(state), after)
    return said


def lacks(memfd: Memfd, size: int) -> None:
    raise OSError(ENOSPC, f"{size} bytes are lacking of {memfd.capacity}")


def test_a_commit_for_which_a_rank_has_no_memory_is_refused_by_all(tmp_path: Path) -> None:
    others, its = ranks(2, tmp_path, refused)
    assert others == ["rank 1 has no memory for it"] * 2
    assert all("bytes are lacking" in each for each in its)
