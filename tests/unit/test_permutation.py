"""The keyed permutation: that it is one, and that it looks drawn by chance.

The draws are keyed, hence the same in every run: a bound that holds now holds for ever.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_etcd.train.data.permutation import Exact, Keyed, order_of


def chi_squared(observed: torch.Tensor, expected: float) -> float:
    """How many standard deviations from its mean the statistic lies."""
    freedom = observed.numel() - 1
    statistic = ((observed.double() - expected) ** 2 / expected).sum().item()
    return float(statistic - freedom) / math.sqrt(2 * freedom)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations from none."""
    both = torch.stack([a, b]).double()
    return float(torch.corrcoef(both)[0, 1]) * math.sqrt(a.numel())


@pytest.mark.parametrize("length", [1, 100, 4097, 65_536, 65_537, 1_000_003])
def test_each_index_comes_once(length: int) -> None:
    indices = Keyed(length, 3, 1)(torch.arange(length))
    assert torch.equal(indices.sort().values, torch.arange(length))


def test_each_index_comes_once_in_small_orders() -> None:
    for length in range(1, 130):
        indices = Keyed(length, 3, 1)(torch.arange(length))
        assert sorted(indices.tolist()) == list(range(length))


@settings(max_examples=100)
@given(st.integers(1, 1 << 62), st.integers(0, 1 << 64), st.integers(0, 1 << 32), st.data())
def test_far_positions_go_to_different_indices(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=50))
    indices = Keyed(length, seed, epoch)(torch.tensor(sorted(positions))).tolist()
    assert len(set(indices)) == len(positions)
    assert all(0 <= index < length for index in indices)


def test_blocks_do_not_matter() -> None:
    stream = Keyed(10**10, 1, 2)
    positions = torch.arange(0, 10**10, 10**7 - 1)
    one_by_one = torch.cat([stream(positions[i : i + 1]) for i in range(len(positions))])
    assert torch.equal(stream(positions), one_by_one)


@pytest.mark.parametrize(
    ("length", "indices"),
    [
        (10, [0, 6, 4, 5]),
        (1_000_003, [401260, 984616, 241532, 588045]),
        (
            3 << 60,
            [1436391790126310128, 283710173527447974, 2928359095886889518, 1059583744535547408],
        ),
    ],
)
def test_an_order_stays_what_it_was(length: int, indices: list[int]) -> None:
    """A training that another version of this program goes on with is in the middle of one."""
    positions = torch.tensor([0, 1, length // 2, length - 1])
    assert Keyed(length, 3, 1)(positions).tolist() == indices


def test_more_than_two_to_the_62_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2\*\*62"):
        Keyed((1 << 62) + 1, 0, 0)


@pytest.mark.parametrize(
    "length", [2, 3, 4, pytest.param(5, marks=pytest.mark.nightly(part="jobs"))]
)
def test_every_permutation_is_as_likely(length: int) -> None:
    draws = 12 * math.factorial(length)
    seen = Counter(
        tuple(Keyed(length, 5, epoch)(torch.arange(length)).tolist()) for epoch in range(draws)
    )
    every = [seen[p] for p in itertools.permutations(range(length))]
    assert abs(chi_squared(torch.tensor(every), 12)) < 4


@pytest.mark.parametrize("length", [17, pytest.param(100, marks=pytest.mark.nightly(part="jobs"))])
def test_every_index_is_as_likely_at_every_position(length: int) -> None:
    table = torch.zeros(length, length)
    draws = 12 * length
    for seed in range(draws):
        table[torch.arange(length), Keyed(length, seed, 0)(torch.arange(length))] += 1
    assert abs(chi_squared(table.flatten(), 12)) < 4


@pytest.mark.parametrize("length", [70_000, 10**8, 10**10, 1 << 40])
@pytest.mark.parametrize("stride", [1, 8, 1000])
def test_what_a_rank_gets_is_spread_evenly(length: int, stride: int) -> None:
    count = min(1 << 18, length // stride)
    indices = Keyed(length, 2, 7)(torch.arange(count) * stride)
    cells = min(
        256, max(4, count // 64)
    )  # few draws without replacement vary less than their share
    spread = torch.bincount(indices * cells // length, minlength=cells)
    assert -12 < chi_squared(spread, count / cells) < 4  # negative: more even than by chance
    parity = (indices % 2).sum().item()
    assert abs(parity - count / 2) < 4 * math.sqrt(count) / 2


@pytest.mark.parametrize("length", [10**6, 10**10])
def test_neighbours_ranks_and_epochs_are_unrelated(length: int) -> None:
    positions = torch.arange(1 << 18)
    now = Keyed(length, 2, 0)(positions)
    assert abs(correlation(now, positions)) < 4
    for lag in (1, 2, 8, 64):
        assert abs(correlation(now[lag:], now[:-lag])) < 4
    assert abs(correlation(now, Keyed(length, 2, 1)(positions))) < 4
    assert abs(correlation(now, Keyed(length, 3, 0)(positions))) < 4
    steps = (now[1:] - now[:-1]).remainder(length)  # neighbours at all distances alike
    assert abs(chi_squared(torch.bincount(steps * 256 // length, minlength=256), 1024)) < 4


def test_fixed_points_are_as_many_as_by_chance() -> None:
    length = 5000
    positions = torch.arange(length)
    fixed = [int((Keyed(length, 1, e)(positions) == positions).sum()) for e in range(400)]
    assert abs(sum(fixed) - 400) < 4 * math.sqrt(400)


def test_seeds_and_epochs_give_different_orders() -> None:
    positions = torch.arange(50)
    orders = {
        tuple(Keyed(50, seed, epoch)(positions).tolist())
        for seed in (-1, 0, 1, 2, 1 << 40)
        for epoch in range(40)
    }
    assert len(orders) == 200


def test_exact_takes_four_bytes_an_index() -> None:
    exact = order_of("exact", 1000, 7, 1)
    assert isinstance(exact, Exact)
    assert exact._indices.dtype == torch.int32
    drawn = torch.randperm(1000, generator=torch.Generator().manual_seed(8))
    assert torch.equal(exact(torch.arange(1000)).long(), drawn)
