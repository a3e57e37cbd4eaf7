"""Pythons and kernels that lack system calls: a job trains there, and a killed worker is replaced.

Such a Python is conda's; a kernel before 5.3 answers ENOSYS, Docker before 20.10 EPERM, and Anolis
4.19 opens pidfds that it can't signal. A filter of seccomp stands for the kernels.
"""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import refused
from tests.support.job import ROOT

pytestmark = pytest.mark.timeout(300)
NIGHTLY = pytest.mark.nightly(part="jobs")

OLD_PYTHON = ROOT / "tests" / "support" / "old_python"
PIDFDS = "pidfd_open,pidfd_send_signal"
SCRIPT = """
import os, signal, subprocess
import torch
import elastic_etcd as ee

@ee.run(backend="gloo")
def train(state):
    while state.step < 6:
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()
        state.check()
        if state.step == 3 and state.first and os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "600"])
            os.kill(os.getpid(), signal.SIGKILL)
        state.first = state.step < 3

train(ee.ElasticState(model=torch.nn.Linear(2, 2), step=0, first=True))
print("trained", os.environ["RANK"], flush=True)
"""


def launch(
    script: Path, *argv: str, before: tuple[str, ...] = (), path: Path = ROOT
) -> tuple[int, str]:
    """The exit code and the output of a job of one node."""
    agent = (sys.executable, "-m", "elastic_etcd.launch", "--nproc-per-node", "2")
    done = subprocess.run(
        [*before, *agent, *argv, str(script)],
        env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def check_trains(code: int, told: str) -> None:
    assert code == 0, told
    assert sorted(re.findall(r"(?m)trained \d$", told)) == ["trained 0", "trained 1"]
    assert "worlds 2, restarts 1, " in told
    assert "Traceback" not in told


@NIGHTLY  # a kernel that lacks them is below, and tests/unit/test_kernel.py has both
@pytest.mark.parametrize("method", ["prefork", "exec"])
def test_m1_a_python_that_lacks_the_calls(script: Path, method: str) -> None:
    check_trains(*launch(script, "--start-method", method, path=OLD_PYTHON))


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        pytest.param(errno.ENOSYS, PIDFDS, id="before 5.3", marks=NIGHTLY),
        pytest.param(errno.EPERM, PIDFDS, id="a container's profile"),
        pytest.param(errno.ENOSYS, "pidfd_send_signal", id="Anolis 4.19", marks=NIGHTLY),
    ],
)
def test_m2_a_kernel_that_refuses_pidfds(script: Path, code: int, calls: str) -> None:
    told = launch(script, before=(sys.executable, refused.__file__, str(code), calls))
    check_trains(*told)
    assert f"{os.uname().release} " in told[1]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_m2_a_kernel_that_refuses_memory_files_is_named_before_joining(
    script: Path, code: int
) -> None:
    before = (sys.executable, refused.__file__, str(code), "memfd_create")
    ended, told = launch(script, before=before)
    assert ended == 2
    assert f"]: error: memfd_create: {os.strerror(code)}: Linux " in told
    assert "Traceback" not in told
