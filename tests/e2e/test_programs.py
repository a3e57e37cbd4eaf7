"""The programs that users run first: the demo, and its script under other launchers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import ROOT

pytestmark = pytest.mark.timeout(180)

DIGITS = str(ROOT / "examples" / "digits_ddp.py")


def run(*argv: str) -> str:
    """What a Python program prints; it must exit 0."""
    done = subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_demo() -> None:
    told = run(str(ROOT / "scripts" / "demo.py"))
    assert "green is killed" in told
    assert "the agents exited 0 and 0" in told


def test_the_demo_s_script_runs_under_other_launchers(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    common = (DIGITS, "--checkpoint-dir", str(tmp_path))
    assert "epoch 1/2  world 2" in run(*torchrun, *common, "--epochs", "2")
    told = run(*common, "--epochs", "4")
    assert "epoch 3/4  world 1" in told
    assert "epoch 1/" not in told, "it goes on from its checkpoint"
    assert "accuracy 0." in told


@pytest.mark.parametrize("disposition", ["SIG_DFL", "SIG_IGN"])
def test_the_terminal_s_end(disposition: str) -> None:
    """SIGHUP makes a node leave, but not under nohup, which has it ignored."""
    begin = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{disposition})"
    begin += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    agent = ("-m", "elastic_etcd.launch", "--no-python", "sh", "-c", "kill -HUP $PPID")
    done = subprocess.run(
        [sys.executable, "-c", begin, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("SIGHUP: leaving" in done.stderr) == (disposition == "SIG_DFL"), done.stderr


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&-"])
def test_closed_standard_streams(closed: str) -> None:
    """Nothing else may get their numbers, or a worker's output goes there and is stuck."""
    worker = "import sys; [print('x' * 4000, file=f) for f in (sys.stdout, sys.stderr) * 500]"
    agent = (sys.executable, "-m", "elastic_etcd.launch", "--no-python", sys.executable)
    shell = f'exec {closed}; exec "$@"'
    subprocess.run(
        ["sh", "-c", shell, "sh", *agent, "-c", worker],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )


def test_a_folder_of_our_name(tmp_path: Path) -> None:
    """`python -m` puts the working directory first: a clone's parent, say."""
    (tmp_path / "elastic_etcd").mkdir()
    agent = ("-m", "elastic_etcd.launch", "--no-python", "true")
    subprocess.run([sys.executable, *agent], cwd=tmp_path, check=True, timeout=60)


def test_torchrun_s_prefix_of_lines() -> None:
    agent = ("-m", "elastic_etcd.launch", "--role", "trainer", "--no-python", "echo", "hello")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}> "}
    done = subprocess.run(
        [sys.executable, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | template,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "<trainer/0> hello\n"
