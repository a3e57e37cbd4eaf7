"""A change costs each agent as much at any size: counted by etcd itself, no times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = ("formation", "node lost", "node joins", "coordinator lost", "worker fails")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What `scripts/bench scale` finds for 8 and for 32 agents, by the kind of change."""
    found = tmp_path_factory.mktemp("scale") / "scale.json"
    options = ("--sizes=8,32", f"--json={found}")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_lib", "scale", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.exists(), done.stderr
    changes = json.loads(found.read_text())["changes"]
    return {name: [c for c in changes if c["name"] == name] for name in CHANGES}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("what", "most"), [("requests", 13), ("watches", 11), ("events", 13)])
def test_a_change_costs_each_agent_no_more_when_there_are_many(
    counted: dict[str, list[dict[str, Any]]], change: str, what: str, most: int
) -> None:
    few, many = counted[change]
    assert (few["agents"], many["agents"]) in ((8, 32), (7, 31))
    assert few["counts"][what] <= most * few["agents"]
    assert many["counts"][what] <= most * many["agents"]


def test_each_change_is_one_generation(counted: dict[str, list[dict[str, Any]]]) -> None:
    assert all(c["generations"] == 1 for changes in counted.values() for c in changes)
