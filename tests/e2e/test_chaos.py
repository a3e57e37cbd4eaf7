"""scripts/chaos for ninety seconds, what it says and what it plans."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from scripts.chaos_lib import nemesis, nodes
from scripts.chaos_lib.__main__ import main
from tests.support.job import ROOT


def chaos(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.chaos_lib", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly(part="chaos")
@pytest.mark.timeout(600)
def test_ninety_seconds(tmp_path: Path) -> None:
    """Of this seed, since few others have as many kinds of faults in so little time."""
    with chaos("--minutes", "1.5", "--seed", "14158", "--keep", str(tmp_path / "logs")) as process:
        said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    assert "job 2 of 2" in said
    assert "whole again" in said


@pytest.mark.nightly(part="chaos")
@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_training_and_reports(tmp_path: Path) -> None:
    arguments = ("--minutes", "9", "--seed", "1", "--keep", str(tmp_path / "logs"))
    with chaos(*arguments) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("burst 1 "))
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "violations" in said
    assert "job 2" not in said


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the command prints that only looks at its arguments."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["chaos", *arguments])
        assert main() == 0
        return capsys.readouterr().out

    return run


def test_the_schedule_is_printed_and_is_the_seed_s(command: Callable[..., str]) -> None:
    first, again, other = (command("--schedule", "--seed", seed) for seed in "112")
    assert first == again != other
    assert "burst 1:" in first


@pytest.mark.parametrize("wrong", [("--minutes", "0"), ("--seed", "x"), ("--keep", "/tmp")])
def test_wrong_usage(command: Callable[..., str], wrong: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command("--schedule", *wrong)


def test_no_burst_takes_the_state_of_all_nodes() -> None:
    agents, kinds = nodes.MAX_NODES, set()
    for burst in islice(nemesis.schedule(3, agents), 500):
        hit = [f.target for f in burst.faults if f.kind in nemesis.NODE_FAULTS]
        assert len(set(hit)) == len(hit) < nodes.FEWEST
        lost = sum(f.kind in nemesis.LOST for f in burst.faults)
        joined = sum(f.kind in nemesis.JOINS for f in burst.faults)
        agents += joined - lost
        assert agents == burst.agents
        assert nodes.FEWEST <= agents <= nodes.MOST
        kinds |= {f.kind for f in burst.faults}
    assert kinds == set(nemesis.Kind)


def test_what_costs_nothing_takes_no_node_and_brings_none() -> None:
    changing = {*nemesis.NODE_FAULTS, *nemesis.JOINS, *nemesis.OUTAGES, nemesis.Kind.SCALE}
    assert not nemesis.FREE & changing
    free = [burst.free for burst in islice(nemesis.schedule(3, nodes.MAX_NODES), 500)]
    assert 50 < sum(free) < 250
