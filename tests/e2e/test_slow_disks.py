"""Disks that stand still, as a network file system does while its server fails over."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import disk_that_may_stand_still, standing_still
from tests.support.etcd import EtcdServer
from tests.support.job import TTL, Job
from tests.support.processes import send
from tests.support.residue import history
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

TIMES = 5
# Leaves a process in its group that no signal ends, as long as the disk stands still.
LEAVES = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["touch", sys.argv[1]])
while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "D":
    time.sleep(0.01)
"""
DROPPED = re.compile(r"\.\.\. (\d+) bytes dropped: the disk stood still")
TOLD = re.compile(r"warning: (\d+) bytes of the workers' output dropped")


def test_r1_a_disk_that_stands_still_ends_no_world(
    ticks: TickingJob, etcd: EtcdServer, tmp_path: Path
) -> None:
    """Under --log-dir and under the agents' stdout, for three times the lease's TTL."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with disk_that_may_stand_still(disk, tmp_path / "image"):
        talk = ("--fault", "chatter@step=2")
        agents = [
            ticks.start(node, *talk, log_dir=disk / node, output=disk) for node in ("n1", "n2")
        ]
        g = ticks.trains(2, seconds=60)
        with standing_still(disk):
            thawed = time.monotonic() + 3 * TTL
            for _ in range(TIMES):  # each is a line of the agent's
                send(signal.SIGUSR1, [agent.pid for agent in agents])
                ticks.goes_on(g)
            while time.monotonic() < thawed:
                ticks.goes_on(g)
        ticks.goes_on(g)
        for agent in agents:
            ticks.said(agent, "bytes of the workers' output dropped")
        ticks.finish(*agents)
        assert {event.generation for event in ticks.events()} == {g}
        assert list(history(etcd, ticks.name)) == [g]
        for agent in agents:
            assert agent.output.count("SIGUSR1: the last events are in") == TIMES, agent.output
            assert [line for line in agent.output.splitlines() if DROPPED.search(line)]
            files = [path.read_text() for path in (disk / agent.node).rglob("*.log")]
            lost = DROPPED.findall("\n".join([agent.output, *files]))
            assert sorted(lost) == sorted(TOLD.findall(agent.output)), "each is told in the log"


def test_r19_a_job_succeeds_beside_a_process_that_no_signal_ends(job: Job, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "script.py").write_text(LEAVES)
    script = (str(tmp_path / "script.py"), str(disk / "file"))
    with disk_that_may_stand_still(disk, tmp_path / "image"), standing_still(disk):
        flags: dict[str, Any] = {"script": script, "kill_timeout": 3, "start_method": "exec"}
        n1, n2 = (job.start(node, **flags) for node in ("n1", "n2"))
        for agent in (n1, n2):
            job.exits(agent, 0, seconds=90)
            assert "this node ends without them" in agent.output
