"""Signals at any time of an agent's life: a line tells each, and the exit code is the log's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job import ROOT
from tests.support.processes import command

pytestmark = pytest.mark.timeout(300)
PATIENCE = 90.0
LAUNCH = "import sys; from elastic_etcd import launch; sys.exit(launch.main())"


class Launched:
    """A launcher without an etcd of others, and what it says."""

    def __init__(self, folder: Path, *flags: str, code: str = LAUNCH) -> None:
        self._said = folder / "said"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *flags],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._said.read_text()

    def catches(self, number: int) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        _, _, caught = status.partition("SigCgt:")
        return bool(caught and int(caught.split()[0], 16) >> number - 1 & 1)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise AssertionError(self.output)
            time.sleep(0.001)

    def says(self, text: str) -> None:
        self.until(lambda: text in self.output)

    def ends(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()


@pytest.mark.parametrize("leaves", [False, True])
def test_the_exit_code_of_the_log_stays_whatever_comes_then(
    tmp_path: Path, *, leaves: bool
) -> None:
    """As when a pod is deleted as its job succeeds, or Slurm sends SIGTERM twice."""
    worker = ("--no-python", "sh", "-c", "echo begun; " + ("exec sleep 60" if leaves else "exit 0"))
    agent = Launched(tmp_path, "--leave-exit-code", "0", *worker)
    agent.says("begun")
    if leaves:
        agent.process.terminate()
    agent.until(lambda: not agent.catches(signal.SIGTERM))
    agent.process.terminate()
    assert agent.ends() == 0, agent.output
    assert ("has left it (exit 0)" if leaves else "succeeded") in agent.output


LATE = "from elastic_etcd import times; times.LEFTOVERS = 60\n" + LAUNCH  # so that no load matters
DAEMON = """
setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 600' &
until test -e daemon; do sleep 0.1; done
echo begun
"""


@pytest.mark.parametrize("trains", [False, True])
def test_a_second_signal_ends_all_at_once(tmp_path: Path, *, trains: bool) -> None:
    """Also what a worker has left behind, for which an agent would wait now."""
    (tmp_path / "worker").write_text(DAEMON + ("exec sleep 600" if trains else ""))
    worker = ("--leave-deadline=600", "--no-python", "sh", "worker")
    agent = Launched(tmp_path, *worker, code=LATE)
    agent.says("begun" if trains else "succeeded")
    agent.process.send_signal(signal.SIGINT)
    agent.says("once more to leave at once" if trains else "once more to end at once")
    agent.process.send_signal(signal.SIGINT)
    assert agent.ends() == (130 if trains else 0), agent.output
    assert "leaving at once" in agent.output
    assert ("SIGINT: leaving" in agent.output) == trains
    assert "sleep" not in command(int((tmp_path / "daemon").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_start_with_a_line(tmp_path: Path, number: signal.Signals) -> None:
    """While a check runs, which may take minutes; the etcd of its own is up by then."""
    check = "--health-check=touch begun; exec sleep 600"
    agent = Launched(tmp_path, check, "--no-python", "true")
    agent.until((tmp_path / "begun").exists)
    agent.process.send_signal(signal.SIGUSR1)  # asks for a record: there is none yet
    agent.process.send_signal(number)
    assert agent.ends() == 128 + number, agent.output
    assert f"warning: {number.name}: this node has not joined" in agent.output
    assert "Traceback" not in agent.output
    assert agent.output.count("\n") == 2, "the start, and this"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_imports(tmp_path: Path, number: signal.Signals, code: int) -> None:
    early = f"import os, signal; os.kill(os.getpid(), {number:d})"
    hook = "from elastic_etcd.agent import directories\n"
    hook += f"directories.find_temporary_directory = lambda: exec({early!r})\n" + LAUNCH
    agent = Launched(tmp_path, "--no-python", "true", code=hook)
    assert agent.ends() == code, agent.output
    assert "Traceback" not in agent.output
    assert agent.output.count("\n") == 1, agent.output


def test_a_ctrl_c_before_an_agent_is_loaded(tmp_path: Path) -> None:
    hook = "from elastic_etcd.system import kernel\n"
    hook += "def check(): raise KeyboardInterrupt\nkernel.check = check\n" + LAUNCH
    agent = Launched(tmp_path, "--no-python", "true", code=hook)
    assert agent.ends() == 130, agent.output
    assert agent.output.endswith("SIGINT: this node ends\n")
    assert "Traceback" not in agent.output
