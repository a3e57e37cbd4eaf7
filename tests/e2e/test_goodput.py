"""scripts/bench goodput: how it counts, and a moment of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_lib.goodput import Plan, Played
from scripts.bench_lib.nodes import Stream
from tests.support.job import ROOT


def stream(first: int, *steps: float) -> Stream:
    return Stream("", 0, first=first, steps=list(steps))


def test_steps_that_are_trained_again_count_once() -> None:
    before, after = stream(1, 1.0, 2.0, 3.0, 4.0), stream(3, 7.0, 8.0, 9.0, 10.0)
    played = Played(0.0, 10.0, ((4.5, "worker"),), [before, after])
    assert played.steps(0.0, 4.5) == 4
    assert played.steps(4.5, 8.5) == 0, "they go on from the second step's file"
    assert played.steps(0.0, 10.0) == 6
    assert played.rate() == 0.6
    assert played.costs(1.0) == [("worker", 3.5)]


def test_a_fault_is_paid_for_until_the_next_one() -> None:
    played = Played(0.0, 10.0, ((2.0, "worker"), (6.0, "node")), [stream(1, *range(1, 11))])
    assert played.costs(1.0) == [("worker", 0.0), ("node", 0.0)]
    assert played.costs(2.0) == [("worker", 2.0), ("node", 2.0)]


def test_nodes_die_between_workers() -> None:
    plan = Plan(seconds=91, undisturbed=10, worker_every=15, node_every=45)
    workers = plan.faults(nodes=False)
    assert [(fault.at, fault.node) for fault in workers] == [
        *((15, 0), (30, 1), (45, 0), (60, 1), (75, 0), (90, 1)),
    ]
    both = plan.faults(nodes=True)
    assert [fault.at for fault in both if fault.kind == "node"] == [22.5, 67.5]
    assert set(workers) < set(both)


@pytest.mark.nightly(part="jobs")
@pytest.mark.timeout(600)
def test_a_moment_of_it(tmp_path: Path) -> None:
    file = tmp_path / "goodput.json"
    options = ("--undisturbed=2", "--seconds=4", "--worker-every=0", "--node-every=2")
    which = ("--only=in process", f"--json={file}")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_lib", "goodput", *options, *which],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["samples"]["in process"]
    shares = [figures for name, figures in found.items() if name.endswith(": steps")]
    assert len(shares) == 1
    assert shares[0][0] > 0
    assert len(found["lost by a node's death and its return"]) == 2
