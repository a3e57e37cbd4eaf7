"""What scripts/fuzz runs for hours, for a moment: without coverage, so that it needs no more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.fuzz_lib import targets
from scripts.fuzz_lib.__main__ import TARGETS


@st.composite
def spoilt(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A seed of which some bytes are others."""
    data = draw(st.sampled_from(seeds))
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.integers(0, 8)))
    return data[:start] + draw(st.binary(max_size=8)) + data[end:]


@pytest.mark.parametrize("name", list(targets.SEEDS))
def test_a_moment_of_fuzzing(name: str) -> None:
    run = getattr(targets, f"fuzz_{name}")
    seeds = targets.SEEDS[name]
    for seed in seeds:
        run(seed)

    @settings(max_examples=60, database=None)
    @given(spoilt(seeds) | st.binary(max_size=200))
    def fuzz(data: bytes) -> None:
        run(data)

    fuzz()


def test_scripts_fuzz_runs_each_target() -> None:
    assert list(TARGETS) == list(targets.SEEDS)
