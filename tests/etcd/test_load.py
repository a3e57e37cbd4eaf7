"""Jobs that come and go leave nothing behind; no times, a moment of `scripts/bench load`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_jobs_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    options = ("--jobs=3", "--minutes=0.1", "--period=0.5", "--ttl=2", f"--json={file}")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_lib", "load", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert file.exists(), done.stderr
    found = json.loads(file.read_text())
    assert found["left"] == {"keys": 0, "leases": 0}
    assert found["counts"]["jobs"] >= 3
    assert sum(found["counts"].values()) > found["counts"]["jobs"], "and agents, too"
    assert found["lag"]["count"] > 0
    assert found["courses"]["leases"]["most"] >= 3
