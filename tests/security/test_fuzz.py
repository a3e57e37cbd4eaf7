"""What scripts/fuzz runs for hours, for a moment: without coverage, so that it needs no more."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FILE = Path(__file__).parents[2] / "scripts" / "fuzz_lib" / "targets.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_targets", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


targets = load()


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

    @settings(max_examples=60, deadline=None, database=None)
    @given(spoilt(seeds) | st.binary(max_size=200))
    def fuzz(data: bytes) -> None:
        run(data)

    fuzz()
