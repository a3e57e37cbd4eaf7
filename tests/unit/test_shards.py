"""What remains of an epoch, wherever in a turn each rank has stopped."""

from dataclasses import replace
from itertools import product

import pytest

from elastic_etcd.train.data.shards import TAILS, Progress, Shards, Tail, slots_of


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [4, 2, 2], [3, 1, 2]])
@pytest.mark.parametrize("remaining", [(range(13),), (range(2, 9, 3), range(10, 17))])
def test_t23_what_remains_is_what_nobody_has_used(
    tail: Tail, sizes: list[int], remaining: tuple[range, ...]
) -> None:
    """Also in the middle of a turn, of which a rank with a larger batch has several slots."""
    slots = slots_of(sizes)
    shards = [Shards(17, remaining, slots, rank, tail) for rank in range(len(sizes))]
    without_pad = [replace(each, tail="uneven") if tail == "pad" else each for each in shards]
    given = [each.positions(0, each.size).tolist() for each in without_pad]
    everything = {position for part in remaining for position in part}
    for counts in product(*(range(each.size + 1) for each in shards)):
        used = {p for taken, count in zip(given, counts, strict=True) for p in taken[:count]}
        found = shards[0].remaining_after(counts)
        left = [position for part in found for position in part]
        assert sorted(left) == sorted(everything - used), (counts, slots)


@pytest.mark.parametrize(("recorded", "missed"), [(16, ""), (12, ""), (11, "11"), (0, "0")])
def test_a_loader_may_deliver_no_short_batch(recorded: int, missed: str) -> None:
    """Up to a step may be missing, which takes four of these 16 indices."""
    progress = Progress(Shards(16, (range(16),), (0, 0), 0, "drop"), 2)
    progress.count = recorded
    told = f"of 16 indices handed out in an epoch, {missed} were recorded" if missed else ""
    assert progress.missed_in_epoch(0, 16) == told
