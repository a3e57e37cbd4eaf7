"""What scripts/bench has measured is drawn later, from its file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import ROOT

# Of no measurement.
STAGES = {"title": "t", "stages": {"prefork": {"exit seen": 0.001, "first step done": 0.1}}}
SAMPLES = {"title": "t", "samples": {"prefork": {"worker SIGKILLed": [0.1, 0.2, "job lost"]}}}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (STAGES, {"prefork: ms after SIGKILL of a worker, medians", "first step done"}),
        (SAMPLES, {"prefork", "worker SIGKILLed"}),
    ],
)
def test_a_file_is_drawn_as_svg(found: dict[str, Any], shown: set[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")  # scripts/bench brings it
    (tmp_path / "found.json").write_text(json.dumps(found))
    drawing = tmp_path / "drawing.svg"
    command = [sys.executable, "-m", "scripts.bench_lib", "recovery", "--from"]
    subprocess.run([*command, tmp_path / "found.json", "--plot", drawing], cwd=ROOT, check=True)
    assert [text for text in shown if f">{text}<" not in drawing.read_text()] == []
