"""The unit of examples/systemd: systemd accepts it, and it agrees with the agent."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_etcd.launch import parse
from elastic_etcd.times import CHILD_GONE, KILLED, LEAVE_TIMEOUT, REVOKE_TIMEOUT

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "systemd" / "elastic-etcd@.service"


def settings() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))


def verified(folder: Path, text: str) -> str:
    """What systemd finds wrong with the unit, as a file there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    text = text.replace("/opt/venv/bin/python", sys.executable)
    (folder / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(folder / "elastic-etcd@digits.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "elastic-etcd@" in line]
    assert ours or not done.returncode, done.stderr
    return "\n".join(ours)


def test_o11_systemd_accepts_it(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert verified(tmp_path, text) == ""
    assert "KillMod" in verified(tmp_path, text.replace("KillMode=", "KillMod="))
    assert "soon" in verified(tmp_path, text.replace("RestartSec=10", "RestartSec=soon"))


def test_o11_it_starts_a_node_and_gives_it_the_time_to_leave(tmp_path: Path) -> None:
    known = settings()
    python, module, package, *arguments = shlex.split(known["ExecStart"].replace("%i", "digits"))
    assert (python, module, package) == ("/opt/venv/bin/python", "-m", "elastic_etcd.launch")
    (tmp_path / arguments[-1]).touch()
    given = [*arguments[:-1], str(tmp_path / arguments[-1])]
    config = parse(given, {"PET_ETCD": "etcd1:2379,etcd2:2379", "PET_NNODES": "2:8"})
    assert (config.job, config.limits.min_nodes, config.limits.max_nodes) == ("digits", 2, 8)
    leaves = KILLED + 2 * (LEAVE_TIMEOUT + REVOKE_TIMEOUT) + CHILD_GONE
    assert int(known["TimeoutStopSec"]) >= config.limits.leave_deadline + leaves
    assert known["KillMode"] == "mixed", "workers get SIGTERM from the agent, when it is time"


def test_o11_the_job_s_variables_are_nobody_else_s(tmp_path: Path) -> None:
    """There may be a password among them."""
    lines = re.findall(r"^#   (install .*|.*printf .*)$", UNIT.read_text(), re.MULTILINE)
    script = "\n".join(lines).replace("/etc/", f"{tmp_path}/")
    subprocess.run(["sh", "-ec", script], check=True)
    file = tmp_path / "elastic-etcd" / "resnet-7.env"
    assert "PET_NNODES=2:8\n" in file.read_text()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o750)


def test_o11_exit_codes_mean_to_systemd_what_they_mean() -> None:
    page = (ROOT / "docs/failures.md").read_text().partition("## Exit codes")[2]
    rows = dict(re.findall(r"^\| ([\w +]+) \| (.*) \|$", page, re.MULTILINE))
    known = settings()
    assert known["Restart"] == "on-failure"
    assert known["SuccessExitStatus"] == "143"
    assert "143 for SIGTERM" in rows["128 + n"]
    assert known["RestartPreventExitStatus"].split() == ["2", "3", "9"]
    assert "wrong usage" in rows["2"]
    assert "--max-restarts" in rows["3"]
    assert "made no progress" in rows["9"]
